"""What a model may write of a response: its budget, and whether the request is for another model alone."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from tokenflow.actors.sequence import Sequence
from tokenflow.dsl.ir import BudgetIR


class Budgets:
    """The budgets of a recipe, by model code.  A model without one is never refused."""

    def __init__(self, budgets: Mapping[int, BudgetIR]) -> None:
        self._budgets = budgets
        # As it is written: 29 of 100 tokens are 0.29 of them, though the float is a little less.
        self._shares = {
            code: Fraction(str(budget.max_share)) if budget.max_share is not None else None
            for code, budget in budgets.items()
        }

    def allows(self, sequence: Sequence, code: int) -> bool:
        """Whether model ``code`` may write one more token of the response."""
        if sequence.only:
            return code == sequence.only
        budget = self._budgets.get(code)
        if budget is None:
            return True
        written = sequence.written[code]
        if budget.max_tokens is not None and written >= budget.max_tokens:
            return False
        share = self._shares[code]
        if share is None:
            return True
        return (written + 1) * share.denominator <= share.numerator * (sequence.output_tokens + 1)
