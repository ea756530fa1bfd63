"""Tensor ops for speculative decoding: verification and sampling. torch (and Triton) only."""

from ._law import GREEDY_TEMPERATURE
from ._philox import Stream
from .sample import SampleResult, filter_logits, sample
from .verify_chain import ChainResult, resolve_method, verify_chain

__all__ = [
    "GREEDY_TEMPERATURE",
    "ChainResult",
    "SampleResult",
    "Stream",
    "filter_logits",
    "resolve_method",
    "sample",
    "verify_chain",
]
