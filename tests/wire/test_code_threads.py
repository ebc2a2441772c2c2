"""Importing recipes from several threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokenflow.wire.code import find


def test_a_thread_never_sees_a_file_that_another_is_still_importing(tmp_path: Path) -> None:
    file = tmp_path / "recipe.py"
    slow = "total = sum(range(3_000_000))"
    file.write_text(f"{slow}\ndef last():\n    return total\n")
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(find, [str(file)] * 4, ["last"] * 4))
    assert len({id(definition) for definition in found}) == 1
