"""Drafting with a smaller language model (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specdec_kernels import Stream, filter_logits, sample

from ..model import CachedModel, check_length, check_model, vocab_size
from ..vocab import check_vocabularies
from .base import Draft, DraftContext, Drafter, DraftSession, Sampling


@dataclass(frozen=True)
class DraftModel(Drafter):
    """A smaller causal LM with the target's tokenizer drafts a chain.

    Args:
        model: the draft model, on any device and in any dtype.
        num_draft_tokens: tokens drafted a round.
        greedy: draft by argmax also when the request samples; q is then one-hot.
        temperature, top_k, top_p, min_p: the draft's own options; default the request's, which
            accepts most. Whatever they are, q is the law drawn from.
        confidence_threshold: stop drafting a row after a token whose law (q; where that is one-hot,
            the softmax it is the argmax of) had no probability this high. It goes by the law alone:
            to drop a token because of what was drawn would bias the output. Costs one read of the
            device per drafted token; 0 is off.
        tokenizer, target_tokenizer: if both are given, their vocabularies are compared.

    Raises:
        ValueError: an option out of its range, a model that cannot serve; at the start of a call: a
            vocabulary or a length that does not fit the target.
    """

    model: torch.nn.Module
    num_draft_tokens: int = 5
    greedy: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    confidence_threshold: float = 0.0
    tokenizer: object | None = None
    target_tokenizer: object | None = None

    def __post_init__(self):
        if self.num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens: expected >= 1, got {self.num_draft_tokens}")
        if not 0 <= self.confidence_threshold <= 1:
            got = self.confidence_threshold
            raise ValueError(f"confidence_threshold: expected a number in [0, 1], got {got}")
        filter_logits(torch.zeros(1, 1), **self.own_sampling())  # raises by name
        check_model(self.model, "draft model")

    def own_sampling(self) -> dict:
        """The sampling options that do not follow the request."""
        names = ("temperature", "top_k", "top_p", "min_p")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def start(self, context: DraftContext) -> DraftModelSession:
        check_vocabularies(
            vocab_size(self.model), context.vocab_size, self.tokenizer, self.target_tokenizer
        )
        return DraftModelSession(self, context)


class DraftModelSession(DraftSession):
    def __init__(self, options: DraftModel, context: DraftContext):
        check_length(options.model, [1], context.capacity, "draft model")
        self._model = CachedModel(options.model, context.batch, context.capacity)
        self._options = options
        self._device = context.device
        self._last_id = vocab_size(options.model) - 1
        self._vocab = min(self._last_id + 1, context.vocab_size)
        self._seeds = torch.tensor(context.seeds, device=self._model.device)
        # drafts that nobody will test against q are best when they are the likeliest
        sampled = (
            context.sampling.temperature > 0
            and not options.greedy
            and context.method in ("auto", "match", "token", "block")
        )
        self._sampling = Sampling()
        if sampled:
            self._sampling = replace(context.sampling, **options.own_sampling())
        # match accepts what equals the target's own draw: sharing its noise makes them agree
        self._coupled = context.method == "match"
        self.has_probs = sampled and not self._coupled
        self._committed = [0] * context.batch

    @property
    def num_forwards(self) -> int:
        return len(self._model.widths)

    @property
    def forward_seconds(self) -> float:
        return self._model.seconds

    def propose(self, rows: Sequence[list[int]], limits: list[int]) -> Draft | None:
        num = [max(0, min(self._options.num_draft_tokens, limit)) for limit in limits]
        self._committed = [len(row) for row in rows]
        if max(num) == 0:
            return None
        model = self._model
        # an id that only the target has, behind its tokenizer's, means nothing here: any will do
        pending = [
            [min(token, self._last_id) for token in row[n:]]
            for row, n in zip(rows, model.lengths, strict=True)
        ]
        logits = model.extend(pending).values
        start = torch.tensor(self._committed, device=model.device)
        tokens, probs = [], []
        for step in range(max(num)):
            last = logits[:, -1, : self._vocab]
            drawn = self._draw(last, start, step)
            tokens.append(drawn.tokens)
            probs.append(drawn.probs)
            if self._options.confidence_threshold > 0:
                law = drawn.probs if self._sampling.temperature > 0 else last.float().softmax(-1)
                confident = (law.amax(dim=-1) >= self._options.confidence_threshold).tolist()
                num = [n if ok else min(n, step + 1) for n, ok in zip(num, confident, strict=True)]
            if step + 1 >= max(num):
                break
            active = [int(n > step + 1) for n in num]
            logits = model.extend([[]] * len(rows), drawn.tokens[:, None], active).values
        return Draft(
            torch.stack(tokens, dim=1).to(self._device),
            num,
            torch.stack(probs, dim=1).to(self._device) if self.has_probs else None,
        )

    def _draw(self, logits: torch.Tensor, start: torch.Tensor, step: int):
        # noise keyed by position alone would bias block verification: a position is redrafted
        # knowing how its first draft fared
        key = (
            {"position": start + step, "stream": Stream.TARGET}
            if self._coupled
            else {"position": start, "step": step, "stream": Stream.DRAFT}
        )
        return sample(
            logits,
            seed=self._seeds,
            return_probs=self.has_probs or self._options.confidence_threshold > 0,
            **self._sampling.kwargs(),
            **key,
        )

    def observe(self, num_accepted: list[int]) -> None:
        # the last drafted token was never fed, so it is fed next time even when it was kept
        fed = zip(self._model.lengths, self._committed, num_accepted, strict=True)
        self._model.rollback([min(length, start + kept) for length, start, kept in fed])

    def keep(self, rows: list[int]) -> None:
        self._model.keep(rows)
        self._seeds = self._seeds[rows]
        self._committed = [self._committed[b] for b in rows]
