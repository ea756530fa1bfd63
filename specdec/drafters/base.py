"""What a drafter is: a description that any number of calls may share, and a session per call.

The loop alone decides what is accepted, so a drafter can only be slow, not wrong, as long as its
``probs`` are the law it drew from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Sampling:
    """The request's options. ``temperature`` 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def kwargs(self) -> dict:
        """As ``specdec_kernels`` takes them."""
        return {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
        }


@dataclass(frozen=True)
class DraftContext:
    """What a session may know of the call it serves."""

    target: object  # the model that verifies; drafters that share its weights use it
    batch: int
    capacity: int  # the most positions a row will hold
    vocab_size: int
    device: torch.device  # of the target's logits
    sampling: Sampling
    method: str  # as asked for: "auto", "greedy", "match", "token", "block" or "typical"
    seeds: list[int]


@dataclass(frozen=True)
class Draft:
    """One round's guess for every row.

    Attributes:
        tokens: one list per row, or [B, K] int64 where they already are on a device.
        num_tokens: how many of each row count; needed with a tensor.
        probs: [B, K, V'] the law each token was really drawn from, V' <= the target's; None if
            the tokens were not sampled.
    """

    tokens: list[list[int]] | torch.Tensor
    num_tokens: list[int] = field(default_factory=list)
    probs: torch.Tensor | None = None

    def __post_init__(self):
        if not isinstance(self.tokens, torch.Tensor):
            object.__setattr__(self, "num_tokens", [len(row) for row in self.tokens])

    def as_tensor(self, device: torch.device) -> torch.Tensor:
        """[B, K] int64 on ``device``, -1 where a row has no draft."""
        if isinstance(self.tokens, torch.Tensor):
            return self.tokens.to(device)
        width = max(self.num_tokens, default=0)
        padded = [row + [-1] * (width - len(row)) for row in self.tokens]
        return torch.tensor(padded, dtype=torch.int64, device=device).view(len(padded), width)


class DraftSession(ABC):
    """A drafter at work on one call's rows."""

    #: whether drafts come with ``probs``; what ``method="auto"`` goes by
    has_probs = False
    #: forwards of a draft model so far
    num_forwards = 0
    #: seconds spent in them
    forward_seconds = 0.0

    @abstractmethod
    def propose(self, rows: Sequence[list[int]], limits: list[int]) -> Draft | None:
        """Guess how each row goes on.

        Args:
            rows: each row's tokens so far, prompt included, padding not. Not to be changed.
            limits: the most tokens worth drafting for each row (0: none).

        Returns:
            A draft of at most ``limits[b]`` tokens for row b; None if no row has any.
        """

    def observe(self, num_accepted: list[int]) -> None:  # noqa: B027 - nothing to learn is fine
        """Told after each round: how many of the last draft's tokens each row kept."""

    def keep(self, rows: list[int]) -> None:  # noqa: B027
        """Only these rows go on; they are renumbered 0, 1, ..."""


class Drafter(ABC):
    """Describes how to draft. Holds options and models, no state of a call."""

    @abstractmethod
    def start(self, context: DraftContext) -> DraftSession:
        """A session for one call."""
