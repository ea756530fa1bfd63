"""N-gram drafting (prompt look-up): what followed the latest occurrence of the context's end.

Saxena 2023, "Prompt lookup decoding"; Yang et al. 2023, arXiv:2304.04487.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .base import Draft, DraftContext, Drafter, DraftSession


@dataclass(frozen=True)
class NGram(Drafter):
    """Copies what followed the last time. Longest match first, then the latest occurrence.

    Args:
        num_draft_tokens: most tokens to copy; fewer when the text ends before.
        max_ngram, min_ngram: lengths of the context's end to look for.
        adaptive: after a miss copy half as many tokens (at least 2, and one more than were kept),
            after a full hit twice as many; else always ``num_draft_tokens``. Rejected tokens cost
            time, not exactness.

    Raises:
        ValueError: unless 1 <= min_ngram <= max_ngram and num_draft_tokens >= 1.
    """

    num_draft_tokens: int = 10
    max_ngram: int = 3
    min_ngram: int = 1
    adaptive: bool = True

    def __post_init__(self):
        if self.num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens: expected >= 1, got {self.num_draft_tokens}")
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                "min_ngram, max_ngram: expected 1 <= min_ngram <= max_ngram, got "
                f"{self.min_ngram}, {self.max_ngram}"
            )

    def start(self, context: DraftContext) -> NGramSession:
        return NGramSession(self, context.batch)


class NGramSession(DraftSession):
    def __init__(self, options: NGram, batch: int):
        self._options = options
        self._indices = [NGramIndex(options.min_ngram, options.max_ngram) for _ in range(batch)]
        self._most = [options.num_draft_tokens] * batch
        self._drafted = [0] * batch

    def propose(self, rows: Sequence[list[int]], limits: list[int]) -> Draft | None:
        tokens = [
            index.lookup(row, min(most, limit))
            for index, row, most, limit in zip(self._indices, rows, self._most, limits, strict=True)
        ]
        self._drafted = [len(row) for row in tokens]
        return Draft(tokens) if any(tokens) else None

    def observe(self, num_accepted: list[int]) -> None:
        if self._options.adaptive:
            for b, (drafted, kept) in enumerate(zip(self._drafted, num_accepted, strict=True)):
                if drafted:
                    most = self._most[b]
                    most = 2 * most if kept == drafted else max(2, kept + 1, most // 2)
                    self._most[b] = min(most, self._options.num_draft_tokens)

    def keep(self, rows: list[int]) -> None:
        self._indices = [self._indices[b] for b in rows]
        self._most = [self._most[b] for b in rows]
        self._drafted = [self._drafted[b] for b in rows]


class NGramIndex:
    """Where each n-gram of a growing text last went on; a step costs O(n) for any text length."""

    def __init__(self, min_ngram: int, max_ngram: int):
        self._next = {n: {} for n in range(max_ngram, min_ngram - 1, -1)}
        self._indexed = 0

    def lookup(self, tokens: list[int], limit: int) -> list[int]:
        """Up to ``limit`` tokens that followed the latest earlier occurrence of the text's end."""
        for n, positions in self._next.items():
            # the n-gram before position i is known once i exists, so the end never finds itself
            for i in range(max(self._indexed, n), len(tokens)):
                positions[tuple(tokens[i - n : i])] = i
        self._indexed = len(tokens)
        if limit > 0:
            for n, positions in self._next.items():
                start = positions.get(tuple(tokens[-n:])) if len(tokens) >= n else None
                if start is not None:
                    return tokens[start : start + limit]
        return []
