"""Philox4x32-10 and the noise made from it."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from specdec_kernels import Stream, sample
from specdec_kernels._philox import philox4x32, to_gumbel, to_uniform
from specdec_kernels.testing import BACKENDS, chi_square, reference_philox

# kat_vectors of Random123 1.14: counter, key, result
KNOWN = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
SEEDS = [0, 1, -1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), 0x0123456789ABCDEF]


def words_of(text):
    return [int(word, 16) for word in text.split()]


def signed(seed):
    return (seed + 2**63) % 2**64 - 2**63


def philox(seed, position, index, step, stream):
    """The op on numbers."""
    tensors = [torch.tensor(x) for x in (signed(seed), position, index, step)]
    return philox4x32(*tensors, stream).tolist()


@pytest.mark.parametrize("counter, key, answer", KNOWN)
def test_known_answers(counter, key, answer):
    (position, index, step, stream), (low, high) = words_of(counter), words_of(key)
    assert philox(low | high << 32, position, index, step, stream) == words_of(answer)
    reference = reference_philox((position, index, step, stream), (low, high))
    assert [int(word) for word in reference] == words_of(answer)


def test_equals_reference_on_random_counters():
    seed, position, index, step = torch.randint(-(2**63), 2**63 - 1, (4, 500))
    position, index, step = (x % 2**32 for x in (position, index, step))
    got = philox4x32(seed, position, index, step, Stream.RESIDUAL)
    keys = seed.numpy().view(np.uint64)
    for i in range(500):
        counter = (position[i].item(), index[i].item(), step[i].item(), 3)
        want = reference_philox(counter, (int(keys[i]) % 2**32, int(keys[i]) >> 32))
        assert got[i].tolist() == [int(word) for word in want]


@pytest.mark.parametrize("seed", SEEDS)
def test_seeds_are_64_bit_patterns(seed):
    want = reference_philox((5, 6, 7, 1), (seed % 2**32, (seed % 2**64) >> 32))
    assert philox(seed, 5, 6, 7, 1) == [int(word) for word in want]


@pytest.mark.parametrize("backend", BACKENDS)
def test_unsigned_and_signed_seeds_are_the_same(backend):
    logits = torch.zeros(1, 3000)

    def token(seed):
        return sample(logits, seed=seed, backend=backend).tokens.item()

    for seed in SEEDS:
        assert token(seed) == token(seed % 2**64) == token(torch.tensor([signed(seed)]))
    assert token(2**64 - 1) == token(torch.tensor([2**64 - 1], dtype=torch.uint64))
    # both halves of the key count
    assert len({token(s) for s in (7, 7 + 2**32, 7 + 2**63, 8)}) == 4


@pytest.mark.parametrize("word", range(5))
def test_every_word_of_key_and_counter_counts(word):
    base = torch.tensor([11, 12, 13, 14])
    changed = base.clone()
    changed[min(word, 3)] += 1
    got = philox4x32(*changed, 1) if word < 4 else philox4x32(*base, 2)
    assert not set(got.tolist()) & set(philox4x32(*base, 1).tolist())


def test_counters_wrap_at_32_bits():
    base = philox(9, 3, 4, 5, 1)
    assert philox(9, 3 + 2**32, 4, 5, 1) == base
    assert philox(9, 3, 4, 5 - 2**32, 1) == base
    assert philox(9, -1, 4, 5, 1) == philox(9, 2**32 - 1, 4, 5, 1)


def test_depends_on_nothing_but_key_and_counter():
    seed, position = torch.arange(17)[:, None] * 10**17, torch.arange(17)[:, None] + 100
    index = torch.arange(9)
    whole = philox4x32(seed, position, index, 2, Stream.DRAFT)
    assert whole.shape == (17, 9, 4)
    for row in (0, 8, 16):
        alone = philox4x32(seed[row], position[row], index[-1:], torch.tensor(2), Stream.DRAFT)
        assert torch.equal(alone[0], whole[row, -1])


def test_streams_are_a_contract():
    assert {s.name: int(s) for s in Stream} == {
        "TARGET": 0,
        "DRAFT": 1,
        "ACCEPT": 2,
        "RESIDUAL": 3,
    }


def test_streams_are_independent():
    """The joint law of the first words of two streams under one counter is uniform."""
    seed = torch.arange(40_000)
    zero = torch.zeros_like(seed)
    cells = [philox4x32(seed, zero, zero, 0, s)[:, 0] >> 28 for s in Stream]
    for i in range(4):
        for j in range(i):
            counts = torch.bincount(cells[i] * 16 + cells[j], minlength=256)
            assert chi_square(counts, torch.ones(256)) > 1e-4


def test_uniform_ends():
    low, high = to_uniform(torch.tensor([0, 2**32 - 1])).tolist()
    assert low == 2.0**-33
    assert high == 1 - 2.0**-24
    near = to_uniform(2**32 - torch.arange(1, 600))
    assert bool((near < 1).all())
    assert bool((near.diff() <= 0).all())


def test_gumbel_ends():
    ends = to_gumbel(torch.tensor([0, 2**32 - 1]))
    assert bool(ends.isfinite().all())
    # -log(-log1p(-2^-33)) and -log(24 log 2)
    assert ends.tolist() == pytest.approx([33 * math.log(2), -math.log(24 * math.log(2))], abs=1e-4)
    assert 22.8 < ends[0] < 23


def test_noise_follows_its_laws():
    words = philox4x32(torch.arange(20_000), *torch.zeros(3, 1).long(), Stream.TARGET)
    assert kstest(to_uniform(words).flatten().numpy(), "uniform").pvalue > 1e-4
    assert kstest(to_gumbel(words).flatten().numpy(), "gumbel_r").pvalue > 1e-4


def test_gumbel_is_accurate_in_the_tail():
    """Small words make the large values; no step between them may be lost."""
    words = torch.arange(200)
    u = (words.double() + 0.5) * 2.0**-32
    torch.testing.assert_close(
        to_gumbel(words).double(), -(-torch.log1p(-u)).log(), rtol=0, atol=3e-6
    )
    assert to_gumbel(words).unique().numel() == 200
