"""Weights of an ensemble in Python: their arithmetic, and who writes the first token."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping

import pytest

from tokenflow.dsl.expr import parse_weight
from tokenflow.dsl.ir import RecipeIR
from tokenflow.dsl.load import load_recipe
from tokenflow.dsl.weights import evaluate, first_writer
from tokenflow.errors import InvalidRequest


def mixed(**draw: float | str) -> RecipeIR:
    models = {name: f"owner/{name}" for name in draw}
    return load_recipe({"name": "mixed", "params": {"w": 0.2}, "models": models, "draw": draw})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3.0),
        ("1 - w * 2", 0.6),
        ("-w + abs(-3) / 4", 0.55),
        ("max(w, 0.5, 0.1) % 0.3", 0.2),
        ("min(1, w)", 0.2),
    ],
)
def test_a_weight_is_computed_from_the_params(text: str, value: float) -> None:
    result = evaluate(parse_weight(text, ["w"]), {"w": 0.2})
    assert type(result) is float
    assert result == pytest.approx(value)


@pytest.mark.parametrize("text", ["(w - w) / 0", "w % 0", "0 / 0", "w / 0 % 1"])
def test_arithmetic_that_fails_gives_no_number(text: str) -> None:
    assert math.isnan(evaluate(parse_weight(text, ["w"]), {"w": 0.2}))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 / (w - w)", math.inf),
        ("-w / 0", -math.inf),
        ("3e38 * 3e38 * 3e38 * 3e38 * 3e38 * 3e38 * 3e38 * 3e38 * 3e38", math.inf),
    ],
)
def test_a_weight_divided_by_nothing_is_infinite_as_in_rules(text: str, value: float) -> None:
    assert evaluate(parse_weight(text, ["w"]), {"w": 0.2}) == value


@pytest.mark.parametrize(
    ("number", "writer"),
    [(0.0, "a"), (math.nextafter(0.5, 0), "a"), (0.5, "b"), (0.7999, "b"), (0.8, "c"), (1 - 2**-53, "c")],
)
def test_the_first_writer_is_the_one_whose_piece_holds_the_number(number: float, writer: str) -> None:
    assert first_writer(mixed(a=0.5, b=0.3, c=0.2), {"w": 0.2}, number) == writer
    # 8 / 10 in float32, as for all later tokens, is a little more than 0.8.
    assert first_writer(mixed(a=5, b="15 * w", c=2), {"w": 0.2}, number) == ("b" if number == 0.8 else writer)


def test_the_first_writer_of_other_recipes_is_the_entry() -> None:
    recipe = load_recipe({"name": "one", "entry": "a", "models": {"a": "owner/a"}})
    assert first_writer(recipe, {}, 0.99) == "a"


def test_a_request_may_give_its_own_weights() -> None:
    recipe = mixed(a="1 - w", b="w")
    numbers = [random.Random(1).random() for _ in range(2000)]
    for share in (0.0, 0.2, 1.0):
        writers = Counter(first_writer(recipe, {"w": share}, number) for number in numbers)
        assert writers["b"] == sum(number >= 1 - share for number in numbers)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"w": 1.5}, "the weight of model 'a' must be at least 0, got -0.5"),
        ({"w": -1e31}, "the weight of model 'a' must be at most 1e+30, got 1e+31"),
    ],
)
def test_params_that_make_no_weights_are_refused(params: Mapping[str, float], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        first_writer(mixed(a="1 - w", b="1"), params, 0.5)
    assert str(caught.value) == message
    assert caught.value.param == "params"


def test_params_that_leave_no_weight_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^at least one weight must be above 0$"):
        first_writer(mixed(a="w", b="w * 2"), {"w": 0.0}, 0.5)
