"""A route in Python that does wrong fails the requests of its batch, and the router goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest

from tests.algorithms.toys import toy_recipe
from tests.recipes_python import handoffs
from tokenflow.errors import RouteFailed
from tokenflow.router import Router
from tokenflow.types import Completion

pytestmark = pytest.mark.anyio

PROMPT = [1, 40, 50]
ANSWERS = {
    1: "raised ValueError at line ",
    2: "returned None",
    3: "returned a list of 2",
    4: "returned tensor([0.])",
    5: "returned 7 for row 0",
    6: "returned -1 for row 0",
    7: "returned a tensor of shape [1, 2]",
    8: "returned 1.0 for row 0",
    9: "raised SystemExit at line ",
}


@pytest.fixture
async def router(tmp_path: object) -> AsyncIterator[Router]:
    async with Router(toy_recipe(tmp_path, handoffs.faulty, slm={"salt": 1}, llm={"salt": 2})) as router:
        yield router


async def ask(router: Router, fault: int, tokens: int = 8) -> Completion | RouteFailed:
    try:
        return await router.generate(PROMPT, max_tokens=tokens, ignore_eos=True, params={"fault": fault})
    except RouteFailed as error:
        return error


async def test_the_error_names_model_position_and_value_and_the_router_goes_on(router: Router) -> None:
    for fault, said in ANSWERS.items():
        error = await ask(router, fault)
        assert isinstance(error, RouteFailed)
        text = str(error)
        assert "route of model 'slm' (misroute, " in text
        assert said in text
        assert text.endswith(f"(at output position {handoffs.FROM})")
        good = await ask(router, 0)
        assert isinstance(good, Completion)
        assert len(good.tokens) == 8


async def test_a_request_that_ends_before_the_fault_is_answered(router: Router) -> None:
    assert isinstance(await ask(router, 1, tokens=handoffs.FROM), Completion)


async def test_all_of_a_batch_fail_and_those_who_come_later_do_not(router: Router) -> None:
    answers: list[Completion | RouteFailed] = []

    async def note(fault: int) -> None:
        answers.append(await ask(router, fault))

    async with anyio.create_task_group() as tasks:
        for fault in (1, 0, 0, 5, 2):
            tasks.start_soon(note, fault)
    assert sum(isinstance(answer, RouteFailed) for answer in answers) >= 3
    assert isinstance(await ask(router, 0), Completion)
