"""Sparse linear systems of Markov chains whose states are numbered in breadth-first order.

In that order the chain mostly moves on to higher numbers, so I - Q is nearly triangular: a Gauss-Seidel sweep
is an excellent preconditioner, and GMRES needs a few dozen products where a factorisation would fill in.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import sparse
from scipy.sparse.linalg import LinearOperator, gmres, splu

from tokenflow.planner.model import FloatArray

_TOLERANCE = 1e-12
_SWEEPS = 12


def stationary(transitions: sparse.csr_array) -> FloatArray:
    """Stationary distribution [S] of an irreducible chain [S, S], periodic or not."""
    size = transitions.shape[0]
    if size == 1:
        return np.ones(1)
    inflow = transitions.T.tocsr()
    sweep = _triangular_solver(sparse.eye_array(size) - sparse.tril(inflow))
    above = sparse.triu(inflow, k=1).tocsr()
    guess: FloatArray = np.ones(size)
    for _ in range(_SWEEPS):
        guess = sweep(above @ guess)
        guess /= guess.sum()
    # Fix the weight of one frequent state; the weights of the others then solve a regular system.
    pin = int(np.argmax(guess))
    others = np.delete(np.arange(size), pin)
    weight: FloatArray = np.ones(size)
    weight[others] = _solve(
        sparse.eye_array(size - 1) - inflow[others][:, others],
        inflow[others][:, [pin]].toarray().ravel(),
        triangle=sparse.tril,
        guess=guess[others] / guess[pin],
    )
    share: FloatArray = weight / weight.sum()
    return share


def expected_total(transitions: sparse.csr_array, reward: FloatArray) -> FloatArray:
    """Expected sum of ``reward`` [S] until a chain [S, S], whose rows may sum to less than 1, is left."""
    size = transitions.shape[0]
    return _solve(sparse.eye_array(size) - transitions, reward, triangle=sparse.triu)


def _solve(
    system: sparse.sparray,
    right: FloatArray,
    *,
    triangle: Callable[[sparse.sparray], sparse.sparray],
    guess: FloatArray | None = None,
) -> FloatArray:
    """Solve by GMRES, preconditioned by one triangle; directly, should that stall."""
    sweep = LinearOperator(system.shape, matvec=_triangular_solver(triangle(system)), dtype=float)
    solution, failed = gmres(
        system.tocsr(), right, x0=guess, rtol=_TOLERANCE, restart=60, maxiter=10, M=sweep
    )
    if failed:
        solution = splu(system.tocsc()).solve(right)
    result: FloatArray = solution
    return result


def _triangular_solver(matrix: sparse.sparray) -> Callable[[FloatArray], FloatArray]:
    # Natural order and no pivoting: the factors are the triangle itself.
    factors = splu(
        matrix.tocsc(),
        permc_spec="NATURAL",
        diag_pivot_thresh=0.0,
        options={"SymmetricMode": True, "Equil": False},
    )
    solve: Callable[[FloatArray], FloatArray] = factors.solve
    return solve
