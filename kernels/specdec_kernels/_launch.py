"""What every op shares: argument checks, backend choice, per-row parameters."""

from __future__ import annotations

import math

import torch

BACKENDS = ("auto", "triton", "torch")


def pick_backend(backend: str, op: str, available: tuple[str, ...]) -> str:
    """Resolve ``backend`` for an op, or raise ``ValueError`` naming what can run."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {BACKENDS}, got {backend!r}")
    if backend == "auto":
        return "torch"
    if backend not in available:
        raise ValueError(f"backend: {op} has {available}, not {backend!r}")
    return backend


def check_tensor(
    name: str, x: torch.Tensor, shape: tuple[int, ...], *, like: torch.Tensor | None = None
) -> None:
    """Raise ``ValueError`` unless ``x`` has this shape and sits where ``like`` does."""
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(x.shape)}")
    if like is not None and x.device != like.device:
        raise ValueError(f"{name}: expected device {like.device}, got {x.device}")


def check_logits(name: str, x: torch.Tensor, ndim: int) -> None:
    if x.ndim != ndim:
        raise ValueError(f"{name}: expected {ndim} dimensions, got shape {list(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"{name}: expected a float dtype, got {x.dtype}")
    if x.shape[-1] == 0:
        raise ValueError(f"{name}: the vocabulary is empty, got shape {list(x.shape)}")


def check_ids(name: str, x: torch.Tensor) -> None:
    if x.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: expected int32 or int64, got {x.dtype}")


def check_sampling(
    temperature: float | torch.Tensor,
    top_k: int | torch.Tensor,
    top_p: float | torch.Tensor,
    min_p: float | torch.Tensor,
) -> None:
    """Check sampling parameters given as numbers; tensors are not read, that would cost a sync."""
    if not isinstance(temperature, torch.Tensor) and not 0 <= temperature < math.inf:
        raise ValueError(f"temperature: expected a finite number >= 0, got {temperature}")
    if not isinstance(top_k, torch.Tensor) and not (top_k >= -1 and top_k % 1 == 0):
        raise ValueError(f"top_k: expected an integer >= 0 (0 or -1: off), got {top_k}")
    for name, value in (("top_p", top_p), ("min_p", min_p)):
        if not isinstance(value, torch.Tensor) and not 0 <= value <= 1:
            raise ValueError(f"{name}: expected a number in [0, 1], got {value}")


def per_row(
    name: str, value: float | torch.Tensor, batch: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A scalar or a ``[B]`` tensor as a ``[B]`` tensor of ``dtype``."""
    if not isinstance(value, torch.Tensor):
        if dtype == torch.int64:
            # a 64-bit pattern: seeds may be unsigned
            value = (int(value) + 2**63) % 2**64 - 2**63
        return torch.full((batch,), value, dtype=dtype, device=device)
    if value.ndim == 0:
        value = value.expand(batch)
    check_tensor(name, value, (batch,))
    return value.to(device=device, dtype=dtype)
