"""The tree of errors as documented, and errors that crossed a process boundary."""

from __future__ import annotations

import re

import pytest

from tokenflow import errors
from tokenflow.errors import (
    ContextTooLong,
    EngineError,
    InvalidRequest,
    ModelNotFound,
    NonFiniteLogits,
    Problem,
    RecipeError,
    TokenflowError,
    rebuild,
)

DEFINED = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, TokenflowError) and value.__module__ == errors.__name__
]


def test_the_tree_in_the_module_s_docstring_is_the_tree_of_its_classes() -> None:
    assert errors.__doc__ is not None
    parents: list[tuple[int, str]] = []
    drawn: dict[str, str] = {}
    for line in errors.__doc__.splitlines():
        match = re.match(r"    ([│ ]*)(?:[├└]─ )?(\w+)", line)
        if match is None:
            continue
        depth, name = match.start(2), match[2]
        while parents and parents[-1][0] >= depth:
            parents.pop()
        if parents:
            drawn[name] = parents[-1][1]
        parents.append((depth, name))
    assert drawn == {cls.__name__: cls.__bases__[0].__name__ for cls in DEFINED if cls is not TokenflowError}


@pytest.mark.parametrize("cls", [cls for cls in DEFINED if cls is not RecipeError])
def test_an_error_that_crossed_a_process_boundary_is_the_same_error(cls: type[TokenflowError]) -> None:
    first, second = rebuild(cls.__name__, "why"), rebuild(cls.__name__, "why")
    assert type(first) is cls
    assert str(first) == "why"
    assert first is not second


@pytest.mark.parametrize("kind", ["NewerError", "ValueError", "RecipeError", "", "object"])
def test_an_error_of_unknown_kind_loses_nothing(kind: str) -> None:
    error = rebuild(kind, "why")
    assert type(error) is EngineError
    assert str(error) == f"{kind}: why"


def test_a_refused_request_names_the_field() -> None:
    assert InvalidRequest("too long", "prompt").param == "prompt"
    assert ContextTooLong("too long").param is None


def test_kinds_of_errors_are_caught_by_their_family() -> None:
    assert issubclass(ContextTooLong, InvalidRequest)
    assert issubclass(NonFiniteLogits, errors.RequestError)
    assert issubclass(ModelNotFound, errors.ModelLoadError)


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem("r.yaml", 3, 7, "routes.slm[0].when", "bad"), "r.yaml:3:7: error: routes.slm[0].when: bad"),
        (Problem("r.yaml", 3, 7, "", "bad"), "r.yaml:3:7: error: bad"),
        (Problem("--set", 0, 0, "models.slm", "bad"), "--set: error: models.slm: bad"),
    ],
)
def test_a_problem_is_one_line_in_compiler_style(problem: Problem, text: str) -> None:
    assert str(problem) == text


@pytest.mark.parametrize(("count", "summary"), [(1, "1 problem"), (2, "2 problems")])
def test_a_recipe_error_lists_every_problem(count: int, summary: str) -> None:
    problems = [Problem("r.yaml", line, 1, "", f"bad {line}") for line in range(1, count + 1)]
    error = RecipeError(problems)
    assert error.problems == tuple(problems)
    lines = [f"r.yaml:{line}:1: error: bad {line}" for line in range(1, count + 1)]
    assert str(error).splitlines() == [*lines, summary]
