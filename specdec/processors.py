"""Logits processors at draft positions: each position sees the prefix it would have been given."""

from __future__ import annotations

import copy

import torch
from transformers.generation import logits_process as hf

from .model import RowLogits

# hold one entry per row of the batch in a way that cannot be split by row
_BATCHED = (hf.EncoderNoRepeatNGramLogitsProcessor, hf.EncoderRepetitionPenaltyLogitsProcessor)


class RowProcessors:
    """The processors as row ``row`` of the batch sees them: called with [1, n] ids, [1, V] scores.

    ``prefix`` is the row as transformers holds it, left padding included.
    """

    def __init__(self, processors: list, row: int, batch: int):
        self._processors = [_for_row(p, row, batch) for p in processors]
        # ours to check: a user's processor may stand for a grammar that knows no such prefix
        self.may_forbid = any(
            isinstance(p, hf.PrefixConstrainedLogitsProcessor)
            or not type(p).__module__.startswith("transformers.")
            for p in processors
        )

    def __call__(self, prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for processor in self._processors:
            scores = processor(prefix, scores)
        return scores


def _for_row(processor, row: int, batch: int):
    if batch > 1 and isinstance(processor, _BATCHED):
        raise ValueError(f"{type(processor).__name__}: not supported with more than one row")
    ignore = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignore, torch.Tensor):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = ignore[row : row + 1]
    if isinstance(processor, hf.PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        processor = copy.copy(processor)
        processor._prefix_allowed_tokens_fn = lambda _, ids: allowed(row, ids)
    return processor


def process_round(
    logits: RowLogits,
    processors: list[RowProcessors],
    prefixes: list[list[int]],
    drafts: list[list[int]],
    eos_ids: frozenset[int],
) -> tuple[RowLogits, list[int]]:
    """Apply each row's processors to the logits of one round.

    A row stops at a draft that its scores forbid, and at a drafted end of sequence: what follows
    cannot be part of the output, so nobody is asked about it.

    Args:
        prefixes: each row's tokens before the first draft, as transformers would hold them.
        drafts: each row's drafted tokens.

    Returns:
        Scores like ``logits``, in float32, and how many drafts of each row still count. The row
        after a forbidden or ending draft is left as it was: verification never gets there.
    """
    processed = RowLogits(logits.values.to(torch.float32, copy=True), logits.starts)
    counts = []
    for b, (process, prefix, draft) in enumerate(zip(processors, prefixes, drafts, strict=True)):
        scores = processed.row(b)
        ids = torch.tensor([prefix + draft], device=scores.device)
        count = len(draft)
        for j in range(len(draft) + 1):
            scores[j] = process(ids[:, : len(prefix) + j], scores[j : j + 1])[0]
            if j == len(draft):
                break
            ends = draft[j] in eos_ids or not 0 <= draft[j] < scores.shape[-1]
            if ends or (process.may_forbid and scores[j, draft[j]].item() == -torch.inf):
                count = j + 1
                break
        counts.append(count)
    return processed, counts
