"""Counter-based random numbers: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as
easy as 1, 2, 3", section 3.3), and the uniforms and Gumbel noise made from them.

Key = the request's seed; counter = (position, index, step, stream). A number depends on nothing
else: not on the row, the batch, the device or the process.

The 32-bit words make uniforms u = (r + 0.5) 2^-32, so a Gumbel draw reaches 22.9 and the mass that
no draw can reach is below 2^-33 (24-bit uniforms stop at 16.6 and lose the tail of a vocabulary).
"""

from __future__ import annotations

from enum import IntEnum

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
# the largest float32 below one: u < 1 must hold after rounding, so that a ratio of 1 always passes
_BELOW_ONE = 1 - 2**-24


class Stream(IntEnum):
    """Who draws. Sharing a stream between two purposes biases the output."""

    TARGET = 0  # a token of the target's law at an absolute position (sample, match)
    DRAFT = 1  # a drafter's own draws, keyed by block start and index in the block
    ACCEPT = 2  # the acceptance tests of token and block verification
    RESIDUAL = 3  # the corrected or bonus token of token and block verification


def philox4x32(
    seed: torch.Tensor,
    position: torch.Tensor,
    index: torch.Tensor,
    step: torch.Tensor | int,
    stream: int,
) -> torch.Tensor:
    """Four 32-bit words per counter, as int64 in [0, 2^32).

    Args:
        seed, position, index, step: int64 tensors that broadcast together (``step`` may be a
            number); ``seed`` is used whole, the others modulo 2^32.
        stream: one of ``Stream``.

    Returns:
        [*broadcast, 4] int64.
    """
    seed, position, index, step = torch.broadcast_tensors(
        seed, position, index, torch.as_tensor(step, device=seed.device)
    )
    # the two halves of a round are one stacked tensor: half the launches. From one round to the
    # next the halves change places, so every second round has them, and the constants, reversed
    pair = [-1] + [1] * seed.ndim
    multiplier = seed.new_tensor(_MULTIPLIERS).view(pair)
    multipliers = (multiplier, multiplier.flip(0))
    key = torch.stack([seed & _MASK, (seed >> 32) & _MASK])
    rounds = torch.arange(10, device=seed.device).view([-1, 1] + pair[1:])
    keys = (key + rounds * seed.new_tensor(_WEYL).view(pair)) & _MASK
    keys = (keys.flip(1).unbind(), keys.unbind())
    even = torch.stack([position, step]) & _MASK  # words 0 and 2
    odd = torch.stack([index & _MASK, torch.full_like(index, int(stream))])  # words 1 and 3
    for i in range(10):
        # all 64 bits of the product, whatever its sign
        product = even * multipliers[i % 2]
        even = product >> 32
        even ^= odd.flip(0)
        even ^= keys[i % 2][i]
        even &= _MASK
        odd = product.bitwise_and_(_MASK)
    return torch.stack([even[0], odd[0], even[1], odd[1]], dim=-1)


def to_uniform(words: torch.Tensor) -> torch.Tensor:
    """Words in [0, 2^32) to float32 in (0, 1)."""
    return ((words.float() + 0.5) * 2.0**-32).clamp_(max=_BELOW_ONE)


def to_gumbel(words: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, -log(-log(1 - u)): small u, which are exact, make the large values."""
    return to_uniform(words).neg_().log1p_().neg_().log_().neg_()
