"""Text marked by the model that wrote it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow.console import Painter, share_line
from tokenflow.types import Completion, StreamEvent, Timing, Token, Usage

MODELS = ("slm", "mid", "llm")
CYAN, YELLOW, MAGENTA, END = "\x1b[36m", "\x1b[33m", "\x1b[35m", "\x1b[0m"


def event(*written: tuple[str, str], rest: str = "") -> StreamEvent:
    """An event of (model, text) tokens; ``rest`` is text that belongs to no token of it."""
    tokens = tuple(Token(0, text, model) for model, text in written)
    return StreamEvent("".join(text for _, text in written) + rest, tokens)


def test_without_colours_brackets_mark_all_but_the_first_model() -> None:
    painter = Painter(MODELS, color=False)
    painted = painter.paint(event(("slm", "a"), ("mid", "b"), ("mid", "c"), ("llm", "d"), ("slm", "e")))
    assert painted + painter.end() == "a«bc»‹d›e"


def test_with_colours_every_model_has_its_own() -> None:
    painter = Painter(MODELS, color=True)
    painted = painter.paint(event(("slm", "a"), ("mid", "b"), ("llm", "c")))
    assert painted + painter.end() == f"{CYAN}a{END}{YELLOW}b{END}{MAGENTA}c{END}"


def test_a_mark_lasts_over_events_until_the_model_changes() -> None:
    painter = Painter(MODELS, color=False)
    parts = [
        painter.paint(event(("mid", "a"))),
        painter.paint(event(("mid", "b"))),
        painter.paint(event(("slm", "c"))),
    ]
    assert parts == ["«a", "b", "»c"]
    assert painter.end() == ""


def test_a_token_without_text_changes_no_mark() -> None:
    painter = Painter(MODELS, color=False)
    assert painter.paint(event(("slm", "a"), ("llm", ""), ("slm", "b"))) == "ab"


def test_text_beyond_the_tokens_keeps_the_mark_it_is_in() -> None:
    painter = Painter(MODELS, color=False)
    assert painter.paint(event(("mid", "a"), rest="bc")) == "«abc"
    assert painter.paint(event(rest="d")) == "d"
    assert painter.end() == "»"
    assert painter.end() == ""


def test_the_legend_shows_each_model_in_its_own_mark() -> None:
    assert Painter(MODELS, color=False).legend() == "slm  «mid»  ‹llm›"
    colored = f"{CYAN}slm{END}  {YELLOW}mid{END}  {MAGENTA}llm{END}"
    assert Painter(MODELS, color=True).legend() == colored


def test_more_models_than_marks_share_them() -> None:
    names = [f"m{index}" for index in range(7)]
    assert Painter(names, color=True).legend().count(CYAN) == 2


@given(
    events=st.lists(
        st.lists(st.tuples(st.sampled_from(MODELS), st.text("abc ", max_size=3)), max_size=4), max_size=5
    ),
    color=st.booleans(),
)
def test_without_its_marks_the_text_is_unchanged_and_every_mark_is_closed(
    events: list[list[tuple[str, str]]], color: bool
) -> None:
    painter = Painter(MODELS, color)
    painted = "".join(painter.paint(event(*written)) for written in events) + painter.end()
    plain = re.sub(r"\x1b\[\d+m|[«»‹›]", "", painted)
    assert plain == "".join(text for written in events for _, text in written)
    opened, closed = (r"\x1b\[3\dm", r"\x1b\[0m") if color else ("[«‹]", "[»›]")
    assert len(re.findall(opened, painted)) == len(re.findall(closed, painted))


@pytest.mark.parametrize(("latency_s", "rate"), [(2.0, "2"), (0.0, "0")])
def test_the_line_of_figures(latency_s: float, rate: str) -> None:
    usage = Usage(10, 4, {"slm": 3, "llm": 1}, handoffs=2, dropped=1)
    completion = Completion("text", (), "stop", usage, Timing(0.125, latency_s), seed=0)
    assert share_line(completion) == (
        "4 tokens: slm 75.0%, llm 25.0%; 2 hand-offs, 1 token dropped; "
        f"first token after 0.125 s, {rate} tokens/s"
    )
