"""Heads, short conditions, ensembles, budgets and rollback: what they become, and what is said when wrong."""

# ruff: noqa: E501 (the lines are asserted whole)

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dsl.recipes import CHECKED, GATED, MIXED, problems, replaced
from tokenflow.dsl.describe import describe
from tokenflow.dsl.ir import BudgetIR, Expr, HeadIR, RecipeIR, RuleIR
from tokenflow.dsl.load import load_recipe


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(text: str, *overrides: str) -> RecipeIR:
    Path("recipe.yaml").write_text(text)
    return load_recipe("recipe.yaml", overrides)


def rules(text: str, model: str = "slm") -> tuple[RuleIR, ...]:
    """The rules of slm in a pair that is otherwise right."""
    back = "  llm: [{after: 1, to: slm, send: keep}]"
    return load(
        f"name: x\nentry: slm\nmodels: {{slm: o/s, llm: o/l}}\nroutes:\n  slm:\n{text}\n{back}\n"
    ).routes[model]


ENTROPY: Expr = (">", ("signal", "entropy"), ("number", 0.5))
POSITION: Expr = ("==", ("signal", "position"), ("number", 0))
AFTER: Expr = (">=", ("signal", "run_length"), ("number", 3))


@pytest.mark.parametrize(
    ("given", "when", "text"),
    [
        ("after: 3", AFTER, "run_length >= 3"),
        (r'at: "\n\n"', ("at", "\n\n"), r'at("\n\n")'),
        ("at: </call>", ("at", "</call>"), 'at("</call>")'),
        ("when: entropy > 0.5, after: 3", ("and", ENTROPY, AFTER), "entropy > 0.5 and run_length >= 3"),
        ("after: 3, at: é", ("and", AFTER, ("at", "é")), 'run_length >= 3 and at("é")'),
        (
            "at: x, when: entropy > 0.5 and position == 0, after: 3",
            ("and", ENTROPY, POSITION, AFTER, ("at", "x")),
            'entropy > 0.5 and position == 0 and run_length >= 3 and at("x")',
        ),
        (
            "when: entropy > 0.5 or position == 0, after: 3",
            ("and", ("or", ENTROPY, POSITION), AFTER),
            "(entropy > 0.5 or position == 0) and run_length >= 3",
        ),
        ("when: true, after: 3", ("and", ("boolean", True), AFTER), "true and run_length >= 3"),
        ("when: true", ("boolean", True), "true"),
        ("when: (  entropy  >  0.5 )", ENTROPY, "( entropy > 0.5 )"),
    ],
)
def test_all_conditions_of_a_rule_must_hold(given: str, when: Expr, text: str) -> None:
    assert rules(f"    - {{{given}, to: llm, send: keep}}") == (RuleIR(when, "llm", "keep", text),)


def test_heads_belong_to_the_model_whose_rules_ask_them() -> None:
    recipe = load(GATED)
    assert recipe.heads == {
        "gate": HeadIR("gate", "r2r", "owner/repo/sub/router.pt", 0.4, "slm"),
        "defer": HeadIR("defer", "co_llm", "", None, "llm"),
    }
    assert recipe.routes["slm"][0].when == (">=", ("head", "gate"), ("threshold", "gate"))
    assert load(GATED, "heads.gate.threshold=0.7").heads["gate"].threshold == 0.7
    assert load(GATED, "heads.gate.dtype=bfloat16").heads["gate"].dtype == "bfloat16"


def test_local_paths_of_heads_become_absolute(tmp_path: Path) -> None:
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads/mlp.pth").touch()
    (tmp_path / "router.pt").touch()
    expected = {
        "heads": str(tmp_path / "heads"),
        "heads/mlp.pth": str(tmp_path / "heads/mlp.pth"),
        "router.pt": str(tmp_path / "router.pt"),
        "./missing.pt": str(tmp_path / "missing.pt"),
        "heads/missing.pth": "heads/missing.pth",
        "nics-efc/R2R_router_collections/Qwen3-0.6B+Qwen3-8B/default_router.pt": (
            "nics-efc/R2R_router_collections/Qwen3-0.6B+Qwen3-8B/default_router.pt"
        ),
    }
    for text, path in expected.items():
        assert load(replaced(GATED, "owner/repo/sub/router.pt", text)).heads["gate"].path == path


LOW: Expr = ("<", ("signal", "draw"), ("number", 0.5))
MIDDLE: Expr = (
    "and",
    ("<=", ("number", 0.5), ("signal", "draw")),
    ("<", ("signal", "draw"), ("number", 0.8)),
)
HIGH: Expr = ("<=", ("number", 0.8), ("signal", "draw"))


def test_an_ensemble_becomes_rules_that_draw_the_next_writer() -> None:
    recipe = load(MIXED)
    slm = RuleIR(LOW, "slm", "keep", "draw < 0.5")
    mid = RuleIR(MIDDLE, "mid", "keep", "0.5 <= draw and draw < 0.8")
    llm = RuleIR(HIGH, "llm", "keep", "0.8 <= draw")
    assert recipe.routes == {"slm": (mid, llm), "mid": (slm, llm), "llm": (slm, mid)}
    assert recipe.draw == (("slm", ("number", 0.5)), ("mid", ("number", 0.3)), ("llm", ("number", 0.2)))
    assert recipe.entry == "slm"
    assert recipe.budgets == {"llm": BudgetIR(0.25, 100)}


def test_weights_are_in_the_order_of_the_models_and_need_not_sum_to_1() -> None:
    text = replaced(MIXED, "{slm: 0.5, mid: 0.3, llm: 0.2}", "{llm: 4, slm: 10, mid: 6}")
    recipe = load(text)
    assert recipe.routes == load(MIXED).routes
    assert [name for name, _ in recipe.draw] == ["slm", "mid", "llm"]


def test_weights_may_be_arithmetic_over_params() -> None:
    recipe = load(replaced(MIXED, "llm: 0.2}", "llm: w * 2}"))
    half, third, twice = ("number", 0.5), ("number", 0.3), ("*", ("param", "w"), ("number", 2))
    total = ("+", ("+", half, third), twice)
    assert recipe.draw[2] == ("llm", twice)
    assert recipe.routes["llm"][0].when == ("<", ("signal", "draw"), ("/", half, total))
    assert recipe.routes["slm"][1].when == ("<=", ("/", ("+", half, third), total), ("signal", "draw"))
    assert recipe.routes["slm"][1].text == "(0.5 + 0.3) / (0.5 + 0.3 + w * 2) <= draw"


def test_a_model_of_weight_0_never_writes_and_is_not_reached() -> None:
    recipe = load(MIXED, "draw.mid=0")
    assert recipe.reachable() == ("slm", "llm")
    assert recipe.routes["mid"] == recipe.routes["llm"] + recipe.routes["slm"]
    assert [rule.to for rule in recipe.routes["slm"]] == ["llm"]
    assert load(MIXED).reachable() == ("slm", "mid", "llm")
    one = load(MIXED, "draw.mid=0.0", "draw.slm=0", "budgets={}")
    assert (one.entry, one.reachable(), one.routes["llm"]) == ("llm", ("llm",), ())


def test_a_weight_that_params_make_0_is_still_reached() -> None:
    assert load(MIXED, "draw.mid=w - w").reachable() == ("slm", "mid", "llm")


def test_an_ensemble_may_name_the_model_that_reads_the_prompt() -> None:
    recipe = load(MIXED, "entry=mid")
    assert recipe.entry == "mid"
    assert recipe.draw == load(MIXED).draw


def test_what_requests_leave_open_is_said_by_the_recipe() -> None:
    recipe = load(
        CHECKED + "\nsampling: {temperature: 0.6, max_tokens: 9}\nchat_template: llm\nscorer: llm\n"
    )
    assert recipe.sampling == {"temperature": 0.6, "max_tokens": 9}
    assert (recipe.chat_template, recipe.scorer) == ("llm", "llm")
    assert (load(CHECKED).sampling, load(CHECKED).chat_template, load(CHECKED).scorer) == ({}, "", "")


def test_a_model_that_never_writes_has_no_other_role() -> None:
    never = MIXED.replace("llm: 0.2}", "llm: 0}") + "\nscorer: llm"
    assert problems(never)[0] == (
        'recipe.yaml:6:9: error: scorer: model "llm" has no weight in draw, so it is never loaded'
    )


def test_tentative_tokens_and_who_checks_them() -> None:
    recipe = load(CHECKED)
    assert recipe.rollback == 8
    assert [model.config.verify for model in recipe.models] == [False, True]
    assert recipe.rollback_to is None
    assert load(CHECKED, r'rollback_to="\n\n"').rollback_to == ("at", "\n\n")
    assert load(GATED).rollback == 0


def test_what_happens_when_a_model_is_given_up() -> None:
    assert load(MIXED).on_failure == "fail"
    recipe = load(MIXED.replace("models:", DEGRADE))
    assert recipe.on_failure == "degrade"
    assert "on failure: goes on without a model that is given up" in describe(recipe)


NAME = 'expected a name of letters, digits, "_" and "-" that begins with a letter'
GATE = "{kind: r2r, path: owner/repo/sub/router.pt, threshold: 0.4}"
HEADS = [
    (GATE, "3", ["6:9: error: heads.gate: expected a mapping with the keys kind, path, threshold, ..., got 3"]),
    (GATE, "{path: o/r}", ['6:3: error: heads.gate: missing key "kind" (r2r, citer, co_llm)']),
    (GATE, "{kind: citer}", [
        '6:3: error: heads.gate: missing key "path" (a checkpoint file or directory)',
        '6:3: error: heads.gate: a CITER file stores no threshold, and a rule asks for threshold("gate"): give it here',
    ]),
    ("kind: r2r, path: owner/repo/sub/router.pt, threshold: 0.4", "kind: citer, path: o/r/x.pth", [
        '6:3: error: heads.gate: a CITER file stores no threshold, and a rule asks for threshold("gate"): give it here',
    ]),
    ("kind: r2r", "kind: r3r", ['6:16: error: heads.gate.kind: expected one of r2r, citer, co_llm, got "r3r" (did you mean "r2r"?)']),
    ("path: owner/repo/sub/router.pt", 'path: ""', ["6:27: error: heads.gate.path: must not be empty"]),
    ("path: owner/repo/sub/router.pt", "path:", ["6:26: error: heads.gate.path: expected text, got nothing"]),
    ("path: owner/repo/sub/router.pt", "path: a b", ['6:27: error: heads.gate.path: "a b" is neither a file, a directory nor a hub path (owner/name/file)']),
    ("threshold: 0.4", "threshold: x", ['6:64: error: heads.gate.threshold: expected a number, got "x"']),
    ("threshold: 0.4", "treshold: 0.4", ['6:53: error: heads.gate.treshold: unknown key (did you mean "threshold"?)']),
    ("threshold: 0.4", "dtype: int8", ['6:60: error: heads.gate.dtype: expected one of float32, bfloat16, float16, got "int8"']),
    ("kind: co_llm", "kind: co_llm, dtype: float32", ["7:25: error: heads.defer.dtype: a co_llm head is a row of its model, and computes in the model's dtype: remove this"]),
    ("  defer: {kind: co_llm}\n", "  defer: {kind: co_llm}\n  idle: {kind: co_llm}\n", ['8:3: error: heads.idle: no rule asks it: use head("idle") in the rules of a model, or remove it']),
    ("  defer: {kind: co_llm}\n", "  defer: {kind: co_llm}\n  my idle: {kind: co_llm}\n", [
        f'8:3: error: heads."my idle": {NAME}',
        '8:3: error: heads."my idle": no rule asks it: use head("my idle") in the rules of a model, or remove it',
    ]),
    ("  defer: {kind: co_llm}\n", "", ['11:19: error: routes.llm[0].when: unknown head "defer" (heads: gate)']),
    ('head("defer") < tau', 'head("gate") < tau', [
        "6:3: error: heads.gate: slm and llm ask it, but a head reads the states of one model: declare one for each",
        '7:3: error: heads.defer: no rule asks it: use head("defer") in the rules of a model, or remove it',
    ]),
    ('head("defer") < tau', 'head("gate < tau', ['12:19: error: routes.llm[0].when: "\\"" is never closed: a comma ends the value inside "{...}", so put it in quotes']),
    ("heads:\n", "heads: 3\nparam:\n", [
        "5:8: error: heads: expected a mapping of names, got 3",
        '6:1: error: param: unknown key (did you mean "params"?)',
        '11:19: error: routes.slm[0].when: unknown head "gate" (heads: none)',
        '11:40: error: routes.slm[0].when: unknown head "gate" (heads: none)',
        '13:19: error: routes.llm[0].when: unknown head "defer" (heads: none)',
    ]),
]  # fmt: skip
CONDITIONS = [
    ("after: 3", "after: 0", ["12:42: error: routes.llm[0].after: must be at least 1, got 0"]),
    ("after: 3", "after: 1.5", ["12:42: error: routes.llm[0].after: expected a whole number, got 1.5"]),
    ("after: 3", "after:", ["12:41: error: routes.llm[0].after: expected a whole number, got nothing"]),
    ("after: 3", "after: tau", ['12:42: error: routes.llm[0].after: expected a whole number, got "tau"']),
    ("after: 3", "after: true", ["12:42: error: routes.llm[0].after: expected a whole number, got true"]),
    (r'at: "\n\n"', 'at: ""', ["12:49: error: routes.llm[0].at: must not be empty"]),
    (r'at: "\n\n"', "at: 3", ["12:49: error: routes.llm[0].at: expected text, got 3"]),
    (r'at: "\n\n"', "at:", ["12:48: error: routes.llm[0].at: expected text, got nothing"]),
    (r'at: "\n\n"', r'at: "\ud800"', [r'12:49: error: routes.llm[0].at: expected valid Unicode, got "\ud800"']),
    (r'at: "\n\n"', f"at: {'x' * 201}", [f'12:49: error: routes.llm[0].at: must be at most 200 characters long, got "{"x" * 37}..."']),
    (r'when: head("defer") < tau, after: 3, at: "\n\n", ', "", [
        '7:3: error: heads.defer: no rule asks it: use head("defer") in the rules of a model, or remove it',
        '12:7: error: routes.llm[0]: missing a condition: "when" (an expression), "after" (so many tokens) or "at" (a text)',
    ]),
]  # fmt: skip
DRAWS = [
    ("slm: 0.5", "slm: -0.5", ["4:13: error: draw.slm: must be at least 0, got -0.5"]),
    ("slm: 0.5", "slm: .nan", ["4:13: error: draw.slm: must be a number, got nan"]),
    ("slm: 0.5", "slm: .inf", ["4:13: error: draw.slm: must be at most 1e+30, got inf"]),
    ("slm: 0.5", "slm: 1e31", ["4:13: error: draw.slm: must be at most 1e+30, got 1e+31"]),
    ("slm: 0.5", "slm: 9" + "0" * 38, ["4:13: error: draw.slm: must be at most 1e+30, got 9" + "0" * 38]),
    ("slm: 0.5", "slm: true", ["4:13: error: draw.slm: expected a number or an expression, got true"]),
    ("slm: 0.5", "slm:", ["4:12: error: draw.slm: expected a number or an expression, got nothing"]),
    ("slm: 0.5", "slm: [1]", ["4:13: error: draw.slm: expected a number or an expression, got a list"]),
    ("slm: 0.5", "slm: w - 1", ['4:13: error: draw.slm: must be at least 0, but "w - 1" is -0.8']),
    ("slm: 0.5", "slm: 1 / (w - w)", ['4:13: error: draw.slm: must be at most 1e+30, but "1 / (w - w)" is inf']),
    ("slm: 0.5", "slm: w / 1e-30 / 1e-30", ['4:13: error: draw.slm: must be at most 1e+30, but "w / 1e-30 / 1e-30" is inf']),
    ("slm: 0.5", "slm: w > 0", ["4:13: error: draw.slm: expected a number, got a condition"]),
    ("slm: 0.5", "slm: 1 - v", ['4:17: error: draw.slm: unknown name "v" (params: w)']),
    ("slm: 0.5", "slm: 1 - entropy", ['4:17: error: draw.slm: "entropy" differs from token to token: use numbers and params only']),
    ("slm: 0.5, ", "", ["3:10: error: models.slm: it has no weight in draw: give it one (0 keeps it out), or remove the model"]),
    ("slm: 0.5", "slmm: 0.5", [
        "3:10: error: models.slm: it has no weight in draw: give it one (0 keeps it out), or remove the model",
        '4:8: error: draw.slmm: unknown model "slmm" (did you mean "slm"?)',
    ]),
    ("{slm: 0.5, mid: 0.3, llm: 0.2}", "{slm: 0, mid: 0, llm: w - w}", [
        "4:1: error: draw: at least one weight must be above 0",
        "5:11: error: budgets.llm: the entry has no budget: requests come back to it once another model's is used up",
    ]),
    ("{slm: 0.5, mid: 0.3, llm: 0.2}", "0.5", ["4:7: error: draw: expected a mapping of names, got 0.5"]),
    ("name: mixed", "name: mixed\nentry:", ["2:7: error: entry: expected text, got nothing"]),
    ("name: mixed", "name: mixed\nentry: lm", ['2:8: error: entry: unknown model "lm" (did you mean "llm"?)']),
    ("budgets:", "routes: {slm: [{after: 1, to: llm, send: keep}]}\nbudgets:", [
        "5:1: error: routes: draw decides after every token, so there are no other rules: remove one of the two",
    ]),
    ("budgets:", "rules: {}\nbudgets:", ['5:1: error: rules: unknown key (did you mean "routes"?)']),
    ("params: {w: 0.2}", "params: {w: x}", ['2:13: error: params.w: expected a number, got "x"']),
]  # fmt: skip
BUDGETS = [
    ("max_share: 0.25", "max_share: 1.5", ["5:28: error: budgets.llm.max_share: must be at most 1, got 1.5"]),
    ("max_share: 0.25", "max_share: -1", ["5:28: error: budgets.llm.max_share: must be at least 0, got -1"]),
    ("max_share: 0.25", "max_share: 25%", ['5:28: error: budgets.llm.max_share: expected a number, got "25%"']),
    ("max_tokens: 100", "max_tokens: -1", ["5:46: error: budgets.llm.max_tokens: must be at least 0, got -1"]),
    ("max_tokens: 100", "max_tokens: 1.5", ["5:46: error: budgets.llm.max_tokens: expected a whole number, got 1.5"]),
    ("max_tokens: 100", "max_token: 100", ['5:34: error: budgets.llm.max_token: unknown key (did you mean "max_tokens"?)']),
    ("{max_share: 0.25, max_tokens: 100}", "{}", ['5:16: error: budgets.llm: give "max_share", "max_tokens" or both']),
    ("{max_share: 0.25, max_tokens: 100}", "{max_share: }", ['5:16: error: budgets.llm: give "max_share", "max_tokens" or both']),
    ("{max_share: 0.25, max_tokens: 100}", "0.25", ["5:16: error: budgets.llm: expected a mapping with the keys max_share, max_tokens, got 0.25"]),
    ("{llm: {max", "{lm: {max", ['5:11: error: budgets.lm: unknown model "lm" (did you mean "llm"?)']),
    ("{llm: {max", "{slm: {max", ["5:11: error: budgets.slm: the entry has no budget: requests come back to it once another model's is used up"]),
]  # fmt: skip
ROLLBACKS = [
    ("rollback: 8", "rollback: 0", ["6:11: error: rollback: must be at least 1, got 0"]),
    ("rollback: 8", "rollback: 513", ["6:11: error: rollback: must be at most 512, got 513"]),
    ("rollback: 8", "rollback: all", ['6:11: error: rollback: expected a whole number, got "all"']),
    ("rollback: 8", 'rollback_to: "x"', [
        '5:36: error: models.llm.verify: nothing to verify without "rollback: n", the number of tokens that may be tentative',
        '6:1: error: rollback_to: it needs "rollback: n", the most tokens of a step that may be tentative',
    ]),
    ("rollback: 8", 'rollback: 8\nrollback_to: ""', ["7:14: error: rollback_to: must not be empty"]),
    ("rollback: 8", "rollback:", ["6:10: error: rollback: expected a whole number, got nothing"]),
    ("rollback: 8\n", "", ['5:36: error: models.llm.verify: nothing to verify without "rollback: n", the number of tokens that may be tentative']),
    ("verify: true", "verify: false", ['6:1: error: rollback: no model has "verify: true": tentative tokens need one that checks them']),
    ("slm: owner/small", "slm: {path: owner/small, verify: true}", [
        "4:36: error: models.slm.verify: what a model that checks writes itself is final at once, and the entry writes first: let it be checked by another model",
    ]),
    ("slm: owner/small", "slm: owner/small\n  mid: {path: owner/mid, verify: true}", [
        "6:36: error: models.llm.verify: mid checks already, and what llm writes would be final unchecked: remove this",
    ]),
    ("verify: true", "verify: yes", [
        '5:36: error: models.llm.verify: expected true or false, got "yes" (did you mean true?)',
        '6:1: error: rollback: no model has "verify: true": tentative tokens need one that checks them',
    ]),
]  # fmt: skip

# What follows a rollback of 8 tokens.
OPENS = [
    ("scorer: lm", ['7:9: error: scorer: unknown model "lm" (did you mean "llm"?)']),
    ("scorer:", ["7:8: error: scorer: expected text, got nothing"]),
    ("chat_template: a.jinja", ['7:16: error: chat_template: unknown model "a.jinja" (models: slm, llm)']),
    ("chat_template: [llm]", ['7:16: error: chat_template: expected text, got a list']),
    ("sampling: 0.7", ["7:11: error: sampling: expected a mapping with the keys max_tokens, temperature, top_k, ..., got 0.7"]),
    ("sampling: {temperature: -1}", ["7:25: error: sampling.temperature: must be at least 0, got -1"]),
    ("sampling: {repetition_penalty: 0}", ["7:32: error: sampling.repetition_penalty: must be greater than 0, got 0"]),
    ("sampling: {temprature: 1}", ['7:12: error: sampling.temprature: unknown key (did you mean "temperature"?)']),
]  # fmt: skip

DEGRADE = "on_failure: degrade\nmodels:"
FAILURES = [
    (MIXED, "models:", "on_failure: ignore\nmodels:", ['3:13: error: on_failure: expected one of fail, degrade, got "ignore"']),
    (CHECKED, "models:", DEGRADE, ["3:13: error: on_failure: tentative tokens need the model that checks them: say fail, or leave it out"]),
    ("name: alone\nentry: slm\nmodels: {slm: owner/small}", "models:", DEGRADE, ["3:13: error: on_failure: there is no other model to go on with: say fail, or leave it out"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "old", "new", "lines"),
    [
        *FAILURES,
        *((GATED, *case) for case in HEADS + CONDITIONS),
        *((MIXED, *case) for case in DRAWS + BUDGETS),
        *((CHECKED, *case) for case in ROLLBACKS),
        *((CHECKED, "rollback: 8", f"rollback: 8\n{line}", lines) for line, lines in OPENS),
    ],
)
def test_a_wrong_recipe_is_refused_with_these_lines(text: str, old: str, new: str, lines: list[str]) -> None:
    assert problems(replaced(text, old, new)) == [f"recipe.yaml:{line}" for line in lines]


WRONG_OVERRIDES = [
    (MIXED, "draw.lm=1", 'draw.lm: unknown model (did you mean "llm"?)'),
    (MIXED, "budgets.zzz={}", "budgets.zzz: unknown model (known: slm, mid, llm)"),
    (MIXED, "draw.slm=w >", "draw.slm: column 4: the expression ends where a value is missing"),
    (GATED, "heads.gat.threshold=1", 'heads.gat: unknown head (did you mean "gate"?)'),
    (GATED, "heads.gate.thresholds=1", "heads.gate.thresholds: unknown key here: it belongs under batching"),
    (GATED, "routes.llm[0].after=0", "routes.llm[0].after: must be at least 1, got 0"),
    (CHECKED, "rollback=999", "rollback: must be at most 512, got 999"),
]


@pytest.mark.parametrize(("text", "override", "message"), WRONG_OVERRIDES)
def test_a_wrong_override_is_refused_with_this_line(text: str, override: str, message: str) -> None:
    assert problems(text, [override])[-1] == f"--set {override}: error: {message}"
