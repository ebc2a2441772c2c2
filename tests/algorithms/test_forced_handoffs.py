"""Hand-overs that the runtime makes: a recipe's own functions take part, and tokens go as without them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.algorithms.toys import toy_recipe
from tests.recipes_python import forced
from tests.recipes_python.forced import LLM, MID, SLM
from tokenflow import Recipe
from tokenflow.errors import RouteFailed
from tokenflow.router import Router
from tokenflow.types import Completion
from tokenflow.wire.code import find

pytestmark = pytest.mark.anyio

PROMPT = [1, 40, 50]
SALTS = {"slm": {"salt": 1}, "llm": {"salt": 2}}


async def written(folder: Path, recipe: Recipe | Mapping[str, Any], **params: float) -> Completion:
    options = SALTS | {"mid": {"salt": 3}} if recipe is forced.checked else SALTS
    async with Router(toy_recipe(folder, recipe, **options)) as router:
        return await router.generate(PROMPT, max_tokens=24, ignore_eos=True, params=params or None)


def noted(key: int) -> list[tuple[Any, ...]]:
    seen: dict[int, list[tuple[Any, ...]]] = find(forced.__file__, "SEEN")
    return seen.get(key, [])


async def test_a_model_whose_budget_is_used_up_sends_what_it_always_sends(tmp_path: Path) -> None:
    """Its message drops the last token where the route sent the request away, and cannot where it must go."""
    answer = await written(tmp_path, forced.spent, key=1)
    assert answer.models == [*["slm"] * 3, *["llm"] * 3, *["slm"] * 3, *["llm"] * 3, *["slm"] * 12]
    calls, moves = [], noted(1)
    for at, sent in ((6, len(PROMPT) + 7), (12, len(PROMPT) + 12)):
        kept = sent - 1 if at == 6 else sent
        calls += [("send", LLM, SLM, sent), ("receive", SLM, LLM, sent, kept, len(PROMPT) + at - 3)]
    assert [move[:4] if move[0] == "send" else move[:6] for move in moves] == calls
    assert moves[2][4] == answer.token_ids[11]


async def test_tokens_go_where_they_go_without_python(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    rules = {
        "name": "spent",
        "budgets": {"llm": {"max_tokens": 6}},
        "routes": {
            "slm": [{"when": "run_length >= 3", "to": "llm", "send": "keep"}],
            "llm": [{"when": "run_length >= 4", "to": "slm", "send": "drop_last"}],
        },
    }
    one, other = (tmp_path_factory.mktemp(name) for name in ("rules", "python"))
    yaml = await written(one, rules)
    python = await written(other, forced.spent, key=2)
    assert (python.token_ids, python.models, python.usage) == (yaml.token_ids, yaml.models, yaml.usage)


async def test_the_checking_model_hears_what_was_said_once_when_the_window_is_full(tmp_path: Path) -> None:
    await written(tmp_path, forced.checked, key=3)
    moves = noted(3)
    assert moves and {move[:3] for move in moves} == {("send", SLM, LLM), ("receive", LLM, SLM)}
    for sent, heard in zip(moves[::2], moves[1::2], strict=True):
        assert (heard[3], heard[4]) == (sent[3], sent[3])


async def test_what_was_said_to_another_model_goes_to_the_checking_one_if_it_is_next(tmp_path: Path) -> None:
    await written(tmp_path, forced.checked, key=4, away=4)
    moves = noted(4)
    told, heard = moves[0], moves[1]
    assert (told[:3], heard[:3]) == (("send", SLM, MID), ("receive", LLM, SLM))
    assert (heard[3], heard[4]) == (told[3], told[3])
    assert sum(move[0] == "send" for move in moves) == sum(move[0] == "receive" for move in moves)


@pytest.mark.parametrize("way", range(len(forced.WAYS)))
async def test_nothing_that_is_done_with_a_request_changes_the_routers_own(tmp_path: Path, way: int) -> None:
    async with Router(toy_recipe(tmp_path, forced.meddling, **SALTS)) as router:
        calm = await router.generate(PROMPT, max_tokens=12, ignore_eos=True)
        try:
            answer = await router.generate(PROMPT, max_tokens=12, ignore_eos=True, params={"way": way})
        except RouteFailed as error:
            assert "object has no attribute" in str(error) or "does not support item assignment" in str(error)
            assert 0 < way < 7
        else:
            assert (answer.token_ids, answer.models) == (calm.token_ids, calm.models)
        again = await router.generate(PROMPT, max_tokens=12, ignore_eos=True)
        assert (again.token_ids, again.models) == (calm.token_ids, calm.models)
