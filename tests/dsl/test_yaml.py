"""Recipe files as YAML: what cannot be read, the traps of YAML 1.1, and exact positions."""

# ruff: noqa: E501 (the lines are asserted whole)

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dsl.recipes import PAIR, changed, problems
from tokenflow.dsl.load import load_recipe
from tokenflow.dsl.source import MAX_BYTES, plain_scalar, read_value
from tokenflow.errors import RecipeError

MISSING = [f'recipe.yaml:1:1: error: missing key "{key}"' for key in ("name", "models", "entry")]
KEYS = "expected a mapping with the keys of a recipe"
TOP_KEYS = (
    "name, description, entry, params, models, heads, routes, draw, budgets, rollback, rollback_to, "
    "on_failure, sampling, chat_template, scorer, batching"
)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


UNREADABLE: list[tuple[str | bytes, str]] = [
    ("", ": error: the recipe is empty"),
    ("# only a comment\n", ": error: the recipe is empty"),
    ("---\n...\n", f":2:1: error: {KEYS}, got nothing"),
    ("- a\n- b\n", f":1:1: error: {KEYS}, got a list"),
    ("just text", f':1:1: error: {KEYS}, got "just text"'),
    ("3", f":1:1: error: {KEYS}, got 3"),
    ("a: b: c", ":1:5: error: not YAML: mapping values are not allowed here"),
    ("a: [1, 2", ":1:9: error: not YAML: while parsing a flow sequence: expected ',' or ']', but got '<stream end>'"),
    ("name: x\n\tentry: y", ":2:1: error: not YAML: while scanning for the next token: found character '\\t' that cannot start any token"),
    ("name: 'x", ":1:9: error: not YAML: while scanning a quoted scalar: found unexpected end of stream"),
    ("name: @x", ":1:7: error: not YAML: while scanning for the next token: found character '@' that cannot start any token"),
    ("a: *nope", ":1:4: error: not YAML: found undefined alias 'nope'"),
    ("a: 1\n---\nb: 2\n", ":2:1: error: not YAML: expected a single document in the stream: but found another document"),
    (b"\xff\xfe\x00", ":1:1: error: not YAML: not UTF-8 text (byte 0)"),
    (b"name: x\n# \xe9\n", ":2:3: error: not YAML: not UTF-8 text (byte 10)"),
    ("name: x\n# \x07", ":2:3: error: not YAML: character U+0007 is not allowed"),
    ("{" * 3000, ": error: nested too deeply"),
    ("x" * (MAX_BYTES + 1), ": error: is larger than 1 MiB: not a recipe file"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line"), UNREADABLE, ids=range(len(UNREADABLE)))
def test_a_file_that_is_no_mapping_in_yaml_is_refused(text: str | bytes, line: str) -> None:
    assert problems(text) == [f"recipe.yaml{line}"]


def refusal(path: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    (problem,) = caught.value.problems
    return str(problem)


def test_a_missing_file_is_refused_with_a_neighbour_of_a_similar_name() -> None:
    Path("recipes").mkdir()
    Path("recipes/demo.yaml").write_text(PAIR)
    assert refusal("recipes/dmo.yaml") == (
        'recipes/dmo.yaml: error: no such file (did you mean "recipes/demo.yaml"?)'
    )
    assert refusal("recipes/zzz.yaml") == "recipes/zzz.yaml: error: no such file"
    assert refusal("nowhere/demo.yaml") == "nowhere/demo.yaml: error: no such file"
    assert refusal("bad\0name") == "bad\0name: error: cannot be read: embedded null byte"
    assert refusal("recipes/demo.yaml/x") == "recipes/demo.yaml/x: error: cannot be read: Not a directory"


def test_a_directory_is_refused() -> None:
    Path("recipes").mkdir()
    assert refusal("recipes") == "recipes: error: is a directory, not a recipe file"


TRAPS = [
    # Duplicate keys.
    ("entry: slm", "entry: slm\nentry: llm", ["3:1: error: entry: duplicate key (lines 2 and 3)"]),
    ("models:\n", "models:\n  slm: a/b\n", ["6:3: error: models.slm: duplicate key (lines 5 and 6)"]),
    ("tau: 0.03", "tau: 0.03, tau: 1", ["3:21: error: params.tau: duplicate key (twice on line 3)"]),
    ("slm: 1,", "slm: 1, slm: 2,", ["12:48: error: batching.thresholds.slm: duplicate key (twice on line 12)"]),
    # Words that YAML 1.1 takes for booleans.
    ("name: pair", "name: pair\non: push", [f"2:1: error: on: unknown key (known keys: {TOP_KEYS})"]),
    ("name: pair", "name: pair\nyes: 1", [f"2:1: error: yes: unknown key (known keys: {TOP_KEYS})"]),
    ("dtype: bfloat16", "prefix_cache: yes", ['6:42: error: models.llm.prefix_cache: expected true or false, got "yes" (did you mean true?)']),
    ("dtype: bfloat16", "prefix_cache: Off", ['6:42: error: models.llm.prefix_cache: expected true or false, got "Off" (did you mean false?)']),
    ("tau: 0.03", "tau: on", ['3:15: error: params.tau: expected a number, got "on"']),
    ("to: llm", "to: no", ['9:33: error: routes.slm[0].to: unknown model "no" (models: slm, llm)']),
    # Numbers that are not.
    ("dtype: bfloat16", "threads: 010", ['6:37: error: models.llm.threads: expected a whole number, got "010" (a leading zero could mean octal: leave it out)']),
    ("dtype: bfloat16", "kv_cache: 1_000", ['6:38: error: models.llm.kv_cache: expected a whole number, got "1_000"']),
    ("dtype: bfloat16", "kv_cache: 1e3", ["6:38: error: models.llm.kv_cache: expected a whole number, got 1000.0"]),
    ("tau: 0.03", "tau: 1:30", ['3:15: error: params.tau: expected a number, got "1:30"']),
    ("tau: 0.03", "tau: 2024-01-01", ['3:15: error: params.tau: expected a number, got "2024-01-01"']),
    ("name: pair", 'name: "\\ud800"', ['1:7: error: name: expected valid Unicode, got "\\ud800"']),
    ("name: pair", "name: 2024-01-01", ['1:7: error: name: expected a name of letters, digits, "_" and "-" that begins with a letter, got "2024-01-01"']),
    # Keys, tags, merges, aliases.
    ("name: pair", "name: pair\n? [a, b]\n: c", ["2:3: error: a key must be plain text"]),
    ("dtype: bfloat16", "{a: b}: 1", ["6:28: error: models.llm: a key must be plain text"]),
    ("dtype: bfloat16", "<<: {dtype: auto}", ['6:28: error: models.llm."<<": merge keys are not supported: repeat the keys']),
    ("dtype: bfloat16", "dtype: !!str auto", ['6:35: error: models.llm.dtype: YAML tags are not supported, got "tag:yaml.org,2002:str"']),
    ("dtype: bfloat16", "dtype: !x auto", ['6:35: error: models.llm.dtype: YAML tags are not supported, got "!x"']),
    ("{tau: 0.03}", "&p {tau: *p}", ["3:9: error: params.tau: an alias inside the value that it stands for", "3:9: error: params.tau: expected a number, got nothing"]),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "lines"), TRAPS)
def test_a_yaml_trap_is_an_error_and_no_surprise(old: str, new: str, lines: list[str]) -> None:
    assert sorted(problems(changed(old, new))) == sorted(f"recipe.yaml:{line}" for line in lines)


def test_tags_never_build_objects() -> None:
    lines = problems("name: !!python/object/apply:os.system ['touch owned']\n")
    assert lines[-2].startswith("recipe.yaml:1:7: error: name: YAML tags are not supported")
    assert not Path("owned").exists()


def test_aliases_cannot_make_a_recipe_explode() -> None:
    layers = "\n".join(f"k{i + 1}: &k{i + 1} [{', '.join([f'*k{i}'] * 10)}]" for i in range(9))
    lines = problems(f"k0: &k0 [1]\n{layers}\n")
    assert len([line for line in lines if "too large or nested too deeply" in line]) == 1


def test_deeply_nested_values_are_refused_once() -> None:
    lines = problems(f"name: {'[' * 70}{']' * 70}\n")
    assert [line for line in lines if "too large" in line] == [
        f"recipe.yaml:1:71: error: name{'[0]' * 64}: the recipe is too large or nested too deeply"
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None), ("~", None), ("null", None), ("true", True), ("True", True), ("false", False),
        ("yes", "yes"), ("on", "on"), ("Off", "Off"), ("y", "y"), ("nULL", "nULL"), ("tRue", "tRue"),
        ("0", 0), ("-12", -12), ("+3", 3), ("010", "010"), ("-07", "-07"), ("0o17", 15), ("0x1F", 31),
        ("1_000", "1_000"), ("1:30", "1:30"), ("9" * 50, "9" * 50), ("0,03", "0,03"), ("-", "-"), (".", "."),
        ("0.03", 0.03), ("1e-3", 0.001), ("1E5", 1e5), ("-.5", -0.5), ("5.", 5.0), ("1.5e+3", 1500.0),
        ("00.5", 0.5), ("1e", "1e"), ("e3", "e3"), ("0x", "0x"), ("1.2.3", "1.2.3"), ("inf", "inf"),
        (".inf", float("inf")), ("-.inf", float("-inf")),
    ],
)  # fmt: skip
def test_unquoted_text_follows_the_core_schema_of_yaml_1_2(text: str, value: object) -> None:
    result = plain_scalar(text)
    assert (type(result), result) == (type(value), value)


def test_a_quoted_value_is_always_text() -> None:
    assert read_value("['1', \"true\", '~', 1, true, ~]") == ["1", "true", "~", 1, True, None]


def test_numbers_with_exponents_and_prefixes_load() -> None:
    Path("recipe.yaml").write_text(changed("tau: 0.03", "tau: 1e-3, a: 0o10, b: 0x10, c: 5., d: .5, e: 3"))
    assert load_recipe("recipe.yaml").params == {"tau": 0.001, "a": 8, "b": 16, "c": 5, "d": 0.5, "e": 3}


def test_anchors_aliases_windows_lines_and_a_byte_order_mark_load() -> None:
    text = PAIR.replace("when: entropy > tau", "when: &rule entropy > tau").replace(
        "when: entropy <= tau", "when: *rule"
    )
    Path("recipe.yaml").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    recipe = load_recipe("recipe.yaml")
    assert recipe.routes["slm"][0].when == recipe.routes["llm"][0].when


# Each ``when`` holds the unknown names zz and qq; where they are is told by line and column.
POSITIONS = [
    "when: entropy > zz and qq > 1",
    "when: entropy\n        > zz\n        and qq > 1",
    "when: 'entropy > zz and qq > 1'",
    "when: 'entropy\n\n        > zz and\n        qq > 1'",
    'when: "entropy\\x20> \\\n        zz and\\tqq\\u0020> 1"',
    'when: "\\\n        entropy > zz\n        and qq > 1"',
    "when: |\n        entropy > zz\n          and qq > 1",
    "when: >-  # a comment\n        entropy\n          > zz and\n\n        qq > 1",
    "when: &a   entropy > zz and qq > 1",
    "when: &a\n        entropy > zz and qq > 1",
]


@pytest.mark.parametrize("when", POSITIONS)
def test_expression_errors_point_into_the_file_however_the_text_is_written(when: str) -> None:
    old = "{when: entropy > tau, to: llm, send: drop_last}"
    text = changed(old, f"{when}\n      to: llm\n      send: keep")
    rows = text.split("\n")
    expected = [
        (index + 1, row.index(name) + 1)
        for name in ("zz", "qq")
        for index, row in enumerate(rows)
        if name in row
    ]
    assert len(expected) == 2
    found = [line.split(":")[1:3] for line in problems(text)]
    assert [(int(line), int(column)) for line, column in found] == expected


@pytest.mark.parametrize("when", ["when: entropy >", "when: 'entropy > '", "when: >\n        entropy >\n\n"])
def test_an_expression_that_ends_too_early_is_reported_where_it_ends(when: str) -> None:
    old = "{when: entropy > tau, to: llm, send: drop_last}"
    text = changed(old, f"{when}\n      to: llm\n      send: keep")
    row, column = next((i, r.rindex(">") + 2) for i, r in enumerate(text.split("\n"), 1) if "entropy >" in r)
    assert problems(text) == [
        f"recipe.yaml:{row}:{column}: error: routes.slm[0].when: the expression ends where a value is missing"
    ]
