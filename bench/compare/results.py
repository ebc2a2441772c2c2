"""Results on disk: one file, written after every run, so that an interrupted comparison can go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "compare.json"
_KEY = {"cell", "system", "repetition"}
"""What a run is known by."""


class Results:
    """Runs by cell, system and repetition."""

    def __init__(self, path: Path) -> None:
        """Read what is there; :raises SystemExit: if it is something else."""
        self._path = path
        self._data: dict[str, Any] = {"machine": {}, "check": {}, "seconds": 0.0, "runs": []}
        if path.exists():
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
                known = found.keys() >= self._data.keys() and all(run.keys() >= _KEY for run in found["runs"])
                if not known:
                    raise ValueError("other keys")
            except (OSError, ValueError, TypeError, AttributeError) as error:
                raise SystemExit(
                    f"{path} does not hold results of a comparison ({error}): "
                    "move it away, or name another file with --results"
                ) from None
            self._data = found

    @property
    def machine(self) -> dict[str, Any]:
        """What the runs were measured on."""
        machine: dict[str, Any] = self._data["machine"]
        return machine

    @property
    def check(self) -> dict[str, Any]:
        """What the comparison of outputs found, by models."""
        found: dict[str, Any] = self._data["check"]
        return found

    @property
    def seconds(self) -> float:
        """What all runs took, with the loading of models."""
        seconds: float = self._data["seconds"]
        return seconds

    def note_seconds(self, seconds: float) -> None:
        """Add the time of one sitting."""
        self._data["seconds"] += round(seconds, 1)
        self._write()

    def has(self, cell: str, system: str, repetition: int) -> bool:
        """Whether the run is there."""
        return any(
            (run["cell"], run["system"], run["repetition"]) == (cell, system, repetition)
            for run in self._data["runs"]
        )

    def add(self, cell: str, system: str, repetition: int, figures: dict[str, Any]) -> None:
        """Keep a run."""
        self._data["runs"].append(
            {"cell": cell, "system": system, "repetition": repetition, **_short(figures)}
        )
        self._write()

    def of(self, cell: str, system: str) -> list[dict[str, Any]]:
        """The runs of a cell by a system."""
        return [run for run in self._data["runs"] if (run["cell"], run["system"]) == (cell, system)]

    def note_machine(self, machine: dict[str, Any]) -> None:
        """Keep what the runs are measured on; another machine's runs are not mixed in.

        :raises SystemExit: if the file has runs of another machine, or cannot be written.
        """
        if self._data["runs"] and self.machine != machine:
            raise SystemExit(
                f"{self._path} has runs of another machine ({self.machine}); this is {machine}: "
                "move it away, or name another file with --results"
            )
        self._data["machine"] = machine
        self._write()

    def note_check(self, models: str, found: dict[str, Any]) -> None:
        """Keep what the comparison of outputs found."""
        self.check[models] = found
        self._write()

    def _write(self) -> None:
        new = self._path.with_suffix(".tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps(self._data, indent=1) + "\n", encoding="utf-8")
            new.replace(self._path)
        except OSError as error:
            raise SystemExit(f"results cannot be kept in {self._path}: {error}") from None


def _short(figures: dict[str, Any]) -> dict[str, Any]:
    """Five significant digits are plenty."""
    return {
        key: [float(f"{item:.5g}") for item in value]
        if isinstance(value, list)
        else (float(f"{value:.5g}") if isinstance(value, float) else value)
        for key, value in figures.items()
    }
