from .base import Draft, DraftContext, Drafter, DraftSession, Sampling
from .draft_model import DraftModel
from .ngram import NGram

__all__ = [
    "Draft",
    "DraftContext",
    "DraftModel",
    "DraftSession",
    "Drafter",
    "NGram",
    "Sampling",
]
