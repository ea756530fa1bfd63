import math

import pytest

from specdec.theory import best_k, break_even, expected_tokens, speedup, speedup_table

ALPHAS = [0.0, 0.1, 0.35, 0.5, 0.7, 0.8, 0.9, 0.99, 1.0]


def test_expected_tokens_by_hand():
    """1 + 1/2 + 1/4 + 1/8, and 1 + 0.9 + 0.81."""
    assert expected_tokens(0.5, 3) == 1.875
    assert expected_tokens(0.9, 2) == pytest.approx(2.71, abs=1e-12)


@pytest.mark.parametrize("k", [0, 1, 5, 40])
def test_expected_tokens_at_the_ends(k):
    assert expected_tokens(0, k) == 1
    assert expected_tokens(1, k) == k + 1


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("k", [0, 1, 3, 17])
def test_expected_tokens_is_the_closed_form(alpha, k):
    assert expected_tokens(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))


def test_expected_tokens_next_to_one():
    """The closed form divides two rounding errors here."""
    assert expected_tokens(1 - 2**-53, 7) == pytest.approx(8, abs=1e-12)


def test_corrected_table_of_the_seed_article():
    """c = 0.1; the article prints 1.38, 1.78, 2.00, 2.25 / ... for it."""
    table = speedup_table([0.5, 0.7, 0.8, 0.9], [3, 5, 7], 0.1)
    assert [[round(s, 2) for s in row] for row in table] == [
        [1.44, 1.95, 2.27, 2.65],
        [1.31, 1.96, 2.46, 3.12],
        [1.17, 1.85, 2.45, 3.35],
    ]


def test_speedup_by_hand():
    assert speedup(0.5, 3, 0.1) == pytest.approx(1.875 / 1.3)
    assert speedup(0.5, 3, 0.1, 1.5) == pytest.approx(1.875 / 1.8)
    assert speedup(0.5, 3, 0.1, lambda k: 1 + k / 10) == pytest.approx(1.875 / 1.6)
    assert speedup(1, 4, 0) == 5


@pytest.mark.parametrize("verify_cost", [1.0, 1.5, lambda k: 1 + k])
def test_no_drafts_is_plain_decoding(verify_cost):
    assert speedup(0.8, 0, 0.3, verify_cost) == 1


@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_monotone(k):
    """Grows with acceptance, shrinks with either cost."""
    by_alpha = [speedup(a, k, 0.1) for a in ALPHAS]
    assert all(a < b for a, b in zip(by_alpha, by_alpha[1:], strict=False))
    by_cost = [speedup(0.7, k, c) for c in (0, 0.05, 0.1, 0.5, 2)]
    assert all(a > b for a, b in zip(by_cost, by_cost[1:], strict=False))
    by_verify = [speedup(0.7, k, 0.1, v) for v in (0.9, 1, 1.1, 3)]
    assert all(a > b for a, b in zip(by_verify, by_verify[1:], strict=False))


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("cost_ratio", [0.0, 0.02, 0.1, 0.4, 1.5])
@pytest.mark.parametrize("verify_cost", [1.0, 1.5])
def test_best_k_by_brute_force(alpha, cost_ratio, verify_cost):
    best, value = 0, 1.0
    for k in range(1, 21):
        tokens = sum(alpha**i for i in range(k + 1))
        if tokens / (k * cost_ratio + verify_cost) > value + 1e-12:
            best, value = k, tokens / (k * cost_ratio + verify_cost)
    got = best_k(alpha, cost_ratio, verify_cost=verify_cost, max_k=20)
    assert speedup(alpha, got, cost_ratio, verify_cost) == pytest.approx(value)
    # near alpha = 0 and 1 several K are equal up to rounding
    assert got == best or math.isclose(speedup(alpha, got, cost_ratio, verify_cost), value)


def test_best_k_at_the_ends():
    assert best_k(0, 0.1) == 0  # nothing is ever accepted
    assert best_k(0, 0) == 0  # free drafts that are worth nothing: the smallest of equals
    assert best_k(1, 0, max_k=12) == 12
    assert best_k(0.5, 0.6) == 0  # a draft costs more than it brings
    assert best_k(0.9, 0.1, max_k=0) == 0
    assert best_k(0.8, 0.1) == 6
    assert best_k(0.8, 0.1, verify_cost=lambda k: 1 if k < 4 else 9) == 3


def test_break_even():
    # k = 1: 1 + a = c + v
    assert break_even(1, 0.1) == pytest.approx(0.1)
    assert break_even(1, 0.1, 1.5) == pytest.approx(0.6)
    for k in (1, 3, 8):
        assert speedup(break_even(k, 0.1, 1.4), k, 0.1, 1.4) == pytest.approx(1)
    assert break_even(3, 0) == 0
    assert break_even(0, 0.5) == 0
    assert break_even(2, 1) == 1  # a draft as slow as the target wins nothing even if always right
    assert break_even(2, 1.01) is None


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: expected_tokens(1.1, 3), "alpha: expected a number, at least 0 and at most 1"),
        (lambda: expected_tokens(-0.1, 3), "alpha"),
        (lambda: expected_tokens(math.nan, 3), "alpha"),
        (lambda: expected_tokens("0.5", 3), "alpha"),
        (lambda: expected_tokens(0.5, -1), "k: expected an integer >= 0, got -1"),
        (lambda: expected_tokens(0.5, 1.5), "k: expected an integer"),
        (lambda: expected_tokens(0.5, True), "k: expected an integer"),
        (lambda: speedup(0.5, 3, -0.1), "cost_ratio"),
        (lambda: speedup(0.5, 3, math.inf), "cost_ratio: expected a finite number"),
        (lambda: speedup(0.5, 3, 0.1, 0), "verify_cost: expected a number > 0"),
        (lambda: speedup(0.5, 3, 0.1, lambda k: -k), "verify_cost"),
        (lambda: best_k(0.5, 0.1, max_k=-1), "max_k"),
        (lambda: break_even(-1, 0.1), "k"),
        (lambda: speedup_table([0.5, 2], [3], 0.1), "alpha"),
    ],
)
def test_bad_inputs(call, message):
    with pytest.raises(ValueError, match=message):
        call()
