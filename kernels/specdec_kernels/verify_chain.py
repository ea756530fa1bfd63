"""Verify a drafted chain: how much of it is kept, and the token that follows.

Rules (x_1..x_g drafted, p_i and q_i the target's and the drafter's law of x_i):

- greedy: keep while x_i is the argmax of p_i.
- match: draw t_i ~ p_i with noise keyed by (seed, absolute position), keep while x_i = t_i
  (Daliri et al. 2024, arXiv:2408.07978; token-identical to plain sampling with the same seed).
- token: keep x_i iff u_i < p_i(x_i) / q_i(x_i); Leviathan et al. 2023, arXiv:2211.17192, Alg. 1.
- block: Sun et al. 2024, arXiv:2403.10444, Alg. 2; the longest lossless one for chains.
- typical: keep x_i iff p_i(x_i) > min(eps, alpha exp(-H(p_i))); Cai et al. 2024,
  arXiv:2401.10774, section 3.2.3. LOSSY: the output does not have the target's law.

Dimensions: B requests, K drafted tokens, V vocabulary, T rows of a packed batch, N = T - B.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ._launch import check_ids, check_logits, check_sampling, check_tensor, per_row, pick_backend
from ._law import GREEDY_TEMPERATURE, draw, greedy_tokens, normalise_
from ._philox import Stream, philox4x32, to_uniform
from .sample import law_of_rows

METHODS = ("auto", "greedy", "match", "token", "block", "typical")
NEEDS_Q = ("token", "block")


class ChainResult(NamedTuple):
    """What ``verify_chain`` returns."""

    tokens: torch.Tensor  # [B, K + 1] int64: kept drafts, then one more token, then -1
    num_accepted: torch.Tensor  # [B] int64, in [0, K]
    error: torch.Tensor  # [B] bool: the chain ended at a row with NaN or nothing finite


def _accept_prefix(passed: torch.Tensor) -> torch.Tensor:
    """[B, K] bool -> [B]: how many pass before the first that does not."""
    return passed.int().cumprod(dim=1).sum(dim=1)


def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x[b, index[b]]: [B, W, ...] -> [B, ...]."""
    return x[torch.arange(x.shape[0], device=x.device), index]


def _finish(draft_tokens, num_accepted, next_token, error) -> ChainResult:
    B, K = draft_tokens.shape
    column = torch.arange(K + 1, device=draft_tokens.device)
    tokens = torch.cat([draft_tokens, next_token[:, None]], dim=1)
    tokens = torch.where(column < num_accepted[:, None], tokens, -1)
    tokens = torch.where(column == num_accepted[:, None], next_token[:, None], tokens)
    return ChainResult(tokens, num_accepted, error)


def _verify_by_token(target_tokens, target_error, draft_tokens, usable) -> ChainResult:
    """Greedy and match: keep drafts that equal the target's own token."""
    K = draft_tokens.shape[1]
    num_accepted = _accept_prefix(usable & (draft_tokens == target_tokens[:, :K]))
    return _finish(
        draft_tokens,
        num_accepted,
        _take(target_tokens, num_accepted),
        _take(target_error, num_accepted),
    )


def _block_accept(p, q, p_x, ratio, g, uniforms):
    """Sun et al., Algorithm 2. Returns num_accepted [B] and the weight w [B] of the residual."""
    B, K = ratio.shape
    # in logs, so that a long chain does not underflow; a zero stays zero whatever follows
    steps = ratio.log().clamp(max=1e30)
    log_w = [torch.zeros_like(p_x[:, 0])]
    for i in range(K):
        log_w.append((log_w[-1] + steps[:, i]).clamp(max=0.0))
    w = torch.stack(log_w, dim=1).exp()  # [B, K + 1]
    if q is None:
        excess = w[:, :K] * (1 - p_x)
    else:
        excess = (w[:, :K, None] * p[:, :K] - q).clamp_(min=0).sum(dim=-1)  # Z_i, row i = 0..K-1
    h = excess / (excess + 1 - w[:, :K])
    h = torch.cat([h.masked_fill(h.isnan(), 1.0), w[:, K:]], dim=1)
    column = torch.arange(K + 1, device=w.device)
    h = torch.where(column == g[:, None], w, h)
    passed = (uniforms < h[:, 1:]) & (column[1:] <= g[:, None])
    num_accepted = (passed * column[1:]).amax(dim=1)
    return num_accepted, _take(w, num_accepted)


def _verify_by_ratio(p, target_error, draft_tokens, q, g, seed, position, block) -> ChainResult:
    """Token and block: keep by u < p/q, correct from the residual."""
    B, K = draft_tokens.shape
    V = p.shape[-1]
    device = draft_tokens.device
    column = torch.arange(K, device=device)

    # a row that cannot be read ends the chain before it
    bad = target_error[:, :K]
    if q is not None:
        mass = q.sum(dim=-1)
        bad_q = ~(mass.isfinite() & (mass > 0))
        bad = bad | bad_q
    limit = g
    g = torch.minimum(g, _accept_prefix(~bad))

    x = draft_tokens.clamp(0, V - 1)[..., None]
    p_x = p[:, :K].gather(2, x).squeeze(2)
    q_x = torch.ones_like(p_x) if q is None else q.gather(2, x).squeeze(2)
    # 0/0 is no pass, p/0 is a sure one
    ratio = (p_x / q_x).nan_to_num_(nan=0.0, posinf=torch.inf)
    words = philox4x32(
        seed[:, None], position[:, None], torch.zeros_like(column), column + 1, Stream.ACCEPT
    )
    u = to_uniform(words[..., 0])

    w = p.new_ones(B)
    if K == 0:
        num_accepted = torch.zeros_like(g)
    elif block:
        num_accepted, w = _block_accept(p, q, p_x, ratio, g, u)
    else:
        num_accepted = _accept_prefix((u < ratio) & (column < g[:, None]))

    p_next = _take(p, num_accepted)
    weights = p_next
    if K:
        rejected = (num_accepted < g)[:, None]
        row = num_accepted.clamp(max=K - 1)
        if q is None:
            residual = p_next.scatter(1, _take(x, row), 0.0)
        else:
            residual = (w[:, None] * p_next - _take(q, row)).clamp_(min=0)
        use_residual = rejected & (residual.sum(dim=-1, keepdim=True) > 0)
        weights = torch.where(use_residual, residual, p_next)
    error = _take(target_error, num_accepted)
    next_token = draw(weights, seed, position, num_accepted, Stream.RESIDUAL)
    next_token = next_token.masked_fill(error, 0)
    if q is not None and K:
        at_bad_q = _take(bad_q, num_accepted.clamp(max=K - 1)) & (num_accepted < limit)
        error = error | (at_bad_q & (num_accepted == g))
    return _finish(draft_tokens, num_accepted, next_token, error)


class Rows(NamedTuple):
    """Rows of logits, and whose they are."""

    logits: torch.Tensor  # [R, V]
    request: torch.Tensor  # [R] int64: the request of each row
    offset: torch.Tensor  # [R] int64: which of its rows, 0 first
    index: torch.Tensor | None  # [B, K + 1] int64: the row; None where that is their order

    def by_request(self, x: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        """[R, ...] -> [B, K + 1, ...]; ``shape`` is [B, K + 1]."""
        return x.unflatten(0, shape) if self.index is None else x[self.index]


def verify_chain_torch(
    rows: Rows,
    draft_tokens: torch.Tensor,
    q: torch.Tensor | None,
    num_draft_tokens: torch.Tensor | None,
    sampling: tuple,
    seed: torch.Tensor,
    position: torch.Tensor,
    method: str,
    typical: tuple[float, float],
) -> ChainResult:
    """The op in plain torch: its definition, the CPU path, and what kernels are compared with.

    ``draft_tokens`` is [B, K], ``q`` [B, K, V] float32 probabilities or None.
    """
    B, K = draft_tokens.shape
    V, shape = rows.logits.shape[-1], (B, K + 1)
    draft_tokens = draft_tokens.long()
    column = torch.arange(K, device=draft_tokens.device)
    usable = (draft_tokens >= 0) & (draft_tokens < V)
    if num_draft_tokens is not None:
        usable = usable & (column < num_draft_tokens[:, None])
    # padding ends a chain: nothing was drafted there, so the next token is drawn from p
    g = _accept_prefix(usable)
    usable = column < g[:, None]

    if method in ("greedy", "match"):
        if method == "greedy":
            tokens, error = greedy_tokens(rows.logits)
        else:
            law = law_of_rows(rows.logits, rows.request, B, *sampling)
            at = position[rows.request] + rows.offset
            tokens = draw(law.weights, seed[rows.request], at, 0, Stream.TARGET)
            tokens, error = tokens.masked_fill(law.error, 0), law.error
        tokens, error = rows.by_request(tokens, shape), rows.by_request(error, shape)
        return _verify_by_token(tokens, error, draft_tokens, usable & ~error[:, :K])

    law = law_of_rows(rows.logits, rows.request, B, *sampling)
    p, error = rows.by_request(normalise_(law.weights), shape), rows.by_request(law.error, shape)
    if method in NEEDS_Q:
        return _verify_by_ratio(p, error, draft_tokens, q, g, seed, position, method == "block")

    eps, alpha = typical
    floor = (alpha * torch.exp(-torch.special.entr(p[:, :K]).sum(dim=-1))).clamp(max=eps)
    p_x = p[:, :K].gather(2, draft_tokens.clamp(0, V - 1)[..., None]).squeeze(2)
    num_accepted = _accept_prefix(usable & ~error[:, :K] & (p_x > floor))
    error = _take(error, num_accepted)
    next_token = draw(_take(p, num_accepted), seed, position + num_accepted, 0, Stream.TARGET)
    return _finish(draft_tokens, num_accepted, next_token.masked_fill(error, 0), error)


def _padded_rows(logits: torch.Tensor) -> Rows:
    """[B, K + 1, V]"""
    B, W, _ = logits.shape
    row = torch.arange(B * W, device=logits.device)
    return Rows(logits.flatten(0, 1), row // W, row % W, None)


def _packed_rows(logits: torch.Tensor, cu_logits: torch.Tensor, K: int) -> Rows:
    """[T, V], request b's rows from cu_logits[b] on."""
    T, B = logits.shape[0], cu_logits.shape[0] - 1
    cu_logits = cu_logits.long()
    row = torch.arange(T, device=logits.device)
    # rows behind the last request are computed with it and never looked at
    request = (torch.searchsorted(cu_logits, row, right=True) - 1).clamp(0, max(B - 1, 0))
    column = torch.arange(K + 1, device=logits.device)
    index = (cu_logits[:-1, None] + column).clamp(max=max(T - 1, 0))
    return Rows(logits, request, row - cu_logits[request], index)


def _padded_drafts(draft_tokens, draft, cu_logits, K: int):
    """Packed drafts [N] and [N, V] to [B, K] and [B, K, V]."""
    num, B = draft_tokens.shape[0], cu_logits.shape[0] - 1
    if num == 0:
        draft = None if draft is None else draft.new_zeros(B, K, draft.shape[-1])
        return draft_tokens.new_full((B, K), -1), draft
    # request b's drafts start b rows earlier than its logits: each request has one row more
    first = cu_logits[:-1].long() - torch.arange(B, device=cu_logits.device)
    index = first[:, None] + torch.arange(K, device=cu_logits.device)
    index = index.clamp(max=num - 1)
    return draft_tokens[index], None if draft is None else draft[index]


def resolve_method(method: str, temperature: float | torch.Tensor, has_q: bool) -> str:
    """What "auto" means: greedy at temperature 0, block where q is known, match otherwise."""
    if method not in METHODS:
        raise ValueError(f"method: expected one of {METHODS}, got {method!r}")
    if method != "auto":
        return method
    if not isinstance(temperature, torch.Tensor) and temperature < GREEDY_TEMPERATURE:
        return "greedy"
    return "block" if has_q else "match"


def verify_chain(
    target_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor | None = None,
    draft_probs: torch.Tensor | None = None,
    *,
    num_draft_tokens: torch.Tensor | None = None,
    cu_logits: torch.Tensor | None = None,
    max_draft_tokens: int | None = None,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor = 0,
    top_p: float | torch.Tensor = 1.0,
    min_p: float | torch.Tensor = 0.0,
    seed: int | torch.Tensor = 0,
    position: int | torch.Tensor = 0,
    method: str = "auto",
    typical_eps: float = 0.09,
    typical_alpha: float = 0.3,
    backend: str = "auto",
) -> ChainResult:
    """Keep a prefix of each drafted chain and add one token, so that the output has p's law.

    Args:
        target_logits: [B, K + 1, V], any float dtype, any strides: row i is the target's law after
            i drafted tokens. With ``cu_logits``: [T, V], the requests' rows one after the other.
        draft_tokens: [B, K] int32 or int64. An id outside [0, V) is padding: the chain ends before
            it. (A token that was drawn but is now forbidden must keep its id: its p is 0.)
            With ``cu_logits`` also [N], N = T - B.
        draft_logits: [B, K, V] (or [N, V]): q = softmax(draft_logits), the law drafts were really
            drawn from, after the drafter's own temperature and filters. V may be smaller than the
            target's; the ids beyond have q = 0.
        draft_probs: q itself, instead of draft_logits; used as it is, not normalised. With neither,
            the drafts were not sampled: q is one-hot. greedy, match and typical read no q.
        num_draft_tokens: [B] int: how many drafts of each row count. Default: all K.
        cu_logits: [B + 1] int: where each request's rows begin and end; every request has one row
            more than drafts, and at least one. Replaces ``num_draft_tokens``.
        max_draft_tokens: with packed ``draft_tokens``: K of the output (default N, which is always
            enough; reading the counts would cost a sync). Drafts beyond it are not looked at.
        temperature, top_k, top_p, min_p: numbers or [B] tensors, applied to the target's rows as in
            ``sample``.
        seed, position: numbers or [B] int64: the request's seed, and the absolute position of its
            first drafted token.
        method: see the module. "auto": greedy if ``temperature`` is the number 0, block with q,
            match without. Rows with temperature 0 are greedy under every method.
        typical_eps, typical_alpha: of method "typical" (lossy).
        backend: "torch" or "auto".

    Returns:
        ``ChainResult``: tokens [B, K + 1] int64 (kept drafts, the next token, then -1; ids in
        [0, V)), num_accepted [B] int64, error [B] bool. A row with NaN or nothing finite, on either
        side, ends the chain before it; if the chain got that far, error is set (and the next token
        is 0, or for a bad q row drawn from p). Other requests are not affected. A request without
        rows in ``cu_logits`` has only -1.

    Raises:
        ValueError: a shape, dtype, device, method or number out of its range, named.
    """
    packed = cu_logits is not None
    check_logits("target_logits", target_logits, 2 if packed else 3)
    check_ids("draft_tokens", draft_tokens)
    check_sampling(temperature, top_k, top_p, min_p)
    if draft_logits is not None and draft_probs is not None:
        raise ValueError("draft_logits, draft_probs: give one of them, got both")
    name = "draft_probs" if draft_logits is None else "draft_logits"
    draft = draft_probs if draft_logits is None else draft_logits
    method = resolve_method(method, temperature, draft is not None)
    pick_backend(backend, "verify_chain", ("torch",))

    V = target_logits.shape[-1]
    if packed:
        check_ids("cu_logits", cu_logits)
        if cu_logits.ndim != 1 or cu_logits.shape[0] == 0:
            raise ValueError(f"cu_logits: expected shape [B + 1], got {list(cu_logits.shape)}")
        if num_draft_tokens is not None:
            raise ValueError("num_draft_tokens: cu_logits already says how many, got both")
        B = cu_logits.shape[0] - 1
        if max_draft_tokens is not None and draft_tokens.ndim != 1:
            raise ValueError("max_draft_tokens: only with packed draft_tokens, got [B, K]")
        if max_draft_tokens is not None and max_draft_tokens < 0:
            raise ValueError(f"max_draft_tokens: expected a number >= 0, got {max_draft_tokens}")
        num_drafts = max(target_logits.shape[0] - B, 0)
        shape = (num_drafts,) if draft_tokens.ndim == 1 else (B, *draft_tokens.shape[1:2])
    else:
        if max_draft_tokens is not None:
            raise ValueError("max_draft_tokens: only with cu_logits")
        B, W, _ = target_logits.shape
        if W == 0:
            raise ValueError(f"target_logits: expected [B, K + 1, V], got [{B}, 0, {V}]")
        shape = (B, W - 1)
    check_tensor("draft_tokens", draft_tokens, shape, like=target_logits)
    if draft is not None:
        check_logits(name, draft, len(shape) + 1)
        if draft.shape[-1] > V:
            raise ValueError(f"{name}: vocabulary {draft.shape[-1]}, but the target's is {V}")
        check_tensor(name, draft, (*shape, draft.shape[-1]), like=target_logits)
    if num_draft_tokens is not None:
        check_ids("num_draft_tokens", num_draft_tokens)
        check_tensor("num_draft_tokens", num_draft_tokens, (B,), like=target_logits)

    if method not in NEEDS_Q:
        draft = None
    if packed:
        num_draft_tokens = cu_logits.diff() - 1
        if draft_tokens.ndim == 1:
            K = num_drafts if max_draft_tokens is None else max_draft_tokens
            draft_tokens, draft = _padded_drafts(draft_tokens, draft, cu_logits, K)
        rows = _packed_rows(target_logits, cu_logits, draft_tokens.shape[1])
    else:
        rows = _padded_rows(target_logits)
    q = None
    if draft is not None:
        q = draft.float().softmax(dim=-1) if draft_logits is not None else draft.float()
        if q.shape[-1] < V:
            q = torch.nn.functional.pad(q, (0, V - q.shape[-1]))
    device = target_logits.device
    result = verify_chain_torch(
        rows,
        draft_tokens,
        q,
        num_draft_tokens,
        (temperature, top_k, top_p, min_p),
        per_row("seed", seed, B, torch.int64, device),
        per_row("position", position, B, torch.int64, device),
        method,
        (typical_eps, typical_alpha),
    )
    if packed:
        empty = num_draft_tokens < 0
        return result._replace(
            tokens=result.tokens.masked_fill(empty[:, None], -1), error=result.error & ~empty
        )
    return result
