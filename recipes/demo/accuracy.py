"""Accuracy and LLM share of answers that ``tokenflow run`` wrote as JSON lines.

    tokenflow run recipes/demo.yaml --input recipes/demo/eval.jsonl --output out.jsonl
    python -m recipes.demo.accuracy out.jsonl [MORE.jsonl ...]

One line of the table per file.  The share is that of the tokens by member ``llm`` among all committed tokens,
end-of-sequence tokens included.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.demo.scores import Outcome, overall_table, task_table
from recipes.demo.tasks import is_correct

LARGE = "llm"


def outcome(row: Mapping[str, Any]) -> Outcome:
    """One output row, scored.

    :raises ValueError: if it reports an error, lacks a key of the evaluation prompts, or its tokens and usage
        disagree.
    """
    if "error" in row:
        raise ValueError(f"request failed: {row['error']}")
    for key in ("task", "reference", "text", "tokens", "usage"):
        if key not in row:
            raise ValueError(f"no key {key!r}; the input must be rows of eval.jsonl")
    usage = row["usage"]
    written = [token["model"] for token in row["tokens"]]
    counted = {name: count for name, count in usage["by_model"].items() if count}
    if {name: written.count(name) for name in set(written)} != counted:
        raise ValueError(f"tokens by model are {counted} in the usage, but the token list has others")
    return Outcome(
        task=row["task"],
        correct=is_correct(row["text"], row["reference"]),
        exact=row["text"] == row["reference"],
        tokens=len(written),
        large_tokens=written.count(LARGE),
        handoffs=usage["handoffs"],
    )


def outcomes(path: Path) -> list[Outcome]:
    """Every row of a file, scored; :raises ValueError: naming file and line of the first bad row."""
    scored = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                scored.append(outcome(json.loads(line)))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    if not scored:
        raise ValueError(f"{path}: no rows")
    return scored


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes.demo.accuracy", description="Score output rows.")
    parser.add_argument("files", nargs="+", type=Path, metavar="OUTPUT.jsonl")
    args = parser.parse_args()
    try:
        results = {str(path): outcomes(path) for path in args.files}
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(overall_table(results), task_table(results), sep="\n\n")


if __name__ == "__main__":
    main()
