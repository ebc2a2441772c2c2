"""Routing in a worker: heads as the recipe wants them, and signals made of a step's rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.routing.heads.published import R2RNet, features, r2r_checkpoint, saved, scrambled
from tests.toy.engine import HIDDEN, ToyEngine
from tokenflow.dsl.expr import parse_condition
from tokenflow.random import DRAW, uniform
from tokenflow.routing.heads import R2RHead
from tokenflow.types import ModelConfig, SamplingParams
from tokenflow.wire.messages import VERSION, HeadSpec, Hello, Open, RouteRule, Row
from tokenflow.worker.residents import Resident
from tokenflow.worker.route import Decision, Route, StepSignals, load_heads


@pytest.fixture
def engine(tmp_path: Path) -> ToyEngine:
    (tmp_path / "toy.json").write_text(json.dumps({"vocab_size": 128}))
    return ToyEngine(ModelConfig(path=str(tmp_path)))


def hello(path: Path, *conditions: str, **more: object) -> Hello:
    params = ("alpha", "beta")
    rules = tuple(RouteRule(parse_condition(text, params), code) for code, text in enumerate(conditions, 2))
    return Hello(VERSION, "m", 1, ModelConfig(path=str(path)), rules, params, 100, (2,), models=4, **more)  # type: ignore[arg-type]


def resident(handle: int, output: list[int], state: list[float] | None = None) -> tuple[Row, Resident]:
    """A request of three prompt tokens that has just got a token after ``output``."""
    opened = Open(handle, 0, 3, 10 + handle, SamplingParams(), (0.5, handle / 4), state or [])
    made = Resident(opened)
    made.tokens += [1, 1, 1, *output]
    made.fed = len(made.tokens)
    return Row(handle, 0, 3, [], handle), made


def test_signals_of_a_step_are_what_its_rows_say() -> None:
    rows = [resident(0, []), resident(1, [7, 8], [0.25, 0.5])]
    logits, hidden = torch.zeros(2, 128), torch.zeros(2, HIDDEN)
    given = StepSignals(rows, [30, 31], logits, hidden, None, ("alpha", "beta"), 3, 2)
    assert given.token.tolist() == [30, 31]
    assert given.position.tolist() == [0, 2]
    assert given.run_length.tolist() == [1, 2]
    assert given.tails.tolist() == [[-1, -1, -1], [-1, 7, 8]]
    assert list(given.state) == [[0.0, 0.0], [0.25, 0.5]]
    assert list(given.names) == ["alpha", "beta"]
    assert given.param("beta").tolist() == [0.0, 0.25]
    assert given.draw.tolist() == [uniform(10, 0, 1, 0, DRAW), uniform(11, 0, 3, 0, DRAW)]
    dtypes = [given.token.dtype, given.tails.dtype, given.param("alpha").dtype, given.draw.dtype]
    assert dtypes == [torch.int64, torch.int64, torch.float32, torch.float64]


def test_a_row_goes_where_the_first_rule_that_holds_says(tmp_path: Path, engine: ToyEngine) -> None:
    route = Route(hello(tmp_path, "token == 9", "position >= 1", "beta > 0.6"), engine)
    rows = [resident(0, [7]), resident(1, []), resident(3, []), resident(2, [5])]
    decided = route(rows, [9, 8, 7, 7], torch.zeros(4, 128), torch.zeros(4, HIDDEN))
    assert decided == [Decision(0, 2), Decision(-1, 0), Decision(2, 4), Decision(1, 3)]


def test_what_a_window_keeps_stays_with_its_request(tmp_path: Path, engine: ToyEngine) -> None:
    route = Route(hello(tmp_path, "window(token, 2) > 10"), engine)
    first, second = resident(0, []), resident(1, [])
    logits, hidden = torch.zeros(2, 128), torch.zeros(2, HIDDEN)
    route([first, second], [8, 20], logits, hidden)
    assert (first[1].state, second[1].state) == ([1, 8], [1, 20])
    decided = route([second, first], [2, 11], logits, hidden)
    assert [decision.destination for decision in decided] == [2, 0]
    assert (first[1].state, second[1].state) == ([1, 11], [1, 2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_head_computes_in_the_dtype_of_the_recipe(tmp_path: Path, engine: ToyEngine, dtype: str) -> None:
    net = scrambled(R2RNet(HIDDEN, (16,), vocab=128))
    file = saved(tmp_path / "router.pt", r2r_checkpoint(net, table=True))
    spec = HeadSpec("own", "r2r", str(file), 0.25, dtype)
    head = load_heads(hello(tmp_path, heads=(spec,)), engine)["own"]
    inner = getattr(head, "head")  # noqa: B009 (the recipe's threshold stands around it)
    assert isinstance(inner, R2RHead)
    assert inner.front.weight.dtype == inner.blocks[0].up.weight.dtype == getattr(torch, dtype)
    hidden, tokens, logits = features(32, HIDDEN)
    tokens %= 128
    with torch.no_grad():
        expected = net(hidden, tokens, logits)
    scores = head.score(hidden, tokens, logits)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5 if dtype == "float32" else 0.03)
    assert head.threshold == 0.25
