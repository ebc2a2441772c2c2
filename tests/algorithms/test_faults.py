"""A route in Python that does wrong fails the requests that it does wrong to, and no others."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
import torch

from tests.algorithms.toys import toy_recipe
from tests.recipes import DEMO
from tests.recipes_python import handoffs
from tests.routing.heads.published import CiterNet
from tokenflow.errors import ModelLoadError, RouteFailed
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


async def test_the_neighbours_in_a_batch_get_what_they_would_have_got_alone(router: Router) -> None:
    alone = await ask(router, 0)
    assert isinstance(alone, Completion)
    faults = (0, 1, 0, 5, 2, 0)
    answers: dict[int, Completion | RouteFailed] = {}

    async def note(index: int, fault: int) -> None:
        answers[index] = await ask(router, fault)

    async with anyio.create_task_group() as tasks:
        for index, fault in enumerate(faults):
            tasks.start_soon(note, index, fault)
    for index, fault in enumerate(faults):
        answer = answers[index]
        if fault:
            assert isinstance(answer, RouteFailed)
            assert ANSWERS[fault] in str(answer)
        else:
            assert isinstance(answer, Completion)
            assert answer.token_ids == alone.token_ids


@pytest.fixture
async def handing_over(tmp_path: Path) -> AsyncIterator[Router]:
    """A recipe whose ``send`` and ``receive`` do what a parameter says, at output position 3."""
    async with Router(toy_recipe(tmp_path, handoffs.failing, slm={"salt": 1}, llm={"salt": 2})) as router:
        yield router


@pytest.mark.parametrize(
    ("fault", "position", "role", "raised"),
    [
        (1, 3, "send of model 'slm' (fault_of_send", "KeyboardInterrupt"),
        (2, 3, "send of model 'slm' (fault_of_send", "SystemExit"),
        (3, 3, "send of model 'slm' (fault_of_send", "GeneratorExit"),
        (4, 4, "receive of model 'llm' (fault_of_receive", "KeyboardInterrupt"),
        (5, 4, "receive of model 'llm' (fault_of_receive", "SystemExit"),
    ],
)
async def test_whatever_send_or_receive_raises_fails_that_request_alone_and_says_where(
    handing_over: Router, fault: int, position: int, role: str, raised: str
) -> None:
    alone = await ask(handing_over, 0)
    assert isinstance(alone, Completion)
    answers: list[Completion | RouteFailed] = []

    async def note(fault: int) -> None:
        answers.append(await ask(handing_over, fault))

    async with anyio.create_task_group() as tasks:
        for each in (0, fault, 0, fault):
            tasks.start_soon(note, each)
    errors = [answer for answer in answers if isinstance(answer, RouteFailed)]
    assert len(errors) == 2
    assert all(isinstance(a, RouteFailed) or a.token_ids == alone.token_ids for a in answers)
    began = re.escape(f"recipe 'failing': {role}, {handoffs.__file__}:")
    pattern = (
        rf"{began}[0-9]+\) raised {raised} at line [0-9]+: by the recipe "
        rf"\(at output position {position}, step ([0-9]+) of the model\)"
    )
    for error in errors:
        found = re.fullmatch(pattern, str(error))
        assert found is not None, str(error)
        # It is the model's fourth step at least that sends; the other model is where the request arrives.
        assert int(found[1]) >= (4 if "send" in role else 0)


@pytest.mark.parametrize("fault", [7, 8])
async def test_a_send_that_never_returns_is_named_in_the_log_and_fails_its_request(
    handing_over: Router, fault: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One that sleeps, and one that computes; the model's steps may take 1.5 s."""
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        error = await ask(handing_over, fault)
    assert isinstance(error, RouteFailed)
    assert "raised TookTooLong at line " in str(error)
    assert "it had not returned after 1.5 s" in str(error)
    assert 1.4 < time.monotonic() - began < 5
    (line,) = [record.message for record in caplog.records if record.name == "tokenflow.dsl.overdue"]
    assert line.startswith("recipe 'failing': send of model 'slm' (fault_of_send, ")
    assert "holds up the event loop and all requests" in line
    assert line.endswith("it is ended after 1.5 s")
    assert isinstance(await ask(handing_over, 0), Completion)


WRONG = f"""\
name: wrong
entry: slm
models:
  slm: {{path: {DEMO}/small, dtype: float32}}
  llm: {{path: {DEMO}/large, dtype: float32}}
heads:
  gate: {{kind: r2r, path: ./head.pt}}
routes:
  slm: [{{when: head("gate") >= threshold("gate"), to: llm, send: drop_last}}]
  llm: [{{after: 1, to: slm, send: keep}}]
"""


@pytest.fixture
def wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> Path:
    """The folder of a recipe whose head is of another kind, with a change."""
    monkeypatch.chdir(tmp_path)
    torch.save(CiterNet(32).state_dict(), tmp_path / "head.pt")
    (tmp_path / "r.yaml").write_text(WRONG.replace(old, new))
    return tmp_path


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("large", "largo", "r.yaml:5:15: error: models.llm.path: there is no directory {demo}/largo, and "),
        ("./head.pt", "./none.pt", "r.yaml:7:27: error: heads.gate.path: there is no file or directory "),
        ("large", "small", "{head}: this file is a CITER head; declared kind: r2r"),
        ("r2r", "co_llm", "{head}/config.json: not found"),
        (
            "{kind: r2r, path: ./head.pt}",
            "{kind: co_llm}",
            "{demo}/small: no deferral row: ",
        ),
    ],
)  # fmt: skip
async def test_what_cannot_be_loaded_is_told_with_its_place_in_the_recipe(wrong: Path, said: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        async with Router("r.yaml"):
            pass
    said = said.format(head=wrong / "head.pt", demo=DEMO)
    if not said.startswith("r.yaml"):
        said = f"r.yaml:4:3: error: models.slm: head 'gate' (r.yaml:7:3): {said}"
    assert str(caught.value).startswith(said)
