"""Launches of the chain kernels: workspace, variants, grids. No synchronisation, no copies."""

from __future__ import annotations

import contextlib

import torch
import triton

from ._chain_kernels import mass_kernel, residual_kernel, rows_kernel
from ._filter_kernel import filter_kernel
from ._law import BLOCK, is_off

# blocks of the vocabulary to a program: 16 x 512 entries, 32 registers a thread with 8 warps
CHUNK = 16
NUM_WARPS = 8
# entries that the search of top-k and top-p keeps in registers
CANDIDATES = 2048


def _pow2(n: int, least: int = 1) -> int:
    return triton.next_power_of_2(max(n, least))


def device_guard(x: torch.Tensor) -> contextlib.AbstractContextManager:
    """Make ``x``'s GPU the current one: Triton launches on the current device, not on ``x``'s."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


class Workspace:
    """Scratch of a call. Allocate once for the largest shape and pass it to every call: contents
    need not be kept, and the arrival counters return to zero by themselves.

    Args:
        num_rows: B * (K + 1).
        num_requests: B.
        num_v: vocabulary.
    """

    def __init__(self, num_requests: int, num_rows: int, num_v: int, device: torch.device):
        num_blocks = -(-num_v // BLOCK)
        num_chunks = -(-num_blocks // CHUNK)
        self.shape = (num_requests, num_rows, num_v)
        # counters first: they alone must start at zero
        self.counters = torch.zeros(num_rows + num_requests, dtype=torch.int32, device=device)
        self.blocks = torch.empty(3, num_rows, num_blocks, dtype=torch.float32, device=device)
        self.chunks = torch.empty(3, num_rows, num_chunks, dtype=torch.float32, device=device)
        self.rows = torch.empty(7, num_rows, dtype=torch.float32, device=device)
        self.candidates = None  # only for top-k and top-p
        self.ids = torch.empty(2, num_rows, dtype=torch.int32, device=device)

    def candidates_of(self) -> torch.Tensor:
        if self.candidates is None:
            shape = (self.shape[1], CANDIDATES)
            self.candidates = torch.empty(shape, dtype=torch.float32, device=self.rows.device)
        return self.candidates

    def fits(self, num_requests: int, num_rows: int, num_v: int, device: torch.device) -> bool:
        return self.counters.device == device and all(
            have >= need
            for have, need in zip(self.shape, (num_requests, num_rows, num_v), strict=True)
        )


def run_chain(
    target: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft: torch.Tensor | None,
    draft_kind: str,
    num_draft_tokens: torch.Tensor | None,
    cu_logits: torch.Tensor | None,
    K: int,
    sampling: tuple,
    seed,
    position,
    step,
    stream: int,
    method: str,
    typical: tuple[float, float],
    workspace: Workspace | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
):
    """Launch. ``draft_kind`` is "none", "logits" or "probs"; ``K`` the width of the output."""
    temperature, top_k, top_p, min_p = sampling
    device = target.device
    packed = cu_logits is not None
    flat = packed and draft_tokens.ndim == 1
    B = cu_logits.shape[0] - 1 if packed else target.shape[0]
    V = target.shape[-1]
    ratio = method in ("token", "block")
    if method == "greedy":
        temperature, top_k, top_p, min_p = 0.0, 0, 1.0, 0.0
    has_top_k = not (is_off(top_k, 0) or is_off(top_k, -1)) and (
        isinstance(top_k, torch.Tensor) or top_k < V
    )
    has_top_p = not is_off(top_p, 1.0)
    filtered = has_top_k or has_top_p
    tokens, num_accepted, error = out or (
        torch.empty(B, K + 1, dtype=torch.int64, device=device),
        torch.empty(B, dtype=torch.int64, device=device),
        torch.empty(B, dtype=torch.bool, device=device),
    )
    if B == 0:
        return tokens, num_accepted, error
    rows_per_request = max(K, 1) if ratio and not filtered else K + 1
    R = B * rows_per_request
    num_blocks = -(-V // BLOCK)
    num_chunks = -(-num_blocks // CHUNK)
    if workspace is None:
        workspace = Workspace(B, R, V, device)
    elif not workspace.fits(B, R, V, device):
        raise ValueError(f"workspace: made for {workspace.shape}, the call needs {(B, R, V)}")
    ws = workspace
    row_counters, request_counters = ws.counters.split([ws.shape[1], ws.shape[0]])

    def pointer(x):
        return target if x is None else x  # a pointer that is never read

    target_strides = (0, *target.stride()) if packed else target.stride()
    draft_strides = (0, 0, 0)
    if draft is not None:
        draft_strides = (0, *draft.stride()) if flat else draft.stride()
    token_strides = (0, *draft_tokens.stride()) if flat else draft_tokens.stride()
    flags = {
        "PACKED": packed,
        "FLAT": flat,
        "RAGGED": num_draft_tokens is not None,
        "T_TENSOR": isinstance(temperature, torch.Tensor),
        "MIN_P_TENSOR": isinstance(min_p, torch.Tensor),
        "HAS_MIN_P": not is_off(min_p, 0.0),
        "SEED_TENSOR": isinstance(seed, torch.Tensor),
        "POSITION_TENSOR": isinstance(position, torch.Tensor),
        "CHUNK": CHUNK,
        "KP": _pow2(K + 1),
    }
    shared = {
        "target_ptr": target,
        "stride_tb": target_strides[0],
        "stride_tk": target_strides[1],
        "stride_tv": target_strides[2],
        "draft_ptr": pointer(draft),
        "stride_db": draft_strides[0],
        "stride_dk": draft_strides[1],
        "stride_dv": draft_strides[2],
        "cu_ptr": pointer(cu_logits),
        "num_draft_ptr": pointer(num_draft_tokens),
        "temperature": temperature,
        "min_p": min_p,
        "K": K,
        "rows_per_request": rows_per_request,
        "num_v": V,
        "num_draft_v": 0 if draft is None else draft.shape[-1],
        "num_chunks": num_chunks,
        "row_max_ptr": ws.rows[0],
        "row_sum_ptr": ws.rows[1],
        "row_p_ptr": ws.rows[2],
        "row_q_ptr": ws.rows[3],
        "row_qmax_ptr": ws.rows[4],
        "row_qsum_ptr": ws.rows[5],
        "row_token_ptr": ws.ids[0],
    }
    result = {
        "tokens_ptr": tokens,
        "num_accepted_ptr": num_accepted,
        "error_ptr": error,
        "stride_ob": tokens.stride(0),
        "block_max_ptr": ws.blocks[0],
        "block_sum_ptr": ws.blocks[1],
        "row_flag_ptr": ws.ids[1],
        "request_counter_ptr": request_counters,
        "draft_tokens_ptr": draft_tokens,
        "stride_xb": token_strides[0],
        "stride_xk": token_strides[1],
        "seed": seed,
        "position": position,
        "num_blocks": num_blocks,
    }
    tiles = {"NBP": _pow2(num_blocks, 4), "SP": _pow2(num_chunks)}
    stats = {"draft_max_ptr": ws.chunks[0], "draft_sum_ptr": ws.chunks[1]}
    finish = {
        "step": step,
        "typical_eps": typical[0],
        "typical_alpha": typical[1],
        "MODE": "ratio" if ratio else "typical" if method == "typical" else "match",
        "DRAFT": draft_kind,
        "STREAM": stream,
        "STEP_TENSOR": isinstance(step, torch.Tensor),
    }
    with device_guard(target):
        if not ratio or filtered or K > 0:
            rows_kernel[(R, num_chunks)](
                **shared,
                **result,
                **flags,
                **tiles,
                **stats,
                **finish,
                block_wlogw_ptr=ws.blocks[2],
                row_counter_ptr=row_counters,
                FINISH=not filtered,
                num_warps=NUM_WARPS,
            )
        if filtered:
            filter_kernel[(R,)](
                **shared,
                **result,
                **flags,
                **tiles,
                **stats,
                **finish,
                row_tau_ptr=ws.rows[6],
                buffer_ptr=ws.candidates_of(),
                top_k=top_k,
                top_p=top_p,
                TOP_K_TENSOR=isinstance(top_k, torch.Tensor),
                TOP_P_TENSOR=isinstance(top_p, torch.Tensor),
                HAS_TOP_K=has_top_k,
                HAS_TOP_P=has_top_p,
                CANDIDATES=CANDIDATES,
                num_warps=NUM_WARPS,
            )
        if ratio:
            mass = ws.chunks[2]
            tau = {"row_tau_ptr": ws.rows[6], "HAS_TAU": filtered, "DRAFT": draft_kind}
            if method == "block" and draft_kind != "none" and K > 1:
                mass_kernel[(B * (K - 1), num_chunks)](
                    **shared, **flags, **tau, mass_ptr=mass, num_warps=NUM_WARPS
                )
            residual_kernel[(B, num_chunks)](
                **shared,
                **result,
                **flags,
                **tiles,
                **tau,
                mass_ptr=mass,
                BLOCK_RULE=method == "block",
                num_warps=NUM_WARPS,
            )
    return tokens, num_accepted, error
