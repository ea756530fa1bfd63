"""The decoding loop: draft, one target forward, one verification, commit; for a batch of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import torch

from specdec_kernels import filter_logits, resolve_method, verify_chain

from .drafters import Draft, DraftContext, Drafter, Sampling
from .model import CachedModel
from .processors import RowProcessors, process_round
from .stats import RowStats, Stats


@dataclass(frozen=True)
class Request:
    """A prepared call: every option resolved and checked."""

    target: CachedModel
    prompts: list[list[int]]  # without padding
    padding: list[list[int]]  # the left padding of each row, for processors and criteria
    max_new_tokens: int
    capacity: int
    vocab_size: int
    sampling: Sampling
    method: str
    seeds: list[int]
    eos_ids: frozenset[int] = frozenset()
    processors: list = field(default_factory=list)
    criteria: list[Callable] = field(default_factory=list)
    on_tokens: Callable[[list[int]], None] | None = None  # for the one row of a streamed call
    output_scores: bool = False
    output_logits: bool = False
    output_logprobs: bool = False
    normalize_scores: bool = False
    top_logprobs: int = 0


@dataclass
class Row:
    """One row as it grows."""

    index: int
    tokens: list[int]
    padding: list[int]
    seed: int
    stats: RowStats
    process: RowProcessors | None
    new: int = 0
    finish_reason: str | None = None
    accepted: list[bool] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


def decode(request: Request, drafter: Drafter | None) -> tuple[list[Row], Stats]:
    """Generate every row to its end. Returns the rows in their order, and the call's figures."""
    batch = len(request.prompts)
    stats = Stats(rows=[RowStats() for _ in range(batch)])
    rows = [
        Row(
            index=b,
            tokens=list(prompt),
            padding=request.padding[b],
            seed=request.seeds[b],
            stats=stats.rows[b],
            process=RowProcessors(request.processors, b, batch) if request.processors else None,
        )
        for b, prompt in enumerate(request.prompts)
    ]
    began = perf_counter()
    target = request.target
    session = None
    if drafter is not None:
        session = drafter.start(
            DraftContext(
                target=target.model,
                batch=batch,
                capacity=request.capacity,
                vocab_size=request.vocab_size,
                device=target.device,
                sampling=request.sampling,
                method=request.method,
                seeds=request.seeds,
            )
        )
    has_probs = session is not None and session.has_probs
    stats.method = resolve_method(request.method, request.sampling.temperature, has_probs)
    active = rows
    while active:
        _round(request, active, session, stats)
        going = [i for i, row in enumerate(active) if row.finish_reason is None]
        if 0 < len(going) < len(active):
            target.keep(going)
            if session is not None:
                session.keep(going)
        active = [active[i] for i in going]
    stats.target_widths = target.widths
    stats.target_forwards = len(target.widths)
    stats.forward_seconds = target.seconds
    if session is not None:
        stats.draft_forwards = session.num_forwards
        stats.forward_seconds += session.forward_seconds
    seconds = stats.seconds
    seconds["total"] = perf_counter() - began
    seconds["rest"] = seconds["total"] - sum(seconds[k] for k in ("draft", "target", "verify"))
    return rows, stats


def _round(request: Request, rows: list[Row], session, stats: Stats) -> None:
    """One round of the rows that still run: at most K + 1 tokens each."""
    target, seconds = request.target, stats.seconds
    began = perf_counter()
    # the last token of a row is never drafted: verification adds one anyway
    limits = [request.max_new_tokens - row.new - 1 for row in rows]
    draft = session.propose([row.tokens for row in rows], limits) if session else None
    if draft is None:
        draft = Draft([[] for _ in rows])
    drafts = draft.as_tensor(target.device)
    num_drafts = draft.num_tokens
    drafted = perf_counter()

    pending = [row.tokens[n:] for row, n in zip(rows, target.lengths, strict=True)]
    logits = target.extend(pending, drafts, num_drafts)
    forwarded = perf_counter()

    scores = logits
    if request.processors:
        listed = draft.tokens
        if isinstance(listed, torch.Tensor):
            listed = [row[:n] for row, n in zip(listed.tolist(), num_drafts, strict=True)]
        scores, num_drafts = process_round(
            logits,
            [row.process for row in rows],
            [row.padding + row.tokens for row in rows],
            listed,
            request.eos_ids,
        )
    starts = [len(row.tokens) for row in rows]
    device = scores.values.device
    position, seed, counts = torch.tensor([starts, [row.seed for row in rows], num_drafts]).to(
        device
    )
    # an id of -1 ends a row's chain
    drafts = drafts.masked_fill(torch.arange(drafts.shape[1], device=device) >= counts[:, None], -1)
    result = verify_chain(
        scores.values,
        drafts,
        draft_probs=draft.probs,
        cu_logits=None if scores.starts is None else torch.tensor(scores.starts, device=device),
        position=position,
        seed=seed,
        method=stats.method,
        **request.sampling.kwargs(),
    )
    # the one read of the round: tokens, counts and errors together
    table = torch.cat(
        [result.tokens, result.num_accepted[:, None], result.error[:, None]], dim=1
    ).tolist()
    verified = perf_counter()
    seconds["draft"] += drafted - began
    seconds["target"] += forwarded - drafted
    seconds["verify"] += verified - forwarded

    num_accepted = [line[-2] for line in table]
    for b, (row, line) in enumerate(zip(rows, table, strict=True)):
        if line[-1]:
            raise ValueError(
                f"row {row.index}: the logits of position {starts[b] + num_accepted[b]} are NaN, "
                "or forbid every token (the target's, or those of a draft model)"
            )
        _commit(request, row, line[: num_accepted[b] + 1], logits.row(b), scores.row(b))
        row.stats.rounds += 1
        row.stats.drafted += draft.num_tokens[b]
        row.stats.accepted += num_accepted[b]
        row.stats.trimmed = row.stats.accepted + row.stats.rounds - row.new
        row.stats.emitted = row.new
        stats.count_round(draft.num_tokens[b], num_accepted[b])
    # what the cache holds of each row: all but the last token of the round
    target.rollback([start + n for start, n in zip(starts, num_accepted, strict=True)])
    if session is not None:
        session.observe(num_accepted)


def _commit(
    request: Request, row: Row, new: list[int], logits: torch.Tensor, scores: torch.Tensor
) -> None:
    """Append a round's tokens up to the first that ends the row."""
    kept = 0
    for i, token in enumerate(new):
        row.tokens.append(token)
        row.new += 1
        kept += 1
        row.accepted.append(i < len(new) - 1)
        if request.output_logits or request.output_logprobs:
            row.logits.append(logits[i].float())
        if request.output_scores:
            row.scores.append(_scores(request, scores[i]))
        row.finish_reason = _finish_reason(request, row, token)
        if row.finish_reason is not None:
            break
    if request.on_tokens is not None:
        request.on_tokens(new[:kept])


def _scores(request: Request, scores: torch.Tensor) -> torch.Tensor:
    """What the token was drawn from, as transformers reports it: filtered, or plain if greedy."""
    scores = scores.float()
    if request.sampling.temperature > 0:
        scores = filter_logits(scores[None], **request.sampling.kwargs())[0]
    return scores.log_softmax(-1) if request.normalize_scores else scores


def _finish_reason(request: Request, row: Row, token: int) -> str | None:
    if token in request.eos_ids:
        return "eos"
    if request.criteria:
        ids = torch.tensor([row.padding + row.tokens], device=request.target.device)
        scores = tuple(s[None] for s in row.scores) or None
        if any(bool(criterion(ids, scores)) for criterion in request.criteria):
            return "stop"
    return "length" if row.new >= request.max_new_tokens else None
