"""Rows of a batch: what is read, what is written, and in which order."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow import cli, run
from tokenflow.errors import ContextTooLong, InvalidRequest, ModelLoadError
from tokenflow.rows import Ordered, as_row, open_rows, parse_row
from tokenflow.types import Completion, ModelConfig, Timing, Token, Usage


def completion(text: str, count: int = 1) -> Completion:
    tokens = tuple(Token(5, text if index == 0 else "", "slm", -0.5) for index in range(count))
    usage = Usage(3, count, {"slm": count, "llm": 0}, handoffs=0, dropped=1)
    return Completion(text, tokens, "stop", usage, Timing(0.25, 0.5), seed=1)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Q"},
        {"prompt": ""},
        {"messages": [{"role": "user", "content": "Q"}]},
        {"prompt_ids": [1, 2]},
        {"prompt": "Q", "id": 7, "nested": {"a": [1, None, True]}},
        {"prompt": "\U0001f600 ÿ"},
    ],
)
def test_a_row_with_a_prompt_is_read_as_it_is(row: dict[str, Any]) -> None:
    assert parse_row(json.dumps(row), 1) == row
    assert parse_row(json.dumps(row, ensure_ascii=False) + "\n", 1) == row


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("hello", "line 4 is not JSON: Expecting value: line 1 column 1 (char 0)"),
        ('{"prompt": "Q"', "line 4 is not JSON: Expecting ',' delimiter: line 1 column 15 (char 14)"),
        ('["prompt"]', "line 4 has none of the keys prompt, messages, prompt_ids"),
        ('"prompt"', "line 4 has none of the keys prompt, messages, prompt_ids"),
        ("null", "line 4 has none of the keys prompt, messages, prompt_ids"),
        ("{}", "line 4 has none of the keys prompt, messages, prompt_ids"),
        ('{"Prompt": "Q"}', "line 4 has none of the keys prompt, messages, prompt_ids"),
    ],
)
def test_a_line_that_is_no_row_is_refused_with_its_number(line: str, why: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_row(line, 4)
    assert str(caught.value) == why
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"prompt": "\\ud800"}', "UTF-8, or spells half a surrogate pair: '\\\\ud800'"),
        ('{"prompt": "Q", "id": "\udcff"}', "UTF-8, or spells half a surrogate pair: '\\\\udcff'"),
        ('{"prompt": "Q", "number": ' + "9" * 5000 + "}", "JSON: Exceeds the limit"),
        ('{"prompt": ' + "[" * 100_000, "JSON: "),
        ('{"prompt": "Q", "score": NaN}', "JSON: NaN is a number in JavaScript only"),
    ],
    ids=["escaped surrogate", "broken UTF-8", "endless number", "bottomless list", "not a number"],
)
def test_a_line_that_could_not_be_written_again_is_refused(line: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^line 2 is not {why}"):
        parse_row(line, 2)


def test_rows_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "Q"}\n')
    with open_rows(str(path)) as rows:
        assert [parse_row(line, 1) for line in rows] == [{"prompt": "Q"}]


def test_a_row_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with path.open("w") as sink:
        Ordered(sink, as_json=False).add(0, as_row(0, {"prompt": "Q"}, completion("A")), "A")
        assert path.read_text() == "A\n"


def test_an_output_row_has_the_whole_story_and_the_input_s_other_keys() -> None:
    row = {"prompt": "Q", "id": 7, "index": 99, "text": "theirs"}
    assert as_row(3, row, completion("A", 2)) == {
        "id": 7,
        "index": 3,
        "prompt": "Q",
        "text": "A",
        "finish_reason": "stop",
        "tokens": [
            {"id": 5, "text": "A", "model": "slm", "logprob": -0.5},
            {"id": 5, "text": "", "model": "slm", "logprob": -0.5},
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "by_model": {"slm": 2, "llm": 0},
            "handoffs": 0,
            "dropped": 1,
        },
        "timing": {"ttft_s": 0.25, "latency_s": 0.5},
    }


@pytest.mark.parametrize(
    "row", [{"messages": [{"role": "user", "content": "Q"}]}, {"prompt_ids": [1]}, {"prompt": [1]}]
)
def test_an_output_row_repeats_the_prompt_whatever_its_form(row: dict[str, Any]) -> None:
    assert as_row(0, row, completion("A"))["prompt"] == next(iter(row.values()))


@given(order=st.permutations(range(8)), failing=st.sets(st.integers(0, 7)), as_json=st.booleans())
def test_rows_are_written_in_the_order_of_the_input_each_as_soon_as_it_can_be(
    order: list[int], failing: set[int], as_json: bool
) -> None:
    sink = io.StringIO()
    printed = Ordered(sink, as_json)
    done: set[int] = set()
    for index in order:
        if index in failing:
            printed.fail(index, {"prompt": "Q"}, InvalidRequest(f"bad {index}"))
        else:
            printed.add(index, as_row(index, {"prompt": "Q"}, completion(f"A{index}")), f"A{index}")
        done.add(index)
        ready = next((index for index in range(8) if index not in done), 8)
        lines = sink.getvalue().splitlines()
        if as_json:
            rows = [json.loads(line) for line in lines]
            assert [row["index"] for row in rows] == list(range(ready))
            assert [index for index in range(ready) if "error" in rows[index]] == sorted(
                failing & set(range(ready))
            )
        else:
            assert lines == ["" if index in failing else f"A{index}" for index in range(ready)]
    assert printed.failures == len(failing)
    assert printed.tokens == 8 - len(failing)


def test_a_row_that_failed_says_what_and_keeps_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    sink = io.StringIO()
    Ordered(sink, as_json=True).fail(0, {"prompt": "Q", "id": 7}, ContextTooLong("too long"))
    assert json.loads(sink.getvalue()) == {
        "prompt": "Q",
        "id": 7,
        "index": 0,
        "error": {"type": "ContextTooLong", "message": "too long"},
    }
    assert capsys.readouterr().err == "tokenflow run: row 0: too long\n"


class EchoRouter:
    """Answers every prompt with itself; the first ones take longest."""

    def __init__(self, recipe: str, *, overrides: list[str]) -> None:
        if recipe == "wrong.yaml":
            raise InvalidRequest("a wrong recipe")
        model = SimpleNamespace(name="echo", config=ModelConfig(path="nowhere"))
        self.recipe = SimpleNamespace(name=recipe, models=[model], simulated=())
        self._turns = 8

    async def __aenter__(self) -> EchoRouter:
        if self.recipe.name == "missing.yaml":
            raise ModelLoadError("no model there")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    async def generate(self, prompt: Any, **sampling: Any) -> Completion:
        self._turns -= 1
        for _ in range(self._turns):
            await anyio.lowlevel.checkpoint()
        return completion(f"{prompt}")


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "Router", EchoRouter)


def test_a_batch_survives_every_kind_of_bad_line(echo: None, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(
        b'{"prompt": "a"}\n\n{"prompt": "\xff"}\nnot json\n{"prompt": 7, "id": "x"}\n{"messages": "hi"}\n'
        b'{"prompt_ids": "12"}\n{"prompt": null}\n{"prompt": "z"}'
    )
    assert cli.main(["run", "echo.yaml", "--input", str(source), "--output", str(target)]) == 1
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(8))
    assert [row.get("text") for row in rows] == ["a", *[None] * 6, "z"]
    why = [row["error"]["message"] for row in rows[1:-1]]
    assert why[0].startswith("line 3 is not UTF-8, ")
    assert why[1].startswith("line 4 is not JSON: ")
    assert why[2:] == [
        "prompt must be a text or a list, got int",
        "messages must be a list, got str",
        "prompt_ids must be a list, got str",
        "line 8 has none of the keys prompt, messages, prompt_ids",
    ]
    assert rows[3]["id"] == "x"


def test_an_output_that_is_the_input_is_refused_before_it_is_lost(
    echo: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"prompt": "a"}\n')
    (tmp_path / "link.jsonl").symlink_to(source)
    argv = ["run", "echo.yaml", "--input", str(source), "--output", str(tmp_path / "link.jsonl")]
    assert cli.main(argv) == 2
    assert "--output would overwrite --input; give another file" in capsys.readouterr().err
    assert source.read_text() == '{"prompt": "a"}\n'


@pytest.mark.parametrize(
    ("recipe", "input_name", "code"),
    [("wrong.yaml", "in", 2), ("echo.yaml", "none", 1), ("missing.yaml", "in", 1)],
)
def test_an_old_output_is_kept_when_the_command_cannot_start(
    echo: None, tmp_path: Path, recipe: str, input_name: str, code: int
) -> None:
    (tmp_path / "in").write_text('{"prompt": "a"}\n')
    target = tmp_path / "out"
    target.write_text("precious")
    argv = ["run", recipe, "--input", str(tmp_path / input_name), "--output", str(target)]
    assert cli.main(argv) == code
    assert target.read_text() == "precious"


def test_a_prompt_comes_from_stdin_as_it_is(
    echo: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("ÿ\r\n".encode()), "ascii"))
    assert cli.main(["run", "echo.yaml", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "ÿ\r\n"


def test_what_is_said_in_a_chat_ends_before_the_line_end_of_stdin(
    echo: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\r\n"), "ascii"))
    assert cli.main(["run", "echo.yaml", "--json", "--chat", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == [{"role": "user", "content": "a\nb"}]


def test_a_new_output_replaces_an_old_one(echo: None, tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text('{"prompt": "a"}\n')
    target.write_text("old\n" * 1000)
    assert cli.main(["run", "echo.yaml", "--input", str(source), "--output", str(target)]) == 0
    assert [json.loads(line)["text"] for line in target.read_text().splitlines()] == ["a"]
