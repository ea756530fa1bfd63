"""Top-k and top-p without sorting: the smallest kept value of a row, exactly.

Both filters ask for the largest t with F(t) >= target, where F(t) is a count (top-k) or a mass
(top-p) of the entries >= t. One pass over the blocks whose maximum may matter collects the entries
of the bracket [lo, hi) that holds t, and measures F at pivots inside it; if the bracket holds more
than ``CANDIDATES`` entries, the pivots narrow it and the pass is repeated. The rest is a bisection
over float32 keys in registers. Values compare as keys: integers in the order of the floats.

One program per row; it also does what follows once the law of a row is known (``finish_row``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._chain_kernels import count_drafts, finish_row
from ._math import (
    BLOCK,
    INF,
    filtered_weights,
    load_block,
    parameter,
    read_temperature,
    row_summary,
    weight_of,
)

PIVOTS = tl.constexpr(16)


@triton.jit
def key_of(x):
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def lower_bound(top, weight, m, inverse_t, target, BY_MASS: tl.constexpr, NBP: tl.constexpr):
    """A value t with F(t) >= target, from the blocks alone; -inf if they do not tell.

    Each block whose maximum is >= t holds at least its maximum. For a mass there is a second bound:
    what lies below t is at most all of a block, or 511 times the weight of t.
    """
    index = tl.arange(0, NBP)
    own = (
        tl.where(top > -INF, tl.exp((top - m) * inverse_t), 0.0)
        if BY_MASS
        else (top > -INF).to(tl.float32)
    )
    lo = m * 0.0 - INF
    # down from the maximum, a factor e of the weight at a time
    step = 1.0 / inverse_t
    t = m
    for _ in range(24):
        reached = tl.sum(tl.where(top >= t, own, 0.0), axis=0)
        if BY_MASS:
            w_t = tl.exp((t - m) * inverse_t)
            below = tl.where(top >= t, tl.minimum(weight - own, (BLOCK - 1) * w_t), weight)
            reached = tl.maximum(reached, tl.sum(weight, axis=0) - tl.sum(below, axis=0) * 1.0001)
        lo = tl.where((reached >= target * 1.0001) & (lo == -INF), t, lo)
        t = t - step
    return lo


@triton.jit
def search(
    x_ptr,
    stride_v,
    num_v,
    buffer_ptr,
    top,
    m,
    inverse_t,
    lo,
    target,
    BY_MASS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    NBP: tl.constexpr,
):
    """The largest value t >= ``lo`` with F(t) >= ``target``; F(lo) >= target must hold."""
    index = tl.arange(0, NBP)
    lo_key = key_of(lo).to(tl.int64)
    hi_key = key_of(m).to(tl.int64) + 1
    base = target * 0.0  # F at hi
    inside = tl.to_tensor(CANDIDATES + 1)
    while inside > CANDIDATES:
        low = value_of(lo_key.to(tl.int32))
        high = value_of((hi_key - 1).to(tl.int32))
        # linear in the value while that separates, in the key after
        floor = tl.maximum(low, high - 80.0 / inverse_t)
        j = tl.arange(0, PIVOTS)
        linear = key_of(floor + (high - floor) * ((j + 1).to(tl.float32) / PIVOTS)).to(tl.int64)
        spread = lo_key + (hi_key - lo_key) * (j + 1) // PIVOTS
        use_linear = (high - floor) * inverse_t > 1e-3
        pivots = tl.where(use_linear, linear, spread)
        pivots = tl.maximum(tl.minimum(pivots, hi_key), lo_key)
        at_pivot = tl.zeros([PIVOTS], tl.float32)
        inside = inside * 0
        todo = top >= low
        block = tl.min(tl.where(todo, index, NBP), axis=0)
        while block < NBP:
            x, ids = load_block(x_ptr, stride_v, block, num_v)
            keys = key_of(x).to(tl.int64)
            valid = ids < num_v
            w = tl.where(valid, 1.0, 0.0)
            if BY_MASS:
                w = tl.where(valid, tl.exp((x - m) * inverse_t), 0.0)
            beyond = (keys[None, :] >= pivots[:, None]) & (keys[None, :] < hi_key)
            at_pivot += tl.sum(tl.where(beyond, w[None, :], 0.0), axis=1)
            here = valid & (keys >= lo_key) & (keys < hi_key)
            slot = inside + tl.cumsum(here.to(tl.int32), axis=0) - 1
            tl.store(buffer_ptr + slot, x, mask=here & (slot < CANDIDATES))
            inside += tl.sum(here.to(tl.int32), axis=0)
            todo = todo & (index != block)
            block = tl.min(tl.where(todo, index, NBP), axis=0)
        if inside > CANDIDATES:
            enough = base + at_pivot >= target
            new_lo = tl.max(tl.where(enough, pivots, lo_key), axis=0)
            new_hi = tl.min(tl.where(enough, hi_key, pivots), axis=0)
            base += tl.max(tl.where(enough, 0.0, at_pivot), axis=0)
            lo_key = new_lo
            hi_key = tl.maximum(new_hi, new_lo + 1)
            if hi_key - lo_key <= 1:
                inside = inside * 0  # one value, many times: found

    tl.debug_barrier()
    c = tl.arange(0, CANDIDATES)
    x_c = tl.load(buffer_ptr + c, mask=c < inside, other=-INF, cache_modifier=".cg")
    keys_c = key_of(x_c).to(tl.int64)
    w_c = tl.where(c < inside, 1.0, 0.0)
    if BY_MASS:
        w_c = tl.where(c < inside, tl.exp((x_c - m) * inverse_t), 0.0)
    while hi_key - lo_key > 1:
        middle = (lo_key + hi_key) // 2
        found = base + tl.sum(tl.where(keys_c >= middle, w_c, 0.0), axis=0)
        if found >= target:
            lo_key = middle
        else:
            hi_key = middle
    return value_of(lo_key.to(tl.int32))


@triton.jit
def filter_kernel(
    tokens_ptr,
    num_accepted_ptr,
    error_ptr,
    stride_ob,
    block_max_ptr,
    block_sum_ptr,
    draft_max_ptr,
    draft_sum_ptr,
    row_max_ptr,
    row_sum_ptr,
    row_p_ptr,
    row_q_ptr,
    row_qmax_ptr,
    row_qsum_ptr,
    row_token_ptr,
    row_flag_ptr,
    row_tau_ptr,
    request_counter_ptr,
    buffer_ptr,
    target_ptr,
    stride_tb,
    stride_tk,
    stride_tv,
    draft_ptr,
    stride_db,
    stride_dk,
    stride_dv,
    draft_tokens_ptr,
    stride_xb,
    stride_xk,
    cu_ptr,
    num_draft_ptr,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    position,
    step,
    typical_eps,
    typical_alpha,
    K,
    rows_per_request,
    num_v,
    num_draft_v,
    num_blocks,
    num_chunks,
    MODE: tl.constexpr,
    DRAFT: tl.constexpr,
    STREAM: tl.constexpr,
    PACKED: tl.constexpr,
    FLAT: tl.constexpr,
    RAGGED: tl.constexpr,
    T_TENSOR: tl.constexpr,
    TOP_K_TENSOR: tl.constexpr,
    TOP_P_TENSOR: tl.constexpr,
    MIN_P_TENSOR: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    SEED_TENSOR: tl.constexpr,
    POSITION_TENSOR: tl.constexpr,
    STEP_TENSOR: tl.constexpr,
    CANDIDATES: tl.constexpr,
    NBP: tl.constexpr,
    SP: tl.constexpr,
    KP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    b = row // rows_per_request
    i = (row % rows_per_request).to(tl.int32)
    n, first = count_drafts(cu_ptr, num_draft_ptr, b, K, PACKED, RAGGED)
    if i > n:
        return
    inverse_t, greedy, valid_t = read_temperature(temperature, b, T_TENSOR)
    x_row = (
        target_ptr + (first + i) * stride_tk
        if PACKED
        else target_ptr + b * stride_tb + i * stride_tk
    )
    y_row = draft_ptr + ((first - b + i) * stride_dk if FLAT else b * stride_db + i * stride_dk)
    d_row = draft_tokens_ptr + ((first - b) * stride_xk if FLAT else b * stride_xb)
    top, weight, m, error = row_summary(
        block_max_ptr + row * num_blocks,
        block_sum_ptr + row * num_blocks,
        num_blocks,
        inverse_t,
        greedy,
        NBP,
    )
    error = error | (valid_t == 0)
    tau = -INF
    min_keep = 0.0
    w_log_w = 0.0
    if HAS_MIN_P:
        min_keep = parameter(min_p, b, MIN_P_TENSOR).to(tl.float32)
    if (error == 0) & (greedy == 0):
        if HAS_TOP_K:
            k = parameter(top_k, b, TOP_K_TENSOR).to(tl.int64)
            if (k > 0) & (k < num_v):
                lo = lower_bound(top, weight, m, inverse_t, k.to(tl.float32), False, NBP)
                tau = search(
                    x_row,
                    stride_tv,
                    num_v,
                    buffer_ptr + row * CANDIDATES,
                    top,
                    m,
                    inverse_t,
                    lo,
                    k.to(tl.float32),
                    False,
                    CANDIDATES,
                    NBP,
                )
                weight, w_log_w = filtered_weights(
                    x_row, stride_tv, num_v, top, m, inverse_t, tau, 0.0, False, NBP
                )
        if HAS_TOP_P:
            p = parameter(top_p, b, TOP_P_TENSOR).to(tl.float32)
            if p < 1:
                reach = p * tl.sum(weight, axis=0)
                lo = lower_bound(top, weight, m, inverse_t, reach, True, NBP)
                lo = tl.maximum(lo, tau)
                tau = search(
                    x_row,
                    stride_tv,
                    num_v,
                    buffer_ptr + row * CANDIDATES,
                    top,
                    m,
                    inverse_t,
                    lo,
                    reach,
                    True,
                    CANDIDATES,
                    NBP,
                )
        weight, w_log_w = filtered_weights(
            x_row, stride_tv, num_v, top, m, inverse_t, tau, min_keep, MODE == "typical", NBP
        )
    tl.store(row_tau_ptr + row, tau)
    finish_row(
        tokens_ptr,
        num_accepted_ptr,
        error_ptr,
        stride_ob,
        draft_max_ptr,
        draft_sum_ptr,
        row_max_ptr,
        row_sum_ptr,
        row_p_ptr,
        row_q_ptr,
        row_qmax_ptr,
        row_qsum_ptr,
        row_token_ptr,
        row_flag_ptr,
        request_counter_ptr,
        x_row,
        stride_tv,
        y_row,
        stride_dv,
        d_row,
        stride_xk,
        seed,
        position,
        step,
        typical_eps,
        typical_alpha,
        row,
        b,
        i,
        n,
        K,
        num_v,
        num_draft_v,
        num_blocks,
        num_chunks,
        weight,
        w_log_w,
        m,
        inverse_t,
        greedy,
        tau,
        min_keep,
        error,
        MODE,
        DRAFT,
        STREAM,
        SEED_TENSOR,
        POSITION_TENSOR,
        STEP_TENSOR,
        NBP,
        SP,
        KP,
    )
