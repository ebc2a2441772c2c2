"""What is said of every wrong key, type, name and reference in a recipe; whole lines, in order."""

# ruff: noqa: E501 (the lines are asserted whole)

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dsl.recipes import PAIR, changed, problems
from tokenflow.dsl.load import load_recipe
from tokenflow.errors import RecipeError

NAME = 'expected a name of letters, digits, "_" and "-" that begins with a letter'
PARAM_NAME = 'expected a name of letters, digits and "_" that begins with a letter'
SIGNALS = "entropy, entropy_nats, confidence, margin, logprob, token, position, run_length, draw"
FUNCTIONS = "abs, max, min, head, threshold, at, follows, window, momentum"
TOP_KEYS = (
    "name, description, entry, params, models, heads, routes, draw, budgets, rollback, rollback_to, "
    "on_failure, batching"
)
MODEL_KEYS = (
    "path, engine, dtype, device, context_length, kv_cache, max_requests, max_batch_tokens, "
    "prefix_cache, threads, tensor_parallel, verify, endpoint, latency_ms, routing, trace, load_timeout, "
    "step_timeout, restarts"
)
SEND = '("keep" commits the sampled token, "drop_last" leaves its position to the next model)'
CONDITION = 'missing a condition: "when" (an expression), "after" (so many tokens) or "at" (a text)'
SELF = "a rule leads to another model; without a rule that fires, the request stays"

# The text of the good recipe to replace, what by, and the lines that follow.
TOP = [
    ("name: pair\n", "", ['1:1: error: missing key "name"']),
    ("name: pair", "name: 3", ["1:7: error: name: expected text, got 3"]),
    ("name: pair", "name:", ["1:6: error: name: expected text, got nothing"]),
    ("name: pair", "name: [a]", ["1:7: error: name: expected text, got a list"]),
    ("name: pair", 'name: ""', [f'1:7: error: name: {NAME}, got ""']),
    ("name: pair", "name: my recipe", [f'1:7: error: name: {NAME}, got "my recipe"']),
    ("name: pair", "name: 3b", [f'1:7: error: name: {NAME}, got "3b"']),
    (
        "name: pair",
        "nam: pair",
        ['1:1: error: missing key "name"', '1:1: error: nam: unknown key (did you mean "name"?)'],
    ),
    ("name: pair", "name: pair\ndescription: 3", ["2:14: error: description: expected text, got 3"]),
    ("name: pair", "name: pair\nzzz: 3", [f"2:1: error: zzz: unknown key (known keys: {TOP_KEYS})"]),
    ("name: pair", "name: pair\nmodel: 1", ['2:1: error: model: unknown key (did you mean "models"?)']),
    (
        "name: pair",
        "name: pair\nthresholds: {llm: 2}",
        ["2:1: error: thresholds: unknown key here: it belongs under batching"],
    ),
    (
        "name: pair",
        "name: pair\nthresold: 0.03",
        ['2:1: error: thresold: unknown key (did you mean "threshold" under heads.<head>?)'],
    ),
    (
        "name: pair",
        "name: pair\npath: x",
        ["2:1: error: path: unknown key here: it belongs under models.<model>"],
    ),
    ("entry: slm\n", "", ['1:1: error: missing key "entry"']),
    ("entry: slm", "entry: [slm]", ["2:8: error: entry: expected text, got a list"]),
    ("entry: slm", "entry: llmm", ['2:8: error: entry: unknown model "llmm" (did you mean "llm"?)']),
    ("entry: slm", "entry: zzz", ['2:8: error: entry: unknown model "zzz" (models: slm, llm)']),
]
PARAMS = [
    (
        "params: {tau: 0.03}",
        "params: 3",
        [
            "3:9: error: params: expected a mapping of names, got 3",
            f'9:24: error: routes.slm[0].when: unknown name "tau" (signals: {SIGNALS}; params: none)',
            f'11:25: error: routes.llm[0].when: unknown name "tau" (signals: {SIGNALS}; params: none)',
        ],
    ),
    (
        "tau: 0.03",
        'tau: "0,03"',
        ['3:15: error: params.tau: expected a number, got "0,03" (did you mean 0.03?)'],
    ),
    (
        "tau: 0.03",
        'tau: "0.03"',
        ['3:15: error: params.tau: expected a number, got "0.03" (leave the quotes out)'],
    ),
    ("tau: 0.03", "tau: true", ["3:15: error: params.tau: expected a number, got true"]),
    ("tau: 0.03", "tau:", ["3:14: error: params.tau: expected a number, got nothing"]),
    ("tau: 0.03", "tau: {a: 1}", ["3:15: error: params.tau: expected a number, got a mapping"]),
    ("tau: 0.03", "tau: .inf", ["3:15: error: params.tau: expected a finite number, got inf"]),
    ("tau: 0.03", "tau: .nan", ["3:15: error: params.tau: expected a finite number, got nan"]),
    ("tau: 0.03", "tau: 1e39", ["3:15: error: params.tau: must be at most 3.4e+38, got 1e+39"]),
    ("tau: 0.03", "tau: -1e39", ["3:15: error: params.tau: must be at least -3.4e+38, got -1e+39"]),
    (
        "tau: 0.03",
        "tau: 0.03, entropy: 1",
        ['3:21: error: params.entropy: "entropy" is a signal: choose another name'],
    ),
    (
        "tau: 0.03",
        "tau: 0.03, max: 1",
        ['3:21: error: params.max: "max" is a word of expressions: choose another name'],
    ),
    (
        "tau: 0.03",
        "tau: 0.03, head: 1",
        ['3:21: error: params.head: "head" is a word of expressions: choose another name'],
    ),
    (
        "tau: 0.03",
        "tau: 0.03, lambda: 1",
        ['3:21: error: params.lambda: "lambda" is a word of expressions: choose another name'],
    ),
    ("tau: 0.03", "tau: 0.03, tau-2: 1", [f"3:21: error: params.tau-2: {PARAM_NAME}"]),
    ("tau: 0.03", "tau: 0.03, a b: 1", [f'3:21: error: params."a b": {PARAM_NAME}']),
]
MODELS = [
    ("{path: owner/small}", "{}", ['5:3: error: models.slm: missing key "path"']),
    (
        "owner/small}",
        "owner/small, engin: torch}",
        ['5:28: error: models.slm.engin: unknown key (did you mean "engine"?)'],
    ),
    (
        "owner/small}",
        "owner/small, zzz: 1}",
        [f"5:28: error: models.slm.zzz: unknown key (known keys: {MODEL_KEYS})"],
    ),
    (
        "owner/small}",
        "owner/small, when: true}",
        ["5:28: error: models.slm.when: unknown key here: it belongs under routes.<model>[i]"],
    ),
    (
        "owner/small}",
        "owner/small, entry: x}",
        ["5:28: error: models.slm.entry: unknown key here: it belongs at the top level"],
    ),
    ("path: owner/small", "path: 3", ["5:15: error: models.slm.path: expected text, got 3"]),
    ("path: owner/small", 'path: ""', ["5:15: error: models.slm.path: must not be empty"]),
    (
        "path: owner/small",
        "path: a/b/c",
        ['5:15: error: models.slm.path: "a/b/c" is neither a directory nor a hub id (owner/name)'],
    ),
    (
        "dtype: bfloat16",
        "dtype: bf16",
        [
            "6:35: error: models.llm.dtype: expected one of auto, float32, bfloat16, float16, "
            'got "bf16" (did you mean "bfloat16"?)'
        ],
    ),
    (
        "dtype: bfloat16",
        "dtype: 16",
        ["6:35: error: models.llm.dtype: expected one of auto, float32, bfloat16, float16, got 16"],
    ),
    (
        "dtype: bfloat16",
        "engine: tohrc",
        [
            "6:36: error: models.llm.engine: expected one of torch, sglang, openai, sim, "
            'got "tohrc" (did you mean "torch"?)'
        ],
    ),
    (
        "dtype: bfloat16",
        "engine: vllm",
        ['6:36: error: models.llm.engine: expected one of torch, sglang, openai, sim, got "vllm"'],
    ),
    (
        "dtype: bfloat16",
        "device: gpu",
        ['6:36: error: models.llm.device: expected auto, cpu, cuda or cuda:<n>, got "gpu"'],
    ),
    ("dtype: bfloat16", "device: 0", ["6:36: error: models.llm.device: expected text, got 0"]),
    ("dtype: bfloat16", "kv_cache: 0", ["6:38: error: models.llm.kv_cache: must be at least 1, got 0"]),
    ("dtype: bfloat16", "kv_cache: -3", ["6:38: error: models.llm.kv_cache: must be at least 1, got -3"]),
    (
        "dtype: bfloat16",
        "kv_cache: 4.5",
        ["6:38: error: models.llm.kv_cache: expected a whole number, got 4.5"],
    ),
    (
        "dtype: bfloat16",
        "kv_cache: 99999999999",
        ["6:38: error: models.llm.kv_cache: must be at most 2147483647, got 99999999999"],
    ),
    (
        "dtype: bfloat16",
        'max_requests: "4"',
        ['6:42: error: models.llm.max_requests: expected a whole number, got "4" (leave the quotes out)'],
    ),
    (
        "dtype: bfloat16",
        "context_length: []",
        ["6:44: error: models.llm.context_length: expected a whole number, got a list"],
    ),
    (
        "dtype: bfloat16",
        "max_batch_tokens:",
        ["6:45: error: models.llm.max_batch_tokens: expected a whole number, got nothing"],
    ),
    (
        "dtype: bfloat16",
        "tensor_parallel: true",
        ["6:45: error: models.llm.tensor_parallel: expected a whole number, got true"],
    ),
    (
        "dtype: bfloat16",
        "threads: two",
        ['6:37: error: models.llm.threads: expected a whole number, got "two"'],
    ),
    (
        "dtype: bfloat16",
        "prefix_cache: 1",
        ["6:42: error: models.llm.prefix_cache: expected true or false, got 1"],
    ),
    (
        "{path: owner/large, dtype: bfloat16}",
        "3",
        [
            "6:8: error: models.llm: expected a path or a mapping with the keys path, engine, dtype, ..., got 3"
        ],
    ),
    (
        "{path: owner/large, dtype: bfloat16}",
        "",
        [
            "6:7: error: models.llm: expected a path or a mapping with the keys path, engine, dtype, ..., got nothing"
        ],
    ),
    ("batching:", "extra:", [f"12:1: error: extra: unknown key (known keys: {TOP_KEYS})"]),
    (
        "  llm: {path: owner/large, dtype: bfloat16}\n",
        "  llm: {path: owner/large}\n  my llm: owner/mid\n",
        [
            f'7:3: error: models."my llm": {NAME}',
            '7:3: error: models."my llm": no route leads here from the entry "slm": add one, or remove the model',
        ],
    ),
    (
        "  llm: {path: owner/large, dtype: bfloat16}\n",
        "  llm: {path: owner/large}\n  mid: owner/mid\n",
        ['7:3: error: models.mid: no route leads here from the entry "slm": add one, or remove the model'],
    ),
]
ROUTES = [
    ("  slm:\n", "  smm:\n", ['8:3: error: routes.smm: unknown model "smm" (did you mean "slm"?)']),
    (
        "  slm:\n    - {when: entropy > tau, to: llm, send: drop_last}",
        "  slm: {when: entropy > tau, to: llm, send: drop_last}",
        ['8:8: error: routes.slm: expected a list of rules, got a mapping: put "- " before each rule'],
    ),
    (
        "\n    - {when: entropy > tau, to: llm, send: drop_last}",
        "",
        ["8:7: error: routes.slm: expected a list of rules, got nothing"],
    ),
    (
        "{when: entropy > tau, to: llm, send: drop_last}",
        "entropy > tau",
        [
            '9:7: error: routes.slm[0]: expected a mapping with the keys when, after, at, ..., got "entropy > tau"'
        ],
    ),
    ("to: llm", "to: llmm", ['9:33: error: routes.slm[0].to: unknown model "llmm" (did you mean "llm"?)']),
    ("to: llm", "to: zzz", ['9:33: error: routes.slm[0].to: unknown model "zzz" (models: slm, llm)']),
    ("to: llm", "to: slm", [f"9:33: error: routes.slm[0].to: {SELF}"]),
    ("to: llm", "to: 3", ["9:33: error: routes.slm[0].to: expected text, got 3"]),
    (
        "to: llm",
        "goto: llm",
        [
            '9:7: error: routes.slm[0]: missing key "to"',
            '9:29: error: routes.slm[0].goto: unknown key (did you mean "to"?)',
        ],
    ),
    (
        "to: llm",
        "to: llm, policy: auto",
        ["9:38: error: routes.slm[0].policy: unknown key here: it belongs under batching"],
    ),
    (
        "send: drop_last",
        "send: drop",
        [
            '9:44: error: routes.slm[0].send: expected one of keep, drop_last, got "drop" (did you mean "drop_last"?)'
        ],
    ),
    (
        "send: drop_last",
        "send: 1",
        ["9:44: error: routes.slm[0].send: expected one of keep, drop_last, got 1"],
    ),
    (", send: drop_last", "", [f'9:7: error: routes.slm[0]: missing key "send" {SEND}']),
    ("when: entropy > tau, ", "", [f"9:7: error: routes.slm[0]: {CONDITION}"]),
    (
        "when: entropy > tau",
        "when: [1]",
        ["9:14: error: routes.slm[0].when: expected an expression, got a list"],
    ),
    (
        "when: entropy > tau",
        "when:",
        ["9:13: error: routes.slm[0].when: expected an expression, got nothing"],
    ),
    (
        "when: entropy > tau",
        "when: 1",
        [
            "9:14: error: routes.slm[0].when: expected a condition, got a number: "
            'compare it, as in "entropy > 0.5"'
        ],
    ),
]
BATCHING = [
    (
        "policy: fixed",
        "policy: fixd",
        [
            "12:20: error: batching.policy: expected one of auto, eager, fixed, planned, lookahead, "
            'got "fixd" (did you mean "fixed"?)'
        ],
    ),
    ("policy: fixed", "polcy: fixed", ['12:12: error: batching.polcy: unknown key (did you mean "policy"?)']),
    (
        "policy: fixed",
        "policy: auto",
        ['12:26: error: batching.thresholds: thresholds need "policy: fixed"; "auto" chooses its own'],
    ),
    ("llm: 2", "llm: 0", ["12:53: error: batching.thresholds.llm: must be at least 1, got 0"]),
    ("llm: 2", "llm: 2.0", ["12:53: error: batching.thresholds.llm: expected a whole number, got 2.0"]),
    ("llm: 2", "lm: 2", ['12:48: error: batching.thresholds.lm: unknown model "lm" (did you mean "llm"?)']),
    (
        "thresholds: {slm: 1, llm: 2}",
        "thresholds: 3",
        ["12:39: error: batching.thresholds: expected a mapping of names, got 3"],
    ),
    (
        "{policy: fixed, thresholds: {slm: 1, llm: 2}}",
        "fixed",
        ['12:11: error: batching: expected a mapping with the keys policy, thresholds, assume, got "fixed"'],
    ),
    (
        "batching: {",
        "batchng: {",
        ['12:1: error: batchng: unknown key (did you mean "batching"?)'],
    ),
]
EXPRESSIONS = [
    ("entropy > tau,", "entropi > tau,", ['9:14: error: routes.slm[0].when: unknown name "entropi" (did you mean "entropy"?)']),
    ("entropy > tau,", "entropy > tua,", ['9:24: error: routes.slm[0].when: unknown name "tua" (did you mean "tau"?)']),
    ("entropy > tau,", "entropy >,", ["9:23: error: routes.slm[0].when: the expression ends where a value is missing"]),
    ("entropy > tau,", "entropy + tau,", [
        "9:14: error: routes.slm[0].when: expected a condition, got a number: "
        'compare it, as in "entropy > 0.5"'
    ]),
    ("entropy > tau,", "entropy and tau > 1,", ['9:14: error: routes.slm[0].when: "and" needs conditions, but "entropy" is a number']),
    ("entropy > tau,", "entropy.real > 1,", ['9:21: error: routes.slm[0].when: attributes are not supported, got ".real"']),
    (
        "entropy > tau,",
        "__import__('os') == 1,",
        [f'9:14: error: routes.slm[0].when: unknown function "__import__" (functions: {FUNCTIONS})'],
    ),
    (
        "entropy > tau,",
        "max(entropy, margin) > tau,",
        [
            '9:17: error: routes.slm[0].when: "(" is never closed: '
            'a comma ends the value inside "{...}", so put it in quotes',
            '9:27: error: routes.slm[0]."margin) > tau": unknown key (known keys: when, after, at, to, send)',
        ],
    ),
    ("entropy > tau,", '"(entropy > tau",', ['9:15: error: routes.slm[0].when: "(" is never closed']),
    ("entropy > tau,", "'entropi > 1 and zz() > 0',", [
        '9:15: error: routes.slm[0].when: unknown name "entropi" (did you mean "entropy"?)',
        f'9:31: error: routes.slm[0].when: unknown function "zz" (functions: {FUNCTIONS})',
    ]),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("old", "new", "lines"), [*TOP, *PARAMS, *MODELS, *ROUTES, *BATCHING, *EXPRESSIONS])
def test_a_wrong_recipe_is_refused_with_these_lines(old: str, new: str, lines: list[str]) -> None:
    assert problems(changed(old, new)) == [f"recipe.yaml:{line}" for line in lines]


def test_a_recipe_without_models_says_only_that() -> None:
    assert problems(changed("models:", "model:")) == [
        'recipe.yaml:1:1: error: missing key "models"',
        'recipe.yaml:4:1: error: model: unknown key (did you mean "models"?)',
    ]
    assert problems("name: a\nentry: b\nmodels: {}\n") == [
        'recipe.yaml:2:8: error: entry: unknown model "b" (models: none)',
        "recipe.yaml:3:9: error: models: at least one model is needed",
    ]
    assert problems("name: a\nentry: b\nmodels: [x]\n") == [
        "recipe.yaml:3:9: error: models: expected a mapping of names, got a list"
    ]


def test_a_recipe_holds_at_most_64_models() -> None:
    models = "".join(f"  m{i}: owner/m{i}\n" for i in range(65))
    routes = "".join(f"  m{i}: [{{when: true, to: m{i + 1}, send: keep}}]\n" for i in range(64))
    assert problems(f"name: a\nentry: m0\nmodels:\n{models}routes:\n{routes}") == [
        "recipe.yaml:4:3: error: models: at most 64 models, got 65"
    ]


def test_routes_that_are_no_mapping_do_not_make_models_unreachable() -> None:
    start = PAIR[: PAIR.index("routes:")]
    assert problems(f"{start}routes: 3\n") == [
        "recipe.yaml:7:9: error: routes: expected a mapping of names, got 3"
    ]


def test_a_chain_of_routes_reaches_every_model() -> None:
    text = (
        "name: chain\nentry: a\nmodels: {a: o/a, b: o/b, c: o/c, d: o/d}\nroutes:\n"
        "  a: [{when: true, to: b, send: keep}]\n  b: [{when: true, to: c, send: keep}]\n"
        "  d: [{when: true, to: a, send: keep}]\n"
    )
    assert problems(text) == [
        'recipe.yaml:3:34: error: models.d: no route leads here from the entry "a": '
        "add one, or remove the model"
    ]


def test_all_problems_are_reported_at_once_in_the_order_of_the_file() -> None:
    text = """\
name: 3
entery: slm
params: {tau: "0,03", entropy: 0.3, b: yes}
models:
  slm: {path: owner/small, dtype: float31, engin: torch}
  llm: {path: owner/large}
  llm: owner/other
routes:
  slm:
    - {when: entropi > tau, to: llm, send: drop}
    - {when: entropy > tau and foo.bar > 3, to: lm}
  llm:
    - when: >
        entropy > tau and
        margin
      to: llm
      send: keep
thresholds: {llm: 3}
batching: {policy: auto, thresholds: {slm: 1.0, lm: 3}}
"""
    lines = [
        '1:1: error: missing key "entry"',
        "1:7: error: name: expected text, got 3",
        '2:1: error: entery: unknown key (did you mean "entry"?)',
        '3:15: error: params.tau: expected a number, got "0,03" (did you mean 0.03?)',
        '3:23: error: params.entropy: "entropy" is a signal: choose another name',
        '3:40: error: params.b: expected a number, got "yes"',
        "5:35: error: models.slm.dtype: expected one of auto, float32, bfloat16, float16, "
        'got "float31" (did you mean "float32"?)',
        '5:44: error: models.slm.engin: unknown key (did you mean "engine"?)',
        "7:3: error: models.llm: duplicate key (lines 6 and 7)",
        '10:14: error: routes.slm[0].when: unknown name "entropi" (did you mean "entropy"?)',
        '10:44: error: routes.slm[0].send: expected one of keep, drop_last, got "drop" '
        '(did you mean "drop_last"?)',
        f'11:7: error: routes.slm[1]: missing key "send" {SEND}',
        '11:35: error: routes.slm[1].when: attributes are not supported, got ".bar"',
        '11:49: error: routes.slm[1].to: unknown model "lm" (did you mean "llm"?)',
        '15:9: error: routes.llm[0].when: "and" needs conditions, but "margin" is a number',
        f"16:11: error: routes.llm[0].to: {SELF}",
        "18:1: error: thresholds: unknown key here: it belongs under batching",
        '19:26: error: batching.thresholds: thresholds need "policy: fixed"; "auto" chooses its own',
        "19:44: error: batching.thresholds.slm: expected a whole number, got 1.0",
        '19:49: error: batching.thresholds.lm: unknown model "lm" (did you mean "llm"?)',
    ]
    assert problems(text) == [f"recipe.yaml:{line}" for line in lines]


def test_a_recipe_given_as_data_is_checked_in_the_same_way() -> None:
    recipe = {
        "name": "pair",
        "entry": "slm",
        "models": {"slm": {"path": "owner/small", "engin": "torch"}, None: "x", "llm": b"owner/large"},
        "routes": {"slm": ({"when": "entropi > 1", "to": "llm", "send": "keep"},)},
    }
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe)
    assert [str(problem) for problem in caught.value.problems] == [
        "<recipe>: error: models: a key must be text, got nothing",
        '<recipe>: error: models.slm.engin: unknown key (did you mean "engine"?)',
        "<recipe>: error: models.llm: expected a path or a mapping with the keys "
        "path, engine, dtype, ..., got a bytes",
        '<recipe>: error: routes.slm[0].when: column 1: unknown name "entropi" (did you mean "entropy"?)',
    ]
