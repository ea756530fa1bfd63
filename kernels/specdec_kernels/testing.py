"""What the tests of several ops share: an independent reference, exact laws, chi-square.

The reference is NumPy in float64, one request at a time, written from the papers and from the
contract. It shares no code with the ops. Only tests import this module: it needs numpy and scipy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

BACKENDS = ["torch"]
METHODS = ["greedy", "match", "token", "block", "typical"]
Array = Any  # numpy.ndarray, which is not imported here

# ---- random numbers: Salmon et al. 2011, section 3.3 ----


def reference_philox(counter: Sequence, key: Sequence[int]) -> list[Array]:
    """Philox4x32-10: four counter words (integers or arrays) and two key words to four words."""
    import numpy as np

    x = [np.asarray(word, dtype=np.uint64) for word in counter]
    k0, k1 = key
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * x[0], np.uint64(0xCD9E8D57) * x[2]
        x = [
            (b >> shift) ^ x[1] ^ np.uint64(k0),
            b & mask,
            (a >> shift) ^ x[3] ^ np.uint64(k1),
            a & mask,
        ]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return x


def reference_uniform(seed: int, position: int, index: Array, step: int, stream: int) -> Array:
    """Uniforms of the contract, [len(index), 4] in (0, 1)."""
    import numpy as np

    index = np.asarray(index)
    position, step = (np.full(index.shape, word % 2**32) for word in (position, step))
    seed %= 2**64
    counter = (position, index, step, np.full(index.shape, int(stream)))
    words = reference_philox(counter, (seed % 2**32, seed >> 32))
    return (np.stack(words, axis=-1) + 0.5) * 2.0**-32


def reference_draw(weights: Array, seed: int, position: int, step: int, stream: int) -> int:
    """Two-level Gumbel-max over blocks of 512: one token of the law ``weights`` [V]."""
    import numpy as np

    blocks = [weights[i : i + 512] for i in range(0, len(weights), 512)]
    index = np.arange(128 + math.ceil(len(blocks) / 4))
    noise = -np.log(-np.log1p(-reference_uniform(seed, position, index, step, stream).ravel()))
    with np.errstate(divide="ignore"):
        sums = np.log([block.sum() for block in blocks])
        block = int(np.argmax(sums + noise[512 : 512 + len(blocks)]))
        entries = np.log(blocks[block])
    return block * 512 + int(np.argmax(entries + noise[: len(entries)]))


# ---- laws ----


def one_hot(token: int, num_tokens: int) -> Array:
    import numpy as np

    law = np.zeros(num_tokens)
    law[token] = 1
    return law


def reference_law(
    logits: Array,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Array | None:
    """The filtered law of one row [V], or None for a row in error."""
    import numpy as np

    x = np.asarray(logits, dtype=np.float64)
    if np.isnan(x).any() or x.max() == -np.inf or not 0 <= temperature < np.inf:
        return None
    if temperature < 1e-5:
        return one_hot(int(np.argmax(x)), len(x))
    if x.max() == np.inf:
        return None
    p = np.exp((x - x.max()) / temperature)
    if 0 < top_k < len(p):
        p[p < np.sort(p)[-top_k]] = 0
    if top_p < 1:
        values = np.sort(p)[::-1]
        above = np.cumsum(values) - values
        keep = max(int((above < top_p * p.sum()).sum()), 1)
        p[p < values[keep - 1]] = 0
    p[p < min_p] = 0
    return p / p.sum()


# ---- verification ----


def thresholds(method: str, p: Array, q: Array, draft: Sequence[int]) -> list[float]:
    """h_1..h_g: "token" keeps x_i after x_<i iff u_i < h_i, "block" the last i with u_i < h_i.

    ``p`` [>= g, V] and ``q`` [g, V] are the laws along ``draft``.
    """
    g = len(draft)
    ratio = [
        0.0 if p[i][x] == 0 else math.inf if q[i][x] == 0 else p[i][x] / q[i][x]
        for i, x in enumerate(draft)
    ]
    if method == "token":
        return [min(1.0, r) for r in ratio]
    w = block_weights(ratio)
    h = []
    for i in range(1, g):
        excess = (w[i] * p[i] - q[i]).clip(min=0).sum()
        slack = excess + 1 - w[i]
        h.append(excess / slack if slack > 0 else 1.0)
    return [*h, w[g]] if g else []


def block_weights(ratio: Sequence[float]) -> list[float]:
    """w_0..w_g of Sun et al., from the ratios p/q."""
    w = [1.0]
    for r in ratio:
        w.append(0.0 if w[-1] == 0 else min(1.0, w[-1] * r))
    return w


def residual(method: str, p: Array, q: Array, draft: Sequence[int], kept: int) -> Array:
    """The law of the token after ``kept`` drafts, normalised."""
    row = p[kept]
    if kept < len(draft):
        w = 1.0
        if method == "block":
            for i, x in enumerate(draft[:kept]):
                w = min(1.0, w * p[i][x] / q[i][x]) if q[i][x] else float(p[i][x] > 0)
        rest = (w * row - q[kept]).clip(min=0)
        row = rest if rest.sum() > 0 else row
    return row / row.sum()


def kept_law(method: str, h: Sequence[float]) -> list[float]:
    """P(0..g drafts are kept), from the thresholds."""
    g = len(h)
    if method == "token":
        reach = [math.prod(h[:i]) for i in range(g + 1)]
        return [reach[i] * (1 - h[i]) for i in range(g)] + [reach[g]]
    return [([1.0, *h])[i] * math.prod(1 - x for x in h[i:]) for i in range(g + 1)]


def output_law(
    p: Callable, q: Callable, num_tokens: int, num_drafts: int, verify: Callable
) -> tuple[Array, float]:
    """The exact joint law of ``num_drafts + 1`` tokens of one round, completed with the target.

    ``p(prefix)`` and ``q(prefix)`` are laws [V]; ``verify(draft)`` gives P(kept) and the law of the
    next token for each number kept. Returns the law, [V] * (K + 1), and E[kept].
    """
    import numpy as np

    shape = (num_tokens,) * (num_drafts + 1)
    law, mean = np.zeros(shape), 0.0
    for draft in itertools.product(range(num_tokens), repeat=num_drafts):
        weight = math.prod(q(draft[:i])[x] for i, x in enumerate(draft))
        if weight == 0:
            continue
        kept_probs, next_laws = verify(draft)
        for kept, (prob, row) in enumerate(zip(kept_probs, next_laws, strict=True)):
            mean += weight * prob * kept
            for token in np.flatnonzero(row) if prob > 0 else ():
                prefix = (*draft[:kept], int(token))
                law[prefix] += weight * prob * row[token] * target_law(p, shape, prefix)
    return law, mean


def target_law(p: Callable, shape: tuple[int, ...], prefix: tuple[int, ...] = ()) -> Array:
    """The joint law of the tokens that follow ``prefix`` until there are ``len(shape)``."""
    import numpy as np

    if len(prefix) == len(shape):
        return np.float64(1.0)
    row = p(prefix)
    return np.stack([row[x] * target_law(p, shape, (*prefix, x)) for x in range(shape[0])])


def reference_chain(
    logits: Array,
    draft: Sequence[int],
    q: Array | None,
    *,
    method: str,
    seed: int,
    position: int,
    sampling: dict | None = None,
    num_drafts: int | None = None,
    eps: float = 0.09,
    alpha: float = 0.3,
) -> tuple[list[int], int, bool]:
    """One request of ``verify_chain``: its tokens (without the -1), how many were kept, error.

    ``logits`` [K + 1, V]; ``q`` [K, V] probabilities, or None for drafts that were not sampled.
    """
    import numpy as np

    from ._philox import Stream

    V = logits.shape[1]
    limit = len(draft) if num_drafts is None else num_drafts
    g = next((i for i, x in enumerate(draft) if not 0 <= x < V or i >= limit), len(draft))
    sampling = dict(sampling or {}, **({"temperature": 0.0} if method == "greedy" else {}))
    p = [reference_law(row, **sampling) for row in logits[: g + 1]]
    if q is None:
        q = [one_hot(x, V) for x in draft[:g]]
    by_ratio = method in ("token", "block")
    bad_q = [by_ratio and not 0 < q[i].sum() < np.inf for i in range(g)]
    last = next((i for i in range(g) if p[i] is None or bad_q[i]), g)
    draft = list(draft[:last])

    if method in ("greedy", "match", "typical"):
        kept = 0
        while kept < last:
            x = draft[kept]
            if method == "typical":
                seen = p[kept][p[kept] > 0]
                passed = p[kept][x] > min(eps, alpha * math.exp((seen * np.log(seen)).sum()))
            else:
                passed = x == reference_draw(p[kept], seed, position + kept, 0, Stream.TARGET)
            if not passed:
                break
            kept += 1
        law, key = p[kept], (position + kept, 0, Stream.TARGET)
    else:
        h = thresholds(method, p, q, draft)
        step = range(1, last + 1)
        u = [reference_uniform(seed, position, [0], i, Stream.ACCEPT)[0, 0] for i in step]
        passed = [a < b for a, b in zip(u, h, strict=True)]
        if method == "token":
            kept = next((i for i, ok in enumerate(passed) if not ok), last)
        else:
            kept = max((i + 1 for i, ok in enumerate(passed) if ok), default=0)
        law = None if p[kept] is None else residual(method, p, q, draft, kept)
        key = (position, kept, Stream.RESIDUAL)
    error = p[kept] is None or (kept == last < g and bad_q[kept])
    token = 0 if law is None else reference_draw(law, seed, *key)
    return [*draft[:kept], token], kept, bool(error)


# ---- statistics ----


def chi_square(counts: torch.Tensor, law: Any) -> float:
    """p-value of Pearson's test; the rarest cells are merged until none expects fewer than five."""
    import numpy as np
    from scipy.stats import chi2

    counts = np.asarray(counts, dtype=np.float64).ravel()
    law = np.asarray(law, dtype=np.float64).ravel()
    if counts[law == 0].sum():
        return 0.0
    order = np.argsort(law[law > 0])
    counts, law = counts[law > 0][order], law[law > 0][order]
    expected = counts.sum() * law / law.sum()
    rare = min(max((expected < 5).sum(), np.searchsorted(expected.cumsum(), 5) + 1), len(law))
    counts = np.append(counts[:rare].sum(), counts[rare:])
    expected = np.append(expected[:rare].sum(), expected[rare:])
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(chi2.sf(statistic, max(len(counts) - 1, 1)))


def histogram(tokens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Counts of the joint outcomes of ``tokens`` [num, L], as [V] * L."""
    num, length = tokens.shape
    place = num_tokens ** torch.arange(length - 1, -1, -1)
    counts = torch.bincount((tokens.cpu() * place).sum(-1), minlength=num_tokens**length)
    return counts.view((num_tokens,) * length)
