"""What the demo pair answers while things go wrong; a scenario that is not as promised is broken.

::

    python -m bench.chaos                          every scenario but the soak
    python -m bench.chaos kills --kills 300        some of them
    python -m bench.chaos soak --seconds 900

The seed decides prompts, moments and victims.  Answers and routes are compared with those of an undisturbed
run.  Engines run inside ``tests/faults/chaos.py``, which keeps books of what they hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from bench.scenarios.deaths import degrade, kills, loading, orphans, simulated, states, stops
from bench.scenarios.load import cancels, memory, mixed, soak
from bench.scenarios.setup import Broken

RESULTS = Path(__file__).parent / "results" / "chaos.json"

Scenario = Callable[[argparse.Namespace], Coroutine[Any, Any, dict[str, Any]]]
SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        kills,
        states,
        simulated,
        cancels,
        stops,
        degrade,
        orphans,
        loading,
        memory,
        mixed,
        soak,
    )
}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    name: str
    ok: bool
    seconds: float
    facts: dict[str, Any]

    def __str__(self) -> str:
        facts = "; ".join(f"{key} {value}" for key, value in self.facts.items())
        return f"{self.name:10} {'ok' if self.ok else 'BROKEN':7} {self.seconds:7.1f} s  {facts}"


def run(name: str, options: argparse.Namespace) -> Row:
    started = time.monotonic()
    loop = None if name == "cancels" else uvloop.new_event_loop
    facts: dict[str, Any]
    try:
        with asyncio.Runner(loop_factory=loop) as runner:
            facts, ok = runner.run(SCENARIOS[name](options)), True
    except Broken as error:
        facts, ok = {"broken": str(error)}, False
    return Row(name, ok, time.monotonic() - started, facts)


def main() -> int:
    """Run scenarios, print the table, keep the figures."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__, formatter_class=raw)
    parser.add_argument("scenario", nargs="*", choices=[[], *SCENARIOS], help="all but the soak")
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--kills", type=int, default=300, help="a sixth of them in other recipes")
    parser.add_argument("--cancels", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=300.0, help="of the soak")
    options = parser.parse_args()
    rows = []
    for name in options.scenario or [name for name in SCENARIOS if name != "soak"]:
        row = run(name, options)
        print(row, flush=True)
        rows.append(row)
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        kept[name] = {"ok": row.ok, "seed": options.seed, "took_s": round(row.seconds, 1), **row.facts}
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
