"""Recipes written in Python: the frozen form they become, and what is said of those that are wrong."""

# ruff: noqa: E501 (the lines are asserted whole)

from __future__ import annotations

import dataclasses
import functools
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import tokenflow.dsl.base
from tokenflow.dsl.describe import describe
from tokenflow.dsl.expr import SIGNALS
from tokenflow.dsl.ir import PythonIR, RecipeIR, to_json
from tokenflow.dsl.load import load_recipe
from tokenflow.dsl.python import load_python
from tokenflow.dsl.recipe import Recipe
from tokenflow.errors import RecipeError
from tokenflow.wire.code import import_file

RECIPES = Path(__file__).parents[2] / "recipes"

PAIR = """\
from tokenflow import BaseRouter, Recipe

recipe = Recipe("pair", entry="slm", params={"tau": 0.03})
slm = recipe.model("slm", "owner/small")
llm = recipe.model("llm", "owner/large", dtype="bfloat16")


@slm.route
def uncertain(result, tau):
    return [llm.index] * len(tau)


@slm.send
def without_last(req):
    return req.drop_last()


llm.rules([{"when": "entropy <= tau", "to": "slm", "send": "keep"}])
"""
CLASSES = """\
from tokenflow import BaseRouter, Recipe


class Away(BaseRouter):
    def route(self, result):
        return [self.peer_idx]


recipe = Recipe("pair", entry="slm", params={"tau": 0.03})
recipe.model("slm", "owner/small", router=Away, peer="llm")
recipe.model("llm", "owner/large")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(text: str, overrides: Sequence[str] = ()) -> RecipeIR:
    Path("recipe.py").write_text(text)
    return load_python("recipe.py", overrides)


def changed(old: str, new: str, text: str = PAIR) -> str:
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
    return text.replace(old, new)


def problems(text: str, overrides: Sequence[str] = ()) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load(text, overrides)
    return [str(problem) for problem in caught.value.problems]


def test_a_recipe_with_functions_becomes_the_frozen_form(folder: Path) -> None:
    recipe = load(PAIR)
    yaml = {
        "name": "pair",
        "entry": "slm",
        "params": {"tau": 0.03},
        "models": {"slm": "owner/small", "llm": {"path": "owner/large", "dtype": "bfloat16"}},
        "routes": {"llm": [{"when": "entropy <= tau", "to": "slm", "send": "keep"}]},
    }
    file = str(folder / "recipe.py")
    for name in ("models", "routes", "params", "batching", "entry", "name", "heads", "budgets", "draw"):
        expected = load_recipe({**yaml, "routes": yaml["routes"] | {"slm": ALL_AWAY}})
        if name == "routes":
            assert recipe.routes == {"slm": (), "llm": expected.routes["llm"]}
        else:
            assert getattr(recipe, name) == getattr(expected, name)
    assert recipe.python == {"slm": PythonIR(file, route="uncertain", send="without_last")}
    assert recipe.source == "recipe.py"
    assert recipe.reachable() == ("slm", "llm")


ALL_AWAY = [{"when": "true", "to": "llm", "send": "keep"}]


def test_a_recipe_with_classes_becomes_the_frozen_form(folder: Path) -> None:
    recipe = load(CLASSES)
    assert recipe.python == {"slm": PythonIR(str(folder / "recipe.py"), router="Away", peer="llm")}
    assert recipe.routes == {"slm": (), "llm": ()}
    assert recipe.reachable() == ("slm", "llm")


def test_a_model_without_python_and_rules_stays() -> None:
    assert load(PAIR[: PAIR.index("llm.rules")]).routes == {"slm": (), "llm": ()}


def test_a_receive_function_goes_with_rules_and_alone(folder: Path) -> None:
    text = PAIR + "\n@llm.receive\ndef take(peer_req, req):\n    return None\n"
    recipe = load(text)
    assert recipe.python["llm"] == PythonIR(str(folder / "recipe.py"), receive="take")
    assert len(recipe.routes["llm"]) == 1
    assert not recipe.python["llm"].routes


def test_all_that_yaml_says_is_said_in_python(folder: Path) -> None:
    head = folder / "head.pt"
    head.touch()
    text = (
        'recipe = Recipe("all", description="every part", entry="a", params={"k": 2},\n'
        '    batching={"policy": "fixed", "thresholds": {"b": 3}},\n'
        '    heads={"own": {"kind": "r2r", "path": "head.pt", "threshold": 0.5}, "co": {"kind": "co_llm"}},\n'
        '    budgets={"b": {"max_tokens": 20}}, rollback=4, on_failure="fail")\n'
        'a = recipe.model("a", Path("here"), heads=["own"], threads=2)\n'
        'b = recipe.model("b", "owner/b", verify=True)\n'
        'b.rules([{"when": "head(\\"co\\") > k", "to": "a", "send": "keep"}])\n'
        "@a.route\ndef f(result, **params):\n    return None\n"
    )
    (folder / "here").mkdir()
    recipe = load(f"from pathlib import Path\nfrom tokenflow import Recipe\n{text}")
    assert recipe.description == "every part"
    assert (recipe.batching.policy, recipe.batching.thresholds) == ("fixed", {"a": 1, "b": 3})
    assert {name: head.model for name, head in recipe.heads.items()} == {"own": "a", "co": "b"}
    assert recipe.heads["own"].path == str(head)
    assert recipe.budgets["b"].max_tokens == 20
    assert (recipe.rollback, recipe.model("b").config.verify, recipe.on_failure) == (4, True, "fail")
    assert (recipe.model("a").config.path, recipe.model("a").config.threads) == (str(folder / "here"), 2)
    assert recipe.python["a"].heads == ("own",)


@pytest.mark.parametrize("text", [PAIR, CLASSES])
def test_the_frozen_form_is_json(text: str) -> None:
    recipe = load(text)
    assert json.loads(to_json(recipe))["python"]["slm"]["file"] == recipe.python["slm"].file


def test_overrides_change_models_parameters_and_thresholds(folder: Path) -> None:
    (folder / "near").mkdir()
    recipe = load(
        PAIR,
        [
            "params.tau=0.5",
            "models.llm.path=near",
            "models.slm.threads=2",
            "batching.thresholds.llm=4",
            "routes.llm[0].send=drop_last",
        ],
    )
    assert recipe.params == {"tau": 0.5}
    assert (recipe.model("llm").config.path, recipe.model("slm").config.threads) == (str(folder / "near"), 2)
    assert recipe.batching.thresholds == {"slm": 1, "llm": 4}
    assert recipe.routes["llm"][0].send == "drop_last"


def test_a_model_path_can_come_from_an_override_alone() -> None:
    text = changed('recipe.model("slm", "owner/small")', 'recipe.model("slm")')
    assert problems(text) == ['recipe.py:4:7: error: models.slm: missing key "path"']
    assert load(text, ["models.slm.path=o/n"]).model("slm").config.path == "o/n"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("models.mid.path=x", "models.mid: unknown model (known: slm, llm)"),
        ("params.tua=1", 'params.tua: unknown param (did you mean "tau"?)'),
        ("routes.slm[0].send=keep", "routes.slm[0]: no such rule: routes.slm has 0"),
        (
            "routes.slm=[{when: true, to: llm, send: keep}]",
            "routes.slm: the model has a route in Python, which takes the place of rules: remove one of them",
        ),
    ],
)
def test_an_override_that_is_wrong_is_reported(override: str, line: str) -> None:
    assert problems(PAIR, [override]) == [f"--set {override}: error: {line}"]


def test_the_codes_of_models_follow_their_order() -> None:
    assert load(PAIR + "assert (slm.index, llm.index) == (1, 2)\n").model("llm").code == 2


# The text of the good recipe to replace, what by, and the lines that follow.
WRONG = [
    ("entry=", "", ['3:10: error: missing key "entry"']),
    ('entry="slm"', 'entry="slmm"', ['3:10: error: entry: unknown model "slmm" (did you mean "slm"?)']),
    ('Recipe("pair"', "Recipe(3", ["3:10: error: name: expected text, got 3"]),
    ('{"tau": 0.03}', '{"tau": "x"}', ['3:10: error: params.tau: expected a number, got "x"']),
    ('{"tau": 0.03}', "{}", [
        '8:2: error: models.slm.route: takes "tau", which is neither a parameter of the recipe nor a signal of the model (known: none)',
        '18:1: error: routes.llm[0].when: column 12: unknown name "tau" (signals: SIGNALS; params: none)',
    ]),
    ('{"tau": 0.03}', '{"tau": 0.03, "entropy": 1}', [
        '3:10: error: params.entropy: "entropy" is a signal: choose another name',
    ]),
    ('dtype="bfloat16"', 'dtyp="bfloat16"', [
        '5:7: error: models.llm.dtyp: unknown key (did you mean "dtype"?)',
    ]),
    ('dtype="bfloat16"', "dtype=16", [
        "5:7: error: models.llm.dtype: expected one of auto, float32, bfloat16, float16, got 16",
    ]),
    ('model("llm", "owner', 'model("slm", "owner', [
        "5:7: error: models.slm: the recipe has this model already, from line 4",
        "18:1: error: routes.slm: the model has a route in Python, which takes the place of rules: remove "
        "one of them",
        "18:1: error: routes.slm[0].to: a rule leads to another model; without a rule that fires, the request "
        "stays",
    ]),
    ('"owner/large"', "3", ["5:7: error: models.llm.path: expected text, got 3"]),
    ('"to": "slm"', '"to": "slmm"', [
        '18:1: error: routes.llm[0].to: unknown model "slmm" (did you mean "slm"?)',
    ]),
    ('"when": "entropy <=', '"when": "entropi <=', [
        '18:1: error: routes.llm[0].when: column 1: unknown name "entropi" (did you mean "entropy"?)',
    ]),
    ("llm.rules([", "slm.rules([", [
        "18:1: error: routes.slm: the model has a route in Python, which takes the place of rules: remove "
        "one of them",
        "18:1: error: routes.slm[0].to: a rule leads to another model; without a rule that fires, the request "
        "stays",
    ]),
    ("llm.rules([", "llm.rules([])\nllm.rules([", [
        "19:1: error: models.llm.rules: the model has rules already: give them in one list",
    ]),
    ("@slm.send", "@slm.route", ["13:2: error: models.slm.route: the model has a route already, from line 8"]),
    ("@slm.send", "@llm.send", [
        '13:2: error: models.llm.send: a send function needs a route function: rules say "keep" or "drop_last" '
        "themselves",
    ]),
    ("(result, tau)", "(result, tua)", [
        '8:2: error: models.slm.route: takes "tua", which is neither a parameter of the recipe nor a signal of the model (did you mean "tau"?)',
    ]),
    ("(result, tau)", "(result, tau, eta=1)", [
        '8:2: error: models.slm.route: takes "eta", which is neither a parameter of the recipe nor a signal of the model (did you mean "tau"?)',
    ]),
    ("(result, tau)", "()", [
        "8:2: error: models.slm.route: must take the step's result: def route(result)",
    ]),
    ("(result, tau)", "(*, tau)", [
        "8:2: error: models.slm.route: must take the step's result first, got tau",
    ]),
    ("(result, tau)", "(result, tau, /)", [
        '8:2: error: models.slm.route: takes "tau" by position, but parameters are passed by name',
    ]),
    ("(result, tau)", "(result, *rest)", [
        '8:2: error: models.slm.route: takes "*rest" by position, but parameters are passed by name',
    ]),
    ("(req)", "(req, tau)", [
        "13:2: error: models.slm.send: must be called as it is: def without_last(req)",
    ]),
    ("(req)", "()", ["13:2: error: models.slm.send: must be called as it is: def without_last(req)"]),
    ("def without_last", "async def without_last", [
        "13:2: error: models.slm.send: must be a plain function, neither async nor a generator",
    ]),
    ("return req.drop_last()", "yield", [
        "13:2: error: models.slm.send: must be a plain function, neither async nor a generator",
    ]),
    ("def without_last", "def uncertain", [
        '8:2: error: models.slm.route: "uncertain" means something else at the end of the file: give '
        "everything its own name, and put the model's decorator above all others",
    ]),
    ("@slm.send", "@staticmethod\n@slm.send", [
        '14:2: error: models.slm.send: "without_last" means something else at the end of the file: give '
        "everything its own name, and put the model's decorator above all others",
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "lines"), WRONG)
def test_what_is_wrong_is_reported_with_its_line(old: str, new: str, lines: list[str]) -> None:
    if old == "entry=":
        old = 'entry="slm", '
    signals = ", ".join(SIGNALS)
    expected = [f"recipe.py:{line.replace('SIGNALS', signals)}" for line in lines]
    assert problems(changed(old, new)) == expected


SIGNALLED = changed("(result, tau)", "(result, smooth, step)", changed(
    '"owner/small")',
    '"owner/small", signals={"smooth": "momentum(entropy - tau, 0.9)", "step": \'at("\\\\n")\'})',
))  # fmt: skip


def test_expressions_that_a_route_reads_are_part_of_the_frozen_form() -> None:
    recipe = load(SIGNALLED)
    assert recipe.python["slm"].signals == {
        "smooth": ("momentum", ("-", ("signal", "entropy"), ("param", "tau")), 0.9),
        "step": ("at", "\n"),
    }
    assert json.loads(to_json(recipe))["python"]["slm"]["signals"]["step"] == ["at", "\n"]
    shown = 'route uncertain, send without_last in recipe.py; reads smooth = momentum(entropy - tau, 0.9), step = at("\\n")'
    assert shown in describe(recipe)


def test_heads_in_declared_expressions_belong_to_the_model(folder: Path) -> None:
    (folder / "head.pt").touch()
    text = changed("momentum(entropy - tau, 0.9)", "window(head('own'), 3)", SIGNALLED)
    text = changed(
        'params={"tau": 0.03}',
        'params={"tau": 0.03}, heads={"own": {"kind": "r2r", "path": "head.pt"}}',
        text,
    )
    assert load(text).heads["own"].model == "slm"


@pytest.mark.parametrize(
    ("signals", "lines"),
    [
        ("3", ["signals: expected a mapping of names to expressions, got 3"]),
        ('{"smooth": 3}', ["signals.smooth: expected an expression, got 3"]),
        ("{3: 'entropy'}", ["signals: a name must be text, got 3"]),
        ('{"tau": "entropy"}', ['signals.tau: "tau" is a parameter: choose another name']),
        ('{"entropy": "margin"}', ['signals.entropy: "entropy" is a signal: choose another name']),
        ('{"at": "margin"}', ['signals.at: "at" is a word of expressions: choose another name']),
        (
            '{"a b": "margin"}',
            ['signals."a b": expected a name of letters, digits and "_" that begins with a letter'],
        ),
        ('{"x": "entropi + 1"}', ['signals.x: column 1: unknown name "entropi" (did you mean "entropy"?)']),
        ('{"x": "entropy >"}', ["signals.x: column 10: the expression ends where a value is missing"]),
        (
            '{"x": "head(\'own\')", "y": "window(window(entropy, 2), 2)"}',
            [
                'signals.x: column 6: unknown head "own" (heads: none)',
                'signals.y: column 8: "window" cannot stand inside "window"',
            ],
        ),
    ],
)
def test_declared_expressions_that_are_wrong_are_reported(signals: str, lines: list[str]) -> None:
    text = changed('"owner/small")', f'"owner/small", signals={signals})')
    assert problems(text) == [f"recipe.py:4:7: error: models.slm.{line}" for line in lines]


def test_only_a_route_in_python_reads_signals() -> None:
    text = changed('dtype="bfloat16")', 'signals={"x": "entropy"})')
    assert problems(text) == [
        "recipe.py:5:7: error: models.llm.signals: only a route in Python reads signals by name; rules say "
        "theirs themselves"
    ]


def test_every_problem_is_reported_at_once() -> None:
    text = changed("(result, tau)", "(result, tua)", changed('"to": "slm"', '"to": "x"'))
    lines = problems(text, ["params.tauu=1"])
    assert [line.split(": error:")[0] for line in lines] == [
        "recipe.py:8:2",
        "recipe.py:18:1",
        "--set params.tauu=1",
    ]


FILE_OF_FUNCTOOLS = functools.__file__
DEFINITIONS = [
    ("lambda result: None", 'a lambda has no name for workers to import: write a "def" at the top level of the file'),
    ("3", "expected a function, got 3"),
    ("None", "expected a function, got nothing"),
    ("Thing().method", "expected a function, got a method"),
    ("functools.partial(print)", "expected a function, got a partial"),
    ("Thing", "a class is given to its model with recipe.model(..., router=...)"),
    ("make(1)", '"inner" is defined inside a function, where workers cannot import it: move it to the top level of the file; a value from around it can be a parameter of the recipe'),
    ("functools.wraps", f'"wraps" is defined in {FILE_OF_FUNCTOOLS}, not in the recipe\'s own file: define it here; it may call, or derive from, what it imports'),
    ("len", '"len" is defined in no file (at a prompt, in a notebook, on stdin): save the recipe in a .py file, from which workers import it'),
    ("Thing.work", None),
    ("wrapped", None),
]  # fmt: skip
MORE = """
import functools


class Thing:
    def method(self, result):
        return None

    @staticmethod
    def work(result):
        return None


def make(value):
    def inner(result):
        return value
    return inner


@functools.lru_cache
def wrapped(result):
    return None


llm.route(WHAT)
"""
ONE_ROUTE = PAIR[: PAIR.index("llm.rules")]


@pytest.mark.parametrize(("what", "message"), DEFINITIONS)
def test_a_function_must_be_one_that_workers_can_import(what: str, message: str | None) -> None:
    text = ONE_ROUTE + MORE.replace("WHAT", what)
    if message is None:
        assert load(text).python["llm"].route == what
    else:
        assert problems(text) == [f"recipe.py:42:1: error: models.llm.route: {message}"]


ROUTERS = [
    ("router=Away", "router=3", "router: expected a subclass of tokenflow.BaseRouter, got 3"),
    ("router=Away", "router=str", 'router: expected a subclass of tokenflow.BaseRouter, got the class "str"'),
    ("router=Away", 'router=Away.build(index=1, params={"tau": 1})', "router: expected a subclass of tokenflow.BaseRouter, got a Away"),
    ("router=Away", 'router=type("Away", (Away,), {})', 'router: "Away" means something else at the end of the file: give everything its own name, and put the model\'s decorator above all others'),
    ("router=Away", "router=BaseRouter", f'router: "BaseRouter" is defined in {Path(tokenflow.dsl.base.__file__)}, not in the recipe\'s own file: define it here; it may call, or derive from, what it imports'),
    ("def route(self", "def rout(self", 'router: "Away" has no method route(self, result)'),
    ("(self, result)", "(self)", 'router: "Away.route" must be called as it is: def route(self, result)'),
    ("(self, result)", "(self, result, tau)", 'router: "Away.route" must be called as it is: def route(self, result)'),
    ("        return", "        yield", 'router: "Away.route" must be a plain function, neither async nor a generator'),
    ("    def route", "    def receive(self, peer_req, req): pass\n    def route", 'router: "Away.receive" must be called as it is: def receive(self, peer_req)'),
    ("    def route", "    async def send(self, req): pass\n    def route", 'router: "Away.send" must be a plain function, neither async nor a generator'),
    ("    def route", "    def __init__(self):\n        self.x = 1 / 0\n    def route", 'router: "Away" cannot be made: it raised ZeroDivisionError at line 6: division by zero'),
    ("    def route", "    def __init__(self, x): pass\n    def route", "router: \"Away\" cannot be made: it raised TypeError: Away.__init__() missing 1 required positional argument: 'x'"),
    ("    def route", "    def __init__(self): self.tua\n    def route", 'router: "Away" cannot be made: it raised AttributeError at line 5: Away has no attribute \'tua\' (did you mean "tau"?)'),
    ('peer="llm"', 'peer="lm"', 'peer: expected the name of another model, got "lm" (did you mean "llm"?)'),
    ('peer="llm"', 'peer="slm"', 'peer: expected the name of another model, got "slm" (did you mean "llm"?)'),
    ('router=Away, peer="llm"', 'peer="llm"', "peer: only a class has a peer: give one with router=..."),
    ('peer="llm"', 'peer="llm", heads=["own"]', 'heads: unknown head "own" (heads: none)'),
    ('router=Away, peer="llm"', 'heads=["own"]', "heads: only a route in Python says which heads it reads; rules name theirs where they use them"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), ROUTERS)
def test_what_is_wrong_with_a_class_is_reported(old: str, new: str, message: str) -> None:
    lines = problems(changed(old, new, CLASSES))
    assert re.sub(r"^recipe.py:\d+:1: error: models.slm.", "", lines[0]) == message
    line = Path("recipe.py").read_text().splitlines().index(lines_with("recipe.model(", "slm")[0]) + 1
    assert lines[0].startswith(f"recipe.py:{line}:1")


def lines_with(*words: str) -> list[str]:
    return [
        line for line in Path("recipe.py").read_text().splitlines() if all(word in line for word in words)
    ]


@pytest.mark.parametrize(
    "param", ["index", "peer_idx", "route", "send", "receive", "build", "helper", "seen"]
)
def test_a_parameter_cannot_hide_what_the_class_has(param: str) -> None:
    text = changed('{"tau": 0.03}', f'{{"{param}": 0.03}}', CLASSES)
    members = "    def helper(self): pass\n    @property\n    def seen(self): pass\n    def route"
    assert problems(changed("    def route", members, text)) == [
        f'recipe.py:13:1: error: models.slm.router: the parameter "{param}" would hide what "Away" has under '
        "this name: rename one of them"
    ]


def test_a_parameter_may_have_a_default_in_the_class() -> None:
    load(changed("    def route", "    tau = 0.5\n    def route", CLASSES))


def test_a_class_and_functions_do_not_mix_in_one_model() -> None:
    text = CLASSES.replace("recipe.model(", "slm = recipe.model(", 1)
    text += "@slm.send\ndef f(req):\n    return req.keep()\n"
    assert problems(text) == [
        "recipe.py:12:2: error: models.slm.send: the model's class has its own send: use functions or a class, "
        "not both"
    ]


def test_a_class_and_rules_do_not_mix_in_one_model() -> None:
    text = CLASSES.replace("recipe.model(", "slm = recipe.model(", 1)
    assert problems(text + 'slm.rules([{"when": "true", "to": "llm", "send": "keep"}])\n') == [
        "recipe.py:12:1: error: routes.slm: the model has a route in Python, which takes the place of rules: "
        "remove one of them"
    ]


def test_drawn_writers_and_a_route_in_python_go_together() -> None:
    text = changed('entry="slm"', 'draw={"slm": 1, "llm": 3}', ONE_ROUTE)
    recipe = load(text)
    assert [name for name, _ in recipe.draw] == ["slm", "llm"]
    assert recipe.routes["slm"] == ()
    assert [rule.to for rule in recipe.routes["llm"]] == ["slm"]


def test_all_models_cannot_be_overridden_at_once() -> None:
    assert problems(CLASSES, ["models={slm: a/b}"]) == [
        "recipe.py: error: models: a recipe in Python has its own models: override what one has, as in "
        "models.<name>.path"
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x = 1\n", 'no recipe in the file: it needs recipe = Recipe("...", entry="...") at its top level'),
        ("", 'no recipe in the file: it needs recipe = Recipe("...", entry="...") at its top level'),
        ("recipe = 3\n", '"recipe" must be a tokenflow.Recipe, got 3'),
        ("recipe = {}\n", '"recipe" must be a tokenflow.Recipe, got a mapping'),
        (PAIR.replace("recipe", "pair"), 'the recipe to run must be called "recipe", got "pair"'),
    ],
)
def test_a_file_without_a_recipe_says_what_it_needs(text: str, line: str) -> None:
    assert problems(text) == [f"recipe.py: error: {line}"]


def test_parameters_may_be_numbers_of_numpy() -> None:
    recipe = Recipe(
        "numbers", entry="slm", params={"a": np.float32(0.5), "b": np.int64(3), "c": Fraction(1, 4)}
    )
    recipe.model("slm", "owner/small")
    params = recipe.compile().params
    assert params == {"a": 0.5, "b": 3, "c": 0.25}
    assert {type(value) for value in params.values()} == {float}


def test_heads_are_a_list_also_where_there_is_one() -> None:
    (line,) = problems(changed('"owner/small"', '"owner/small", heads="div"'))
    assert line.endswith('models.slm.heads: expected a list of names, got "div": give heads=["div"]')


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("def f(:\n", ":1:7: error: not Python: invalid syntax"),
        ("x = 1\nx.y\n", ":2:0: error: raised AttributeError: 'int' object has no attribute 'y'"),
        ("raise ValueError('two\\nlines')\n", ":1:0: error: raised ValueError: two lines"),
        (
            "from tokenflow import Recipe\nRecipe()\n",
            ":2:0: error: raised TypeError: Recipe.__init__() missing 1",
        ),
        ("\x00", ": error: not Python: source code string cannot contain null bytes"),
    ],
)
def test_a_file_that_cannot_be_imported_says_why(text: str, line: str) -> None:
    (found,) = problems(text)
    assert found.startswith(f"recipe.py{line}")


def test_a_file_that_does_not_exist_has_a_suggestion(folder: Path) -> None:
    (folder / "recipe.yaml").touch()
    (folder / "recipe.py").touch()
    for path, hint in [("recip.py", ' (did you mean "recipe.py"?)'), ("zzz.py", "")]:
        with pytest.raises(RecipeError) as caught:
            load_python(path)
        assert str(caught.value.problems[0]) == f"{path}: error: no such file{hint}"
    (folder / "recipe.py").unlink()
    with pytest.raises(RecipeError, match=r'did you mean "recipe.yaml"'):
        load_python("recipe.py")


def test_a_recipe_that_runs_while_it_is_imported_is_refused() -> None:
    (line,) = problems(PAIR + "recipe.compile()\n")
    assert line.startswith("recipe.py:19:0: error: raised RuntimeError: ")
    assert line.endswith(
        'recipe.py runs its recipe while it is imported: put that under if __name__ == "__main__":, because '
        "workers import the file, too"
    )


def test_a_recipe_can_be_loaded_from_its_file_or_as_it_is(folder: Path) -> None:
    recipe = dataclasses.replace(load(PAIR), params={"tau": 0.5})
    overrides = ["params.tau=0.5"]
    assert load_recipe("recipe.py", overrides) == recipe
    itself = import_file("recipe.py").recipe
    assert load_recipe(itself, overrides) == dataclasses.replace(recipe, source=str(folder / "recipe.py"))


def test_an_edited_file_is_read_anew() -> None:
    assert load(PAIR).params == {"tau": 0.03}
    assert load(PAIR.replace("0.03", "0.5")).params == {"tau": 0.5}


def test_a_recipe_may_be_imported_from_another_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "elsewhere.py").write_text(PAIR)
    monkeypatch.syspath_prepend(str(folder))
    recipe = load("from elsewhere import recipe\n")
    assert recipe.python["slm"].file == str(folder / "elsewhere.py")


def run(*command: str, text: str = "") -> str:
    done = subprocess.run([sys.executable, *command], input=text, capture_output=True, text=True)
    return done.stdout + done.stderr


REPORT = "\nprint(recipe.compile().python)\n"


def test_a_script_compiles_its_own_recipe(folder: Path) -> None:
    (folder / "script.py").write_text(f"{PAIR}\nif __name__ == '__main__':{REPORT.strip()}\n")
    file = folder / "script.py"
    assert run("script.py") == f"{ {'slm': PythonIR(str(file), route='uncertain', send='without_last')} }\n"


def test_functions_from_a_prompt_or_stdin_are_refused_and_rules_are_not() -> None:
    for said in (run("-", text=PAIR + REPORT), run("-c", PAIR + REPORT)):
        assert '"uncertain" is defined in no file (at a prompt, in a notebook, on stdin)' in said
        assert '"without_last" is defined in no file' in said
    rules = PAIR[: PAIR.index("@slm.route")] + PAIR[PAIR.index("llm.rules") :]
    rules = rules.replace(
        "llm.rules", 'slm.rules([{"when": "true", "to": "llm", "send": "keep"}])\nllm.rules'
    )
    assert run("-", text=rules + REPORT) == "{}\n"


def test_checking_a_recipe_in_python_loads_no_torch(folder: Path) -> None:
    (folder / "recipe.py").write_text(PAIR)
    code = (
        "import sys\nfrom tokenflow.dsl.python import load_python\nload_python('recipe.py')\n"
        "print({'torch', 'numpy', 'asyncio'} & set(sys.modules))\n"
    )
    assert run("-c", code) == "set()\n"


@pytest.mark.parametrize("name", ["r_stitch.py", "r_stitch_classes.py"])
def test_the_recipes_in_python_say_what_the_one_in_yaml_does(name: str) -> None:
    recipe, yaml = load_recipe(RECIPES / name), load_recipe(RECIPES / "r_stitch.yaml")
    for part in (
        "name",
        "entry",
        "models",
        "params",
        "batching",
        "heads",
        "draw",
        "budgets",
        "rollback",
        "on_failure",
    ):
        assert getattr(recipe, part) == getattr(yaml, part)
    assert recipe.reachable() == yaml.reachable()
    assert set(recipe.python) == {"slm", "llm"}


def test_the_summary_of_a_recipe_in_python_names_its_functions() -> None:
    assert "  slm  route uncertain, send without_last in recipe.py\n" in describe(load(PAIR))
    assert "  slm  class Away in recipe.py\n" in describe(load(CLASSES))
