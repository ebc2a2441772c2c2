"""How many of the active requests can still come to a model."""

from __future__ import annotations

from collections.abc import Iterable

from tokenflow.actors.sequence import Sequence
from tokenflow.dsl.ir import RecipeIR


class Reach:
    """Counts, by model, the requests that its recipe and its budgets still let it come to.

    :ivar fixed: whether that is always all of them, as where every model leads to every other one.
    """

    def __init__(self, recipe: RecipeIR) -> None:
        names = recipe.reachable()
        codes = {name: recipe.model(name).code for name in names}
        self.codes = tuple(codes.values())
        self._leads = {codes[name]: {codes[to] for to in recipe.reachable_from(name)} for name in names}
        self._limits = {
            codes[name]: budget.max_tokens
            for name, budget in recipe.budgets.items()
            if name in codes and budget.max_tokens is not None
        }
        self.fixed = not self._limits and all(leads == set(self.codes) for leads in self._leads.values())

    def counts(self, active: Iterable[Sequence]) -> tuple[int, ...]:
        """Requests that can still come to each model, in the order of ``codes``; those at it included."""
        requests = list(active)
        if self.fixed:
            return (len(requests),) * len(self.codes)
        return tuple(sum(self._can_come(request, code) for request in requests) for code in self.codes)

    def _can_come(self, request: Sequence, code: int) -> bool:
        limit = self._limits.get(code)
        return code in self._leads[request.holder] and (limit is None or request.written[code] < limit)
