"""The planner: how fast a set of models can route, and when each should start its batches.

Plain functions over frozen data; no event loop.  ``docs/planner.md`` derives what is computed here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenflow.planner.evaluate import policy_throughput, throughput
    from tokenflow.planner.lookahead import Lookahead
    from tokenflow.planner.mdp import optimum
    from tokenflow.planner.model import RoutingModel, Throughput
    from tokenflow.planner.policy import Decision, Snapshot, StartPolicy, Thresholds
    from tokenflow.planner.search import Plan, PolicyPlan, best_policy, best_thresholds
    from tokenflow.planner.table import Planned, PolicyTable

__all__ = [
    "Decision",
    "Lookahead",
    "Plan",
    "Planned",
    "PolicyPlan",
    "PolicyTable",
    "RoutingModel",
    "Snapshot",
    "StartPolicy",
    "Thresholds",
    "Throughput",
    "best_policy",
    "best_thresholds",
    "optimum",
    "policy_throughput",
    "throughput",
]

_HOME = {
    "Decision": "policy",
    "Lookahead": "lookahead",
    "Plan": "search",
    "Planned": "table",
    "PolicyPlan": "search",
    "PolicyTable": "table",
    "RoutingModel": "model",
    "Snapshot": "policy",
    "StartPolicy": "policy",
    "Throughput": "model",
    "Thresholds": "policy",
    "best_policy": "search",
    "best_thresholds": "search",
    "optimum": "mdp",
    "policy_throughput": "evaluate",
    "throughput": "evaluate",
}


def __getattr__(name: str) -> Any:
    # A process that only decides when batches start must not wait for scipy.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
