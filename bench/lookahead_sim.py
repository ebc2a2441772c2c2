"""The lookahead policy against the best static thresholds and against the best of all policies, simulated.

    python bench/lookahead_sim.py [--concurrency 2,4,8,16] [--steps 200000]

Two models as in R2R: the small one hands over with probability p, the large one writes one token and hands
back.  The small one takes 6 ms, the large one 2.02, 4.65 and 10 times as long.  Prints one line per case and
writes bench/results/lookahead_sim.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tokenflow.planner import Lookahead, RoutingModel, Thresholds, best_policy, optimum, policy_throughput
from tokenflow.planner.simulate import simulate

RESULTS = Path(__file__).parent / "results" / "lookahead_sim.json"
SMALL_MS = 6.0
RATIOS = (2.02, 4.65, 10.0)
PROBABILITIES = (0.05, 0.2, 0.35, 0.5)
JITTER = 0.05


@dataclass(frozen=True)
class Case:
    """One cell of the grid.  Throughputs are output tokens/s; thresholds are (small, large)."""

    concurrency: int
    p: float
    ratio: float
    eager: float
    static_thresholds: tuple[int, ...]
    static: float
    lookahead_thresholds: tuple[int, ...]
    lookahead: float
    lookahead_without_thresholds: float
    optimum: float
    simulated_static: float
    simulated_static_half_width: float
    simulated_lookahead: float
    simulated_lookahead_half_width: float
    jittered_static: float
    jittered_lookahead: float


def measure(concurrency: int, p: float, ratio: float, steps: int) -> Case:
    """Plan one cell, and simulate both plans on the same routes, with constant latencies and with jitter."""
    model = RoutingModel([[1 - p, p], [1, 0]], [[1, 0], [1, 0]], [SMALL_MS, SMALL_MS * ratio])
    plan = best_policy(model, concurrency)
    jittery = replace(model, jitter=JITTER)
    static, lookahead = Thresholds(plan.static.thresholds), plan.lookahead
    runs = [simulate(model, policy, concurrency, steps=steps) for policy in (static, lookahead)]
    jittered = [simulate(jittery, policy, concurrency, steps=steps) for policy in (static, lookahead)]
    return Case(
        concurrency=concurrency,
        p=p,
        ratio=ratio,
        eager=plan.static.eager.tokens_per_s,
        static_thresholds=plan.static.thresholds,
        static=plan.static.tokens_per_s,
        lookahead_thresholds=lookahead.thresholds,
        lookahead=plan.lookahead_throughput.tokens_per_s,
        lookahead_without_thresholds=policy_throughput(
            model, Lookahead.of(model, concurrency), concurrency
        ).tokens_per_s,
        optimum=optimum(model, concurrency).tokens_per_s,
        simulated_static=runs[0].tokens_per_s,
        simulated_static_half_width=runs[0].half_width,
        simulated_lookahead=runs[1].tokens_per_s,
        simulated_lookahead_half_width=runs[1].half_width,
        jittered_static=jittered[0].tokens_per_s,
        jittered_lookahead=jittered[1].tokens_per_s,
    )


def main() -> None:
    """Run the grid."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--concurrency", default="2,4,8,16")
    parser.add_argument("--steps", type=int, default=200_000)
    options = parser.parse_args()
    began = time.process_time()
    cases = []
    print("simulated; % are relative to the best static thresholds of the same column's latencies")
    print("  N     p  ratio  static B     tok/s   lookahead B  model  simulated  jitter 5%  optimum")
    for concurrency in map(int, options.concurrency.split(",")):
        for p in PROBABILITIES:
            for ratio in RATIOS:
                case = measure(concurrency, p, ratio, options.steps)
                cases.append(case)
                print(
                    f"{case.concurrency:3} {case.p:5.2f} {case.ratio:6.2f}  {case.static_thresholds!s:9}"
                    f" {case.static:8.1f}   {case.lookahead_thresholds!s:9}"
                    f" {gain(case.lookahead, case.static):+7.2f}%"
                    f" {gain(case.simulated_lookahead, case.simulated_static):+8.2f}%"
                    f" {gain(case.jittered_lookahead, case.jittered_static):+9.2f}%"
                    f" {gain(case.optimum, case.static):+8.2f}%",
                    flush=True,
                )
    for name, values in summaries(cases).items():
        print(
            f"{name}: median {statistics.median(values):+.2f} %, {min(values):+.2f} to {max(values):+.2f} %"
        )
    RESULTS.parent.mkdir(exist_ok=True)
    record = {
        "simulated": True,
        "steps": options.steps,
        "jitter": JITTER,
        "cases": [asdict(case) for case in cases],
    }
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{RESULTS} ({time.process_time() - began:.0f} s of processor time)")


def summaries(cases: list[Case]) -> dict[str, list[float]]:
    """Gains in percent over all cells, by name."""
    return {
        "lookahead over the best static thresholds, model": [gain(c.lookahead, c.static) for c in cases],
        "lookahead over the best static thresholds, simulated": [
            gain(c.simulated_lookahead, c.simulated_static) for c in cases
        ],
        "the same with 5 % jitter": [gain(c.jittered_lookahead, c.jittered_static) for c in cases],
        "lookahead without thresholds over the best static ones": [
            gain(c.lookahead_without_thresholds, c.static) for c in cases
        ],
        "lookahead over the optimum of all policies": [gain(c.lookahead, c.optimum) for c in cases],
    }


def gain(value: float, base: float) -> float:
    """Percent by which ``value`` exceeds ``base``."""
    return 100 * (value / base - 1)


if __name__ == "__main__":
    main()
