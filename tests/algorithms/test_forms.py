"""Every algorithm, in every form that it is written in, against the naive reference: a few prompts each."""

from __future__ import annotations

import pytest

from tests.algorithms.forms import CASES, FORMS, R_STITCH_FORMS, SAMPLED
from tests.exactness import unexcused
from tests.reference.cases import TAUS, r_stitch
from tests.reference.record import ALGORITHMS, Recorded
from tokenflow.dsl.load import load_recipe
from tokenflow.router import Router

pytestmark = pytest.mark.anyio

LONGEST = 100
"""Prompts whose answers are longer are left to the whole matrix, which ``make exact`` runs."""


def some_prompts(recorded: Recorded, case: str, form: int, count: int) -> list[int]:
    """Other prompts for every form, so that together they see many."""
    short = [
        index for index in range(len(recorded.prompts)) if len(recorded.traces[case, index].tokens) < LONGEST
    ]
    return [short[(form * count + n) % len(short)] for n in range(count)]


@pytest.mark.parametrize("name", FORMS)
async def test_text_and_trace_equal_the_naive_reference(name: str, recorded: Recorded) -> None:
    form, wrong = FORMS[name], []
    async with Router(form.recipe, overrides=form.overrides) as router:
        for case, params in form.cases.items():
            temperature = 1.0 if case in SAMPLED else 0.0
            prompts = some_prompts(recorded, case, list(FORMS).index(name), 9)
            for concurrency, some in ((1, prompts[:1]), (16, prompts[1:])):
                wrong += await unexcused(router, recorded, case, concurrency, some, params, temperature)
    assert not wrong


@pytest.mark.parametrize("name", R_STITCH_FORMS)
async def test_r_stitch_equals_the_naive_reference(name: str, alone: Recorded) -> None:
    form, wrong = R_STITCH_FORMS[name], []
    async with Router(form.recipe, overrides=form.overrides) as router:
        for tau in TAUS:
            prompts = some_prompts(alone, r_stitch(tau), list(R_STITCH_FORMS).index(name), 5)
            for concurrency, some in ((1, prompts[:1]), (16, prompts[1:])):
                wrong += await unexcused(router, alone, r_stitch(tau), concurrency, some, {"tau": tau})
    assert not wrong


def test_every_recorded_setting_is_asked_for() -> None:
    assert {case for form in FORMS.values() for case in form.cases} == set(ALGORITHMS.cases())


@pytest.mark.parametrize("name", [f"{name}, {form}" for name in CASES for form in ("decorated", "class")])
def test_a_form_has_the_models_and_parameters_of_its_yaml(name: str) -> None:
    base = name.partition(",")[0]
    yaml, python = (load_recipe(FORMS[key].recipe) for key in (f"{base}.yaml", name))
    assert python.models == yaml.models
    assert python.params == yaml.params
    assert python.entry == yaml.entry
    assert python.draw == yaml.draw
    assert python.budgets == yaml.budgets
    assert python.rollback == yaml.rollback
    assert {**python.heads} == {**yaml.heads}
