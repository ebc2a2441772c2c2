"""The recipe of each recorded setting, in every form that it is written in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.recipes_python import classes, decorated
from tests.reference.cases import DEMO, TRIO
from tokenflow import Recipe


@dataclass(frozen=True)
class Form:
    """A recipe as somebody may write it, and the settings that it can be asked for, by their params."""

    recipe: Path | Recipe | Mapping[str, Any]
    cases: Mapping[str, Mapping[str, float]]
    overrides: tuple[str, ...] = field(default=())


SAMPLED = frozenset({"me sampled"})
"""Settings at temperature 1."""

CASES: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    "r2r": {"r2r": {}},
    "citer": {"citer": {}},
    "co_llm": {"co_llm": {}},
    "me": {"me": {}, "me sampled": {}},
    "max_prob": {"max_prob": {}, "max_prob n=4": {"n": 4}},
    "margin": {"margin": {}, "margin n=3": {"n": 3}},
    "entropy": {"entropy": {}, "entropy n=2": {"n": 2}},
    "random": {"random": {}},
    "think_answer": {"think_answer": {}},
    "step_boundary": {"step_boundary": {}},
    "tag_call": {"tag_call": {}},
    "speculative": {"speculative": {}},
    "cascade": {"cascade": {}},
    "momentum": {"momentum": {}},
    "rolling": {"rolling": {}},
    "neural_rolling": {"neural_rolling": {}},
}
"""Recipes that are written in all three forms."""

TURNS = {
    "name": "turns",
    "entry": "slm",
    "models": {name: {"path": str(DEMO / folder), "dtype": "float32"} for name, folder in TRIO.items()},
    "routes": {
        "slm": [{"after": 3, "to": "mid", "send": "keep"}],
        "mid": [{"after": 2, "to": "llm", "send": "keep"}],
        "llm": [{"after": 1, "to": "slm", "send": "keep"}],
    },
}

FORMS: Mapping[str, Form] = {
    **{f"{name}.yaml": Form(DEMO / f"{name}.yaml", cases) for name, cases in CASES.items()},
    **{f"{name}, decorated": Form(getattr(decorated, name), cases) for name, cases in CASES.items()},
    **{f"{name}, class": Form(getattr(classes, name), cases) for name, cases in CASES.items()},
    "budget.yaml": Form(DEMO / "budget.yaml", {"budget": {}}),
    "budget.yaml, tokens only": Form(
        DEMO / "budget.yaml", {"budget of tokens": {}}, ("budgets.llm={max_tokens: 5}",)
    ),
    "turns": Form(TURNS, {"turns": {}}),
    "immediate, decorated": Form(decorated.immediate, {"immediate": {}}),
}

_AS_DEMO = (
    f"models.slm.path={DEMO / 'small'}",
    "models.slm.dtype=float32",
    f"models.llm.path={DEMO / 'large'}",
    "models.llm.dtype=float32",
    "models.llm.engine=torch",
    "models.llm.tensor_parallel=1",
)

R_STITCH_FORMS: Mapping[str, Form] = {
    "r_stitch.yaml": Form(DEMO.parent / "r_stitch.yaml", {}, _AS_DEMO),
    "r_stitch.py": Form(DEMO.parent / "r_stitch.py", {}, _AS_DEMO),
    "r_stitch_classes.py": Form(DEMO.parent / "r_stitch_classes.py", {}, _AS_DEMO),
    "r_stitch, decorated": Form(decorated.r_stitch, {}),
    "r_stitch, class": Form(classes.r_stitch, {}),
}
"""R-Stitch has a record of its own, by tau."""
