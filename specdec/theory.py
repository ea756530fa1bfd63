"""What speculation is worth, from the acceptance rate and the cost of drafting.

Leviathan et al. 2023, arXiv:2211.17192, equation 1 and theorem 3.8. With acceptance rate a per
drafted token (independent of each other), K drafted tokens a round, a draft that costs c forwards
of the target per token, and a verifying forward that costs v(K) forwards of width one:

    tokens a round  E(a, K) = 1 + a + ... + a^K = (1 - a^(K+1)) / (1 - a)
    speed-up        S(a, K) = E(a, K) / (K c + v(K))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

VerifyCost = float | Callable[[int], float]


def _check_number(name: str, value: float, low: float, high: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        top = f"at most {high}" if high < math.inf else "finite"
        raise ValueError(f"{name}: expected a number, at least {low} and {top}, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, got {value!r}")


def _check_count(name: str, value: int, low: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name}: expected an integer >= {low}, got {value!r}")


def round_cost(k: int, cost_ratio: float, verify_cost: VerifyCost = 1.0) -> float:
    """Time of a round in forwards of width one: ``K c + v(K)``; 1 without drafts."""
    _check_count("k", k)
    _check_number("cost_ratio", cost_ratio, 0)
    # without drafts the round is one ordinary step, whatever a wide one costs
    verify = 1.0
    if k > 0:
        verify = verify_cost(k) if callable(verify_cost) else verify_cost
        _check_number("verify_cost", verify, 0)
        if verify == 0:
            raise ValueError("verify_cost: expected a number > 0, got 0")
    return k * cost_ratio + verify


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens a round yields on average, the corrected or bonus token included.

    Args:
        alpha: acceptance rate per drafted token, in [0, 1].
        k: tokens drafted a round, >= 0.
    """
    _check_number("alpha", alpha, 0, 1)
    _check_count("k", k)
    # summed, because the closed form loses its digits near alpha = 1
    return math.fsum(alpha**i for i in range(k + 1))


def speedup(alpha: float, k: int, cost_ratio: float, verify_cost: VerifyCost = 1.0) -> float:
    """How much faster than plain decoding; exactly 1 for ``k = 0``.

    Args:
        alpha: acceptance rate per drafted token, in [0, 1].
        k: tokens drafted a round, >= 0.
        cost_ratio: time of one drafted token over that of a target forward of width 1, >= 0.
        verify_cost: time of the target forward of width ``k + 1`` over that of width 1: a number
            or a function of ``k``; 1 where decoding is bound by reading the weights.
    """
    return expected_tokens(alpha, k) / round_cost(k, cost_ratio, verify_cost)


def best_k(
    alpha: float, cost_ratio: float, *, verify_cost: VerifyCost = 1.0, max_k: int = 32
) -> int:
    """The ``k`` in [0, max_k] of the largest speed-up, the smallest of equals; 0: do not draft."""
    _check_count("max_k", max_k)
    # max keeps the first of equals
    return max(range(max_k + 1), key=lambda k: speedup(alpha, k, cost_ratio, verify_cost))


def break_even(k: int, cost_ratio: float, verify_cost: VerifyCost = 1.0) -> float | None:
    """The acceptance rate from which ``k`` drafts stop losing time; None if no rate suffices."""
    cost = round_cost(k, cost_ratio, verify_cost)
    if cost > k + 1:
        return None
    low, high = 0.0, 1.0
    if cost <= 1:
        return low
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return high
        if expected_tokens(middle, k) < cost:
            low = middle
        else:
            high = middle


def speedup_table(
    alphas: Sequence[float],
    ks: Sequence[int],
    cost_ratio: float,
    verify_cost: VerifyCost = 1.0,
) -> list[list[float]]:
    """One row per ``k``, one column per ``alpha``."""
    return [[speedup(alpha, k, cost_ratio, verify_cost) for alpha in alphas] for k in ks]
