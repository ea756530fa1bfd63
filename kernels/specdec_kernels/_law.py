"""The law a token is drawn from, and one draw from it.

A row of logits becomes unnormalised weights: temperature, top-k, top-p, min-p in transformers'
order. All three filters are one threshold on the value, so ties at a boundary are kept.

A draw is Gumbel-max in two levels: first a block of the vocabulary, by its sum, then an entry of
that block. It is exact (P(block) P(entry | block) = p), costs V/BLOCK + BLOCK Gumbels instead of V,
sums no long CDF, and two laws that share the noise agree nearly as often as with one Gumbel per
entry (Daliri et al. 2024, arXiv:2408.07978).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ._philox import philox4x32, to_gumbel

# entries per block of the vocabulary; part of the contract: another value gives other tokens
BLOCK = 512
# below this a temperature means greedy: in float32 such a law is the argmax, up to exact ties
GREEDY_TEMPERATURE = 1e-5
# how many of the largest entries top-k and top-p look at before they look at more (CPU only)
_CANDIDATES = 64


class Law(NamedTuple):
    """Unnormalised laws of R rows."""

    weights: torch.Tensor  # [R, V] float32, >= 0, the largest of a row is 1
    error: torch.Tensor  # [R] bool: no such law (NaN, +inf, nothing finite); weights are then NaN


def is_off(value: float | torch.Tensor, off: float) -> bool:
    return not isinstance(value, torch.Tensor) and value == off


def greedy_tokens(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Argmax over the last dimension, lowest id on ties, and where there is none (then 0)."""
    top, token = logits.max(dim=-1)  # the first of equal maxima
    error = top.isnan() | (top == -torch.inf)
    return token.masked_fill_(error, 0), error


def make_law(
    logits: torch.Tensor,
    temperature: float | torch.Tensor,
    top_k: int | torch.Tensor,
    top_p: float | torch.Tensor,
    min_p: float | torch.Tensor,
) -> Law:
    """Weights of the filtered law. ``logits`` is [R, V], parameters are numbers or [R] tensors."""
    x = logits.to(torch.float32, copy=True)
    top = x.amax(dim=-1, keepdim=True)
    error = ~top.isfinite().squeeze(-1)
    x.sub_(top)  # rows in error become nan and stay alone in it
    if isinstance(temperature, torch.Tensor):
        greedy = ~(temperature >= GREEDY_TEMPERATURE)
        tokens, no_token = greedy_tokens(logits)
        error = torch.where(greedy, no_token, error)
        error |= ~((temperature >= 0) & (temperature < torch.inf))
        x.div_(temperature.masked_fill(greedy, 1.0)[:, None])
        point = torch.full_like(x, -torch.inf).scatter_(1, tokens[:, None], 0.0)
        x = torch.where(greedy[:, None], point, x)
    elif temperature < GREEDY_TEMPERATURE:
        tokens, error = greedy_tokens(logits)
        x.fill_(-torch.inf).scatter_(1, tokens[:, None], 0.0)
    else:
        x.div_(temperature)
    weights = x.exp_()
    use_k = isinstance(top_k, torch.Tensor) or 0 < top_k < weights.shape[1]
    # the largest float32 below one
    use_p = isinstance(top_p, torch.Tensor) or top_p <= 1 - 2**-24
    if use_k or use_p:
        weights = _keep_nucleus(weights, top_k if use_k else 0, top_p)
    if not is_off(min_p, 0.0):
        # the largest weight is 1
        floor = min_p[:, None] if isinstance(min_p, torch.Tensor) else min_p
        weights.masked_fill_(weights < floor, 0.0)
    return Law(weights, error)


def _largest(x: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids of the n largest entries of each row, descending: ``x.topk(n)``, faster."""
    R, V = x.shape
    width = 64
    num_groups = V // width
    if n >= num_groups // 4:
        return x.topk(n, dim=-1)
    # the n largest lie in the n groups with the largest maxima, or in the rest of the row
    groups = x[:, : num_groups * width].unflatten(1, (num_groups, width)).amax(dim=-1).topk(n)[1]
    ids = (groups[..., None] * width + torch.arange(width, device=x.device)).flatten(1)
    if V % width:
        rest = torch.arange(num_groups * width, V, device=x.device).expand(R, -1)
        ids = torch.cat([ids, rest], dim=1)
    values, order = x.gather(1, ids).topk(n, dim=-1)
    return values, ids.gather(1, order)


def _keep_nucleus(
    weights: torch.Tensor, top_k: int | torch.Tensor, top_p: float | torch.Tensor
) -> torch.Tensor:
    """``weights`` [R, V] after top-k, then top-p; overwrites its argument.

    top-k keeps what is not below the k-th largest value; top-p keeps a value while the mass
    strictly above it is below ``top_p`` of what top-k kept. Both by value: ties stay together.
    """
    R, V = weights.shape
    k = torch.as_tensor(top_k, device=weights.device).expand(R)[:, None]
    # a number is rounded as a tensor would be, so that both cut at the same place
    p = torch.as_tensor(top_p, dtype=torch.float32, device=weights.device)
    p = p.double().expand(R)[:, None]
    has_k = (k > 0) & (k < V)
    unfiltered = ~has_k & (p >= 1)
    num_sorted = V
    if weights.device.type == "cpu":  # elsewhere looking at values would cost a sync: sort all
        num_sorted = min(V, max(_CANDIDATES, int((k * has_k).max()) + 1 if R else 0))
    total = block_sums(weights).sum(dim=-1, keepdim=True)
    while True:
        values, ids = _largest(weights, num_sorted)
        kth = values.gather(1, (k - 1).clamp(0, num_sorted - 1)).masked_fill_(~has_k, 0.0)
        mass = values.masked_fill(values < kth, 0.0).double()
        reach = p * torch.where(has_k, mass.sum(dim=-1, keepdim=True), total)
        inside = (mass.cumsum(dim=-1) - mass < reach) & (values >= kth)
        last = values.gather(1, (inside.sum(dim=-1, keepdim=True) - 1).clamp(min=0))
        threshold = torch.where(p >= 1, kth, last)
        # sorted far enough once something was left out; zero, and nan, is nothing
        enough = (values[:, -1:] < threshold) | ~(values[:, -1:] > 0) | unfiltered
        if num_sorted == V or bool(enough.all()):
            break
        num_sorted = min(V, num_sorted * 8)
    kept = values.masked_fill(values < threshold, 0.0)
    if isinstance(top_k, torch.Tensor) or isinstance(top_p, torch.Tensor):
        return torch.where(unfiltered, weights, torch.zeros_like(weights).scatter_(1, ids, kept))
    return weights.zero_().scatter_(1, ids, kept)


def block_sums(weights: torch.Tensor) -> torch.Tensor:
    """Mass of each block of ``weights`` [R, V]: [R, number of blocks].

    Every sum over a row goes through it: torch sums a lone row in another order than a batch.
    """
    num_full = weights.shape[1] // BLOCK
    sums = weights[:, : num_full * BLOCK].unflatten(1, (num_full, BLOCK)).sum(dim=-1)
    if weights.shape[1] % BLOCK:
        tail = weights[:, num_full * BLOCK :].sum(dim=-1, keepdim=True)
        sums = torch.cat([sums, tail], dim=1)
    return sums


def normalise_(weights: torch.Tensor) -> torch.Tensor:
    """Divide each row by its mass, in place."""
    return weights.div_(block_sums(weights).sum(dim=-1, keepdim=True))


def draw(
    weights: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    step: torch.Tensor | int,
    stream: int,
) -> torch.Tensor:
    """One token per row of ``weights`` [R, V] (>= 0, unnormalised) -> [R] int64.

    Noise: four Gumbels to a counter; the entries of the chosen block have the counter indices
    below BLOCK / 4, the blocks those from there on. A row without mass gives 0.
    """
    V = weights.shape[1]
    sums = block_sums(weights)
    num_blocks = sums.shape[1]
    lanes = min(V, BLOCK)
    num_counters = -(-lanes // 4)
    index = torch.arange(num_counters + -(-num_blocks // 4), device=weights.device)
    if lanes < BLOCK:  # a small vocabulary skips the noise of entries that it has not
        index[num_counters:] += BLOCK // 4 - num_counters
    step = step[:, None] if isinstance(step, torch.Tensor) else step
    words = philox4x32(seed[:, None], position[:, None], index, step, stream)
    noise = to_gumbel(words.flatten(1))
    entry_noise, block_noise = noise[:, :lanes], noise[:, num_counters * 4 :][:, :num_blocks]
    block = sums.log_().add_(block_noise).argmax(dim=-1)
    ids = block[:, None] * BLOCK + torch.arange(lanes, device=weights.device)
    chosen = weights.gather(1, ids.clamp(max=V - 1)).masked_fill_(ids >= V, 0.0)
    lane = chosen.log_().add_(entry_noise).argmax(dim=-1)
    return block * BLOCK + lane
