"""``--set key.path=value``: what it changes, and what is said of overrides that are wrong."""

# ruff: noqa: E501 (the lines are asserted whole)

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dsl.recipes import PAIR, changed, problems
from tokenflow.dsl.ir import RecipeIR
from tokenflow.dsl.load import load_recipe

TOP_KEYS = (
    "name, description, entry, params, models, heads, routes, draw, budgets, rollback, rollback_to, "
    "on_failure, batching"
)
FORM = 'expected KEY.PATH=VALUE, as in "params.tau=0.1"'
CONDITION = 'expected a condition, got a number: compare it, as in "entropy > 0.5"'


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(*overrides: str, text: str = PAIR) -> RecipeIR:
    Path("recipe.yaml").write_text(text)
    return load_recipe("recipe.yaml", overrides)


def test_a_value_is_read_as_yaml_and_replaces_the_one_in_the_recipe() -> None:
    recipe = load(
        "params.tau=1e-3", "models.llm.dtype=float16", "models.llm.prefix_cache=false", "name=other"
    )
    assert recipe.name == "other"
    assert recipe.params == {"tau": 0.001}
    assert recipe.model("llm").config.dtype == "float16"
    assert recipe.model("llm").config.prefix_cache is False


def test_the_last_of_several_overrides_of_one_key_wins() -> None:
    assert load("params.tau=1", "params.tau=2").params == {"tau": 2}


def test_whole_values_can_be_replaced() -> None:
    recipe = load("params={tau: 0.5, b: 2}", "batching={policy: auto}", "routes.llm=[]")
    assert recipe.params == {"tau": 0.5, "b": 2}
    assert recipe.batching.policy == "auto"
    assert recipe.routes["llm"] == ()


def test_a_rule_is_reached_by_its_index() -> None:
    recipe = load("routes.slm[0].send=keep", "routes.slm[0].when=confidence < 0.5")
    assert recipe.routes["slm"][0].send == "keep"
    assert recipe.routes["slm"][0].text == "confidence < 0.5"


def test_optional_keys_and_the_mappings_around_them_are_made() -> None:
    text = PAIR[: PAIR.index("batching:")]
    recipe = load("batching.thresholds.llm=4", "description=two models", text=text)
    assert (recipe.batching.policy, recipe.batching.thresholds) == ("fixed", {"slm": 1, "llm": 4})
    assert recipe.description == "two models"
    emptied = f"{text}batching:\n"
    assert load("batching.policy=auto", text=emptied).batching.policy == "auto"


def test_a_model_written_as_a_bare_path_takes_overrides() -> None:
    text = changed("{path: owner/large, dtype: bfloat16}", "owner/large")
    config = load("models.llm.dtype=float16", text=text).model("llm").config
    assert (config.path, config.dtype) == ("owner/large", "float16")
    assert load("models.llm=owner/other").model("llm").config.path == "owner/other"


def test_a_model_path_that_names_a_directory_here_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, recipes = tmp_path / "here", tmp_path / "recipes"
    for folder in (here / "demo/small", here / "only_here", recipes / "demo/small", recipes / "only_there"):
        folder.mkdir(parents=True)
    (recipes / "recipe.yaml").write_text(PAIR)
    monkeypatch.chdir(here)

    def path(value: str, key: str = "models.slm.path") -> str:
        return load_recipe("../recipes/recipe.yaml", [f"{key}={value}"]).model("slm").config.path

    assert path("demo/small") == str(here / "demo/small")
    assert path("only_here", "models.slm") == str(here / "only_here")
    assert path("{path: only_here}", "models.slm") == str(here / "only_here")
    assert path("only_there") == str(recipes / "only_there")
    assert path("./nowhere") == str(here / "nowhere")
    assert path("../recipes") == str(recipes)
    assert path("owner/name") == "owner/name"


WRONG = [
    ("foo", FORM),
    ("", FORM),
    ("=3", FORM),
    ("params..tau=3", FORM),
    ("params.tau[=3", FORM),
    (" params.tau=3", FORM),
    ("params.tau=", "params.tau: expected a number, got nothing"),
    ("params.tau=yes", 'params.tau: expected a number, got "yes"'),
    ("params.tau='0.1'", 'params.tau: expected a number, got "0.1" (leave the quotes out)'),
    ("params.tau=0,1", 'params.tau: expected a number, got "0,1" (did you mean 0.1?)'),
    ("params.tua=1", 'params.tua: unknown param (did you mean "tau"?)'),
    ("params.zzz=1", "params.zzz: unknown param (known: tau)"),
    ("tau=0.1", 'tau: unknown key (did you mean "params.tau"?)'),
    ("params[0]=3", "params[0]: params is not a list"),
    ("models.llmm.path=x", 'models.llmm: unknown model (did you mean "llm"?)'),
    ("models.zzz=x", "models.zzz: unknown model (known: slm, llm)"),
    ("models.llm.engin=torch", 'models.llm.engin: unknown key (did you mean "engine"?)'),
    ("models.llm.thresholds=1", "models.llm.thresholds: unknown key here: it belongs under batching"),
    (
        "models.llm.engine=tohrc",
        'models.llm.engine: expected one of torch, sglang, openai, sim, got "tohrc" (did you mean "torch"?)',
    ),
    ("models.llm.kv_cache=0", "models.llm.kv_cache: must be at least 1, got 0"),
    ("models.llm.path=a/b/c", 'models.llm.path: "a/b/c" is neither a directory nor a hub id (owner/name)'),
    ("models.llm.path.x=3", "models.llm.path.x: models.llm.path is a single value, without keys"),
    ("models.llm={}", 'models.llm: missing key "path"'),
    ("models=3", "models: expected a mapping of names, got 3"),
    ("entry=llmm", 'entry: unknown model "llmm" (did you mean "llm"?)'),
    ("entri=llm", 'entri: unknown key (did you mean "entry"?)'),
    ("zzz=1", f"zzz: unknown key (known keys: {TOP_KEYS})"),
    ("routes.slm.when=true", "routes.slm.when: routes.slm is a list: give an index, as in routes.slm[0]"),
    ("routes.slm[1].when=true", "routes.slm[1]: no such rule: routes.slm has 1"),
    ("routes.zzz=[]", "routes.zzz: unknown model (known: slm, llm)"),
    ("routes.slm[0].too=x", 'routes.slm[0].too: unknown key (did you mean "to"?)'),
    ("routes.slm[0].to=slm", "routes.slm[0].to: a rule leads to another model; without a rule that fires, the request stays"),
    ("routes.slm[0].when=entropy", f"routes.slm[0].when: column 1: {CONDITION}"),
    ("routes.slm[0].when=entropy > tua", 'routes.slm[0].when: column 11: unknown name "tua" (did you mean "tau"?)'),
    ("batching.polcy=auto", 'batching.polcy: unknown key (did you mean "policy"?)'),
    ("batching.thresholds.lm=3", 'batching.thresholds.lm: unknown model (did you mean "llm"?)'),
    ("params.tau=[1", "params.tau: cannot read the value \"[1\": while parsing a flow sequence: expected ',' or ']', but got '<stream end>'; quote it"),
    ("models.llm.path=@x", "models.llm.path: cannot read the value \"@x\": while scanning for the next token: found character '@' that cannot start any token; quote it"),
    ("params={a: 1, a: 2}", 'params: cannot read the value "{a: 1, a: 2}": duplicate key (twice on line 1); quote it'),
]  # fmt: skip


@pytest.mark.parametrize(("override", "message"), WRONG)
def test_a_wrong_override_is_refused_with_this_line(override: str, message: str) -> None:
    lines = problems(PAIR, [override])
    assert lines[-1] == f"--set {override}: error: {message}"
    assert all(line.startswith("recipe.yaml:") for line in lines[:-1])


def test_a_wrong_override_and_a_wrong_recipe_are_reported_together() -> None:
    overrides = ["params.tua=1", "models.llm.dtype=half", "params.tau=0.1"]
    assert problems(changed("to: llm", "to: llmm"), overrides) == [
        'recipe.yaml:9:33: error: routes.slm[0].to: unknown model "llmm" (did you mean "llm"?)',
        '--set params.tua=1: error: params.tua: unknown param (did you mean "tau"?)',
        "--set models.llm.dtype=half: error: models.llm.dtype: "
        'expected one of auto, float32, bfloat16, float16, got "half"',
    ]


def test_an_override_can_mend_a_recipe() -> None:
    assert load("routes.slm[0].to=llm", text=changed("to: llm", "to: llmm")).routes["slm"][0].to == "llm"


def test_an_override_below_a_value_of_the_wrong_type_is_refused() -> None:
    text = changed("{policy: fixed, thresholds: {slm: 1, llm: 2}}", "3")
    assert problems(text, ["batching.policy=auto", "batching.thresholds.llm=2"]) == [
        "recipe.yaml:12:11: error: batching: expected a mapping with the keys policy, thresholds, assume, got 3",
        "--set batching.policy=auto: error: batching.policy: cannot be set: batching is 3 in the recipe",
        "--set batching.thresholds.llm=2: error: batching.thresholds: cannot be set: batching is 3 in the recipe",
    ]


def test_control_characters_of_an_override_are_shown_escaped() -> None:
    assert problems(PAIR, ["params.tau=\x07\n"]) == [
        r'--set params.tau=\x07\n: error: params.tau: cannot read the value "\u0007\n": '
        "character U+0007 is not allowed; quote it"
    ]
