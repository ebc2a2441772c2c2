"""How answers fared, and the tables that say so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from recipes.demo.tasks import TASKS


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answer.

    :param correct: the part that counts is right.
    :param exact: the whole text is the reference.
    :param tokens: committed tokens, the end-of-sequence token included.
    :param large_tokens: how many of them the large model wrote.
    :param handoffs: how often the request changed models, there and back.
    """

    task: str
    correct: bool
    exact: bool
    tokens: int
    large_tokens: int
    handoffs: int


@dataclass(frozen=True, slots=True)
class Score:
    """Means over many answers; ``share`` is the large model's part of all tokens."""

    answers: int
    accuracy: float
    exact: float
    share: float
    handoffs: float
    tokens: float


def score(outcomes: Sequence[Outcome]) -> Score:
    """:raises ValueError: if there is nothing to score."""
    if not outcomes:
        raise ValueError("no answers to score")
    n = len(outcomes)
    tokens = sum(outcome.tokens for outcome in outcomes)
    return Score(
        answers=n,
        accuracy=sum(outcome.correct for outcome in outcomes) / n,
        exact=sum(outcome.exact for outcome in outcomes) / n,
        share=sum(outcome.large_tokens for outcome in outcomes) / tokens,
        handoffs=sum(outcome.handoffs for outcome in outcomes) / n,
        tokens=tokens / n,
    )


def overall_table(results: Mapping[str, Sequence[Outcome]]) -> str:
    """One line per setting, in Markdown."""
    header = (
        "setting",
        "accuracy",
        "whole text exact",
        "LLM share of tokens",
        "hand-offs/request",
        "tokens/request",
    )
    rows = []
    for name, outcomes in results.items():
        s = score(outcomes)
        rows.append(
            (
                name,
                f"{s.accuracy:.3f}",
                f"{s.exact:.3f}",
                f"{s.share:.4f}",
                f"{s.handoffs:.1f}",
                f"{s.tokens:.1f}",
            )
        )
    return markdown(header, rows)


def task_table(results: Mapping[str, Sequence[Outcome]]) -> str:
    """Accuracy and LLM share of every task, one line per setting, in Markdown."""
    met = {outcome.task for outcomes in results.values() for outcome in outcomes}
    tasks = [task for task in TASKS if task in met] + sorted(met - set(TASKS))
    rows = [(name, *(_cell(outcomes, task) for task in tasks)) for name, outcomes in results.items()]
    return markdown(("accuracy @ LLM share", *tasks), rows)


def _cell(outcomes: Iterable[Outcome], task: str) -> str:
    of_task = [outcome for outcome in outcomes if outcome.task == task]
    if not of_task:
        return "-"
    s = score(of_task)
    return f"{s.accuracy:.2f} @ {s.share:.3f}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose columns line up as plain text too."""
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    ]
    padded.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in padded)
