"""Draw one token per row from the filtered law of its logits.

The noise is the one ``verify_chain(method="match")`` uses, so that plain sampling and speculative
sampling with the same seed give the same tokens.

Dimensions: B rows, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ._launch import check_logits, check_sampling, per_row, pick_backend
from ._law import GREEDY_TEMPERATURE, Law, draw, is_off, make_law, normalise_
from ._philox import Stream


class SampleResult(NamedTuple):
    """What ``sample`` returns."""

    tokens: torch.Tensor  # [B] int64, in [0, V)
    error: torch.Tensor  # [B] bool: the row had a NaN or nothing finite; its token is 0
    probs: torch.Tensor | None  # [B, V] float32, the law drawn from; None unless asked for


def law_of_rows(
    logits: torch.Tensor,
    request: torch.Tensor,
    num_requests: int,
    temperature: float | torch.Tensor,
    top_k: int | torch.Tensor,
    top_p: float | torch.Tensor,
    min_p: float | torch.Tensor,
) -> Law:
    """The filtered law of ``logits`` [R, V]; parameters are numbers, or [B] with each row's
    ``request`` [R] in [0, B)."""

    def rows(name: str, value: float | torch.Tensor, dtype: torch.dtype) -> float | torch.Tensor:
        # a number stays one: what is off then costs nothing, without reading the device
        if not isinstance(value, torch.Tensor):
            return value
        return per_row(name, value, num_requests, dtype, logits.device)[request]

    return make_law(
        logits,
        rows("temperature", temperature, torch.float32),
        rows("top_k", top_k, torch.int64),
        rows("top_p", top_p, torch.float32),
        rows("min_p", min_p, torch.float32),
    )


def sample_torch(
    logits, temperature, top_k, top_p, min_p, seed, position, step, stream, return_probs
) -> SampleResult:
    """The op in plain torch: its definition, the CPU path, and what kernels are compared with."""
    B = logits.shape[0]
    request = torch.arange(B, device=logits.device)
    law = law_of_rows(logits, request, B, temperature, top_k, top_p, min_p)
    key = [
        per_row(name, value, B, torch.int64, logits.device)
        for name, value in (("seed", seed), ("position", position), ("step", step))
    ]
    tokens = draw(law.weights, *key, stream).masked_fill(law.error, 0)
    probs = normalise_(law.weights) if return_probs else None
    return SampleResult(tokens, law.error, probs)


def sample(
    logits: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor = 0,
    top_p: float | torch.Tensor = 1.0,
    min_p: float | torch.Tensor = 0.0,
    seed: int | torch.Tensor = 0,
    position: int | torch.Tensor = 0,
    step: int | torch.Tensor = 0,
    stream: Stream = Stream.TARGET,
    return_probs: bool = False,
    backend: str = "auto",
) -> SampleResult:
    """Draw one token per row: p = softmax(logits / temperature), then top-k, top-p, min-p.

    The filters are transformers' in transformers' order; ties at a boundary are kept. A temperature
    below 1e-5 is greedy (argmax, lowest id on ties). Noise: Philox4x32-10 keyed by the row's seed,
    counter (position, index, step, stream), two-level Gumbel-max.

    Args:
        logits: [B, V], any float dtype, any strides.
        temperature, top_k, top_p, min_p: numbers, or [B] tensors (not checked: that costs a sync;
            a negative or NaN temperature sets the row's error). ``top_k`` 0 or -1: off.
        seed: number or [B] int64, the request's seed.
        position: number or [B] int64, the absolute position of the token drawn.
        step: number or [B] int64. 0 with ``Stream.TARGET``. A drafter that draws with
            ``Stream.DRAFT`` passes the block's start as ``position`` and the index in the block as
            ``step``: noise keyed by absolute position alone biases block verification.
        stream: whose noise; see ``Stream``.
        return_probs: also return the law drawn from, for ``verify_chain(draft_probs=...)``.
        backend: "torch" or "auto".

    Returns:
        ``SampleResult``: tokens [B] int64, error [B] bool, probs [B, V] float32 or None.

    Raises:
        ValueError: a shape, dtype, device or number out of its range, named.
    """
    check_logits("logits", logits, 2)
    check_sampling(temperature, top_k, top_p, min_p)
    pick_backend(backend, "sample", ("torch",))
    return sample_torch(
        logits, temperature, top_k, top_p, min_p, seed, position, step, int(stream), return_probs
    )


def filter_logits(
    logits: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor = 0,
    top_p: float | torch.Tensor = 1.0,
    min_p: float | torch.Tensor = 0.0,
) -> torch.Tensor:
    """The logits of the law that ``sample`` draws from: scaled by 1/T, -inf where filtered.

    Args:
        logits: [B, V], any float dtype. The rest as in ``sample``.

    Returns:
        [B, V] float32. With nothing to apply, the logits in float32.
    """
    check_logits("logits", logits, 2)
    check_sampling(temperature, top_k, top_p, min_p)
    x = logits.float()
    if all(map(is_off, (temperature, top_k, top_p, min_p), (1.0, 0, 1.0, 0.0))):
        return x
    request = torch.arange(len(x), device=x.device)
    law = law_of_rows(logits, request, len(x), temperature, top_k, top_p, min_p)
    scale = per_row("temperature", temperature, logits.shape[0], torch.float32, logits.device)
    scale = torch.where(scale < GREEDY_TEMPERATURE, 1.0, scale)  # one logit is left, as it is
    return (x / scale[:, None]).masked_fill(law.weights == 0, -torch.inf)
