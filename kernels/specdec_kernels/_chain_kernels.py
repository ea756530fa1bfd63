"""The kernels behind ``verify_chain`` and ``sample``.

- ``rows_kernel``: one read of the rows. The last program of a row to arrive draws its token (match,
  greedy, typical) or takes p(x) and q(x) (token, block); the last row of a request to finish
  verifies it (match, greedy, typical).
- ``mass_kernel``: block verification's Z_i, the second read of rows 1..K-1.
- ``residual_kernel``: decides how much is kept and draws the next token from one row.

Dimensions: B requests, K drafts, R = B * rows_per_request rows, V vocabulary, S chunks of a row,
NB blocks of ``BLOCK`` entries, CHUNK blocks to a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._math import (
    INF,
    block_sums,
    filtered_weights,
    last_to_arrive,
    load_block,
    load_chunk,
    parameter,
    pick_block,
    pick_entry,
    read_temperature,
    row_summary,
    to_uniform,
    weight_of,
    words4,
)

# streams of _philox.Stream
TARGET = tl.constexpr(0)
ACCEPT = tl.constexpr(2)
RESIDUAL = tl.constexpr(3)
# what a row may be found to have
BAD_TARGET = tl.constexpr(1)
BAD_DRAFT = tl.constexpr(2)


@triton.jit
def count_drafts(cu_ptr, num_draft_ptr, b, K, PACKED: tl.constexpr, RAGGED: tl.constexpr):
    """How many drafts request b has, at most K (-1: it has no rows), and its first packed row."""
    first = tl.to_tensor(0).to(tl.int64)
    n = tl.to_tensor(K)
    if PACKED:
        first = tl.load(cu_ptr + b).to(tl.int64)
        n = (tl.load(cu_ptr + b + 1).to(tl.int64) - first - 1).to(tl.int32)
        n = tl.maximum(tl.minimum(n, K), -1)
    if RAGGED:
        n = tl.load(num_draft_ptr + b).to(tl.int32)
        n = tl.maximum(tl.minimum(n, K), 0)
    return n, first


@triton.jit
def write_result(
    tokens_ptr,
    num_accepted_ptr,
    error_ptr,
    stride_ob,
    x,
    b,
    accepted,
    next_token,
    error,
    has_rows,
    K,
    KP: tl.constexpr,
):
    """tokens [b, :] = kept drafts, the next token, -1; counts; error."""
    k = tl.arange(0, KP)
    out = tl.where(k < accepted, x.to(tl.int64), -1)
    out = tl.where((k == accepted) & has_rows, next_token.to(tl.int64), out)
    tl.store(tokens_ptr + b * stride_ob + k, out, mask=k <= K)
    tl.store(num_accepted_ptr + b, accepted.to(tl.int64))
    tl.store(error_ptr + b, error)


@triton.jit
def finish_row(
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
    MODE: tl.constexpr,
    DRAFT: tl.constexpr,
    STREAM: tl.constexpr,
    SEED_TENSOR: tl.constexpr,
    POSITION_TENSOR: tl.constexpr,
    STEP_TENSOR: tl.constexpr,
    NBP: tl.constexpr,
    SP: tl.constexpr,
    KP: tl.constexpr,
):
    """What follows once a row's weights are known: its token, or its p(x) and q(x)."""
    s = parameter(seed, b, SEED_TENSOR)
    p0 = parameter(position, b, POSITION_TENSOR)
    total = tl.where(greedy, 1.0, tl.sum(weight, axis=0))
    tl.store(row_max_ptr + row, m)
    tl.store(row_sum_ptr + row, total)
    flag = tl.where(error, BAD_TARGET, 0)
    token = tl.to_tensor(0)
    if MODE != "ratio" or greedy:
        step_b = parameter(step, b, STEP_TENSOR)
        chosen = pick_block(weight, greedy, s, p0 + i, step_b, STREAM, NBP)
        x, ids = load_block(x_row, stride_tv, tl.minimum(chosen, num_blocks - 1), num_v)
        w = weight_of(x, ids, m, inverse_t, greedy, tau, min_keep)
        token = pick_entry(w, ids, greedy, s, p0 + i, step_b, STREAM)
        token = tl.where(error, 0, tl.minimum(token, num_v - 1))
        tl.store(row_token_ptr + row, token)
    if (MODE != "match") and (i < n):
        d = tl.load(d_row + i * stride_xk).to(tl.int64)
        known = (d >= 0) & (d < num_v)
        d = tl.where(known, d, 0)
        x_d = tl.load(x_row + d * stride_tv).to(tl.float32)
        p = tl.div_rn(weight_of(x_d, d, m, inverse_t, False, tau, min_keep), total)
        p = tl.where(greedy, (d == token).to(tl.float32), p)
        if MODE == "typical":
            entropy = tl.where(greedy, 0.0, tl.log(total) - tl.div_rn(w_log_w, total))
            floor = tl.minimum(typical_alpha * tl.exp(-entropy), typical_eps)
            tl.store(row_p_ptr + row, (known & (p > floor)).to(tl.float32))
        else:
            q = 1.0
            if DRAFT == "logits":
                c = tl.arange(0, SP)
                at = row * num_chunks + c
                inside = c < num_chunks
                y_tops = tl.load(draft_max_ptr + at, mask=inside, other=-INF, cache_modifier=".cg")
                y_sums = tl.load(draft_sum_ptr + at, mask=inside, other=0.0, cache_modifier=".cg")
                y_max = tl.max(y_tops, axis=0)
                y_sum = tl.sum(tl.exp(y_tops - y_max) * y_sums, axis=0)
                tl.store(row_qmax_ptr + row, y_max)
                tl.store(row_qsum_ptr + row, y_sum)
                y_d = tl.load(y_row + d * stride_dv, mask=d < num_draft_v, other=-INF)
                q = tl.div_rn(tl.exp(y_d.to(tl.float32) - y_max), y_sum)
            if DRAFT == "probs":
                q = tl.load(y_row + d * stride_dv, mask=d < num_draft_v, other=0.0).to(tl.float32)
            flag = flag | tl.where((q != q) | (tl.abs(q) == INF), BAD_DRAFT, 0)
            tl.store(row_p_ptr + row, p)
            tl.store(row_q_ptr + row, q)
    tl.store(row_flag_ptr + row, flag)
    if MODE != "ratio":
        if last_to_arrive(request_counter_ptr + b, n + 1):
            k = tl.arange(0, KP)
            drafts = tl.load(d_row + k * stride_xk, mask=k < n, other=-1).to(tl.int64)
            at_k = row - i + k
            own = tl.load(row_token_ptr + at_k, mask=k <= n, other=-1, cache_modifier=".cg")
            bad = tl.load(row_flag_ptr + at_k, mask=k <= n, other=0, cache_modifier=".cg")
            fits = drafts == own
            if MODE == "typical":
                passed = tl.load(row_p_ptr + at_k, mask=k < n, other=0.0, cache_modifier=".cg")
                fits = passed > 0
            accepted = tl.min(tl.where(fits & (k < n) & (bad == 0), KP, k), axis=0)
            here = k == accepted
            next_token = tl.sum(tl.where(here, own, 0), axis=0)
            is_bad = tl.sum(tl.where(here, bad, 0), axis=0) > 0
            write_result(
                tokens_ptr,
                num_accepted_ptr,
                error_ptr,
                stride_ob,
                drafts,
                b,
                accepted,
                next_token,
                is_bad,
                True,
                K,
                KP,
            )


@triton.jit
def rows_kernel(
    tokens_ptr,
    num_accepted_ptr,
    error_ptr,
    stride_ob,
    block_max_ptr,
    block_sum_ptr,
    block_wlogw_ptr,
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
    row_counter_ptr,
    request_counter_ptr,
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
    MIN_P_TENSOR: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    SEED_TENSOR: tl.constexpr,
    POSITION_TENSOR: tl.constexpr,
    STEP_TENSOR: tl.constexpr,
    FINISH: tl.constexpr,
    CHUNK: tl.constexpr,
    NBP: tl.constexpr,
    SP: tl.constexpr,
    KP: tl.constexpr,
):
    # rows times vocabulary passes 2**31: offsets in int64
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    b = row // rows_per_request
    i = (row % rows_per_request).to(tl.int32)
    n, first = count_drafts(cu_ptr, num_draft_ptr, b, K, PACKED, RAGGED)
    if PACKED:
        if (n < 0) & (i == 0) & (chunk == 0):
            none = tl.zeros([KP], tl.int64)
            zero = tl.to_tensor(0)
            write_result(
                tokens_ptr,
                num_accepted_ptr,
                error_ptr,
                stride_ob,
                none,
                b,
                zero,
                zero,
                False,
                False,
                K,
                KP,
            )
    # the ratio rules need no row without a draft here, unless it is to be filtered
    last_row = n - 1 if MODE == "ratio" and FINISH else n
    if i > last_row:
        return

    inverse_t, greedy, valid_t = read_temperature(temperature, b, T_TENSOR)
    x_row = (
        target_ptr + (first + i) * stride_tk
        if PACKED
        else target_ptr + b * stride_tb + i * stride_tk
    )
    x, ids, block = load_chunk(x_row, stride_tv, chunk, num_v, CHUNK)
    top, total = block_sums(x, inverse_t, greedy)
    stat = row * num_blocks + block
    tl.store(block_max_ptr + stat, top, mask=block < num_blocks)
    tl.store(block_sum_ptr + stat, total, mask=block < num_blocks)
    if MODE == "typical":
        base = tl.where(top == -INF, 0.0, top)
        z = (x - base[:, None]) * inverse_t
        wlogw = tl.sum(tl.where(x > -INF, tl.exp(z) * z, 0.0), axis=1)
        tl.store(block_wlogw_ptr + stat, wlogw, mask=block < num_blocks)
    y_row = draft_ptr + ((first - b + i) * stride_dk if FLAT else b * stride_db + i * stride_dk)
    d_row = draft_tokens_ptr + ((first - b) * stride_xk if FLAT else b * stride_xb)
    if DRAFT == "logits" and i < n:
        y, y_ids, y_block = load_chunk(y_row, stride_dv, chunk, num_draft_v, CHUNK)
        y_top = tl.max(tl.max(y, axis=1), axis=0)
        y_nan = tl.max(tl.max((y != y).to(tl.int32), axis=1), axis=0) > 0
        y_base = tl.where(y_top == -INF, 0.0, y_top)
        y_sum = tl.sum(tl.sum(tl.exp(y - y_base), axis=1), axis=0)
        tl.store(draft_max_ptr + row * num_chunks + chunk, y_top)
        tl.store(draft_sum_ptr + row * num_chunks + chunk, tl.where(y_nan, float("nan"), y_sum))

    if not FINISH:
        return  # filter_kernel goes on
    if last_to_arrive(row_counter_ptr + row, num_chunks):
        block_top, weight, m, error = row_summary(
            block_max_ptr + row * num_blocks,
            block_sum_ptr + row * num_blocks,
            num_blocks,
            inverse_t,
            greedy,
            NBP,
        )
        w_log_w = 0.0
        if MODE == "typical":
            index = tl.arange(0, NBP)
            part = tl.load(
                block_wlogw_ptr + row * num_blocks + index,
                mask=index < num_blocks,
                other=0.0,
                cache_modifier=".cg",
            )
            shift = tl.where(weight > 0, (block_top - m) * inverse_t, 0.0)
            w_log_w = tl.sum(tl.exp(shift) * part * (weight > 0) + shift * weight, axis=0)
        min_keep = 0.0
        if HAS_MIN_P:
            min_keep = parameter(min_p, b, MIN_P_TENSOR).to(tl.float32)
            if (error == 0) & (greedy == 0) & (min_keep > 0):
                weight, w_log_w = filtered_weights(
                    x_row,
                    stride_tv,
                    num_v,
                    block_top,
                    m,
                    inverse_t,
                    -INF,
                    min_keep,
                    MODE == "typical",
                    NBP,
                )
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
            -INF,
            min_keep,
            error | (valid_t == 0),
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


@triton.jit
def draft_prob(y, ids, row_qmax, row_qsum, DRAFT: tl.constexpr):
    """q of draft logits or probabilities ``y``; what is no number has none."""
    if DRAFT == "logits":
        q = tl.div_rn(tl.exp(y - row_qmax), row_qsum)
    else:
        q = y
    return tl.where((q == q) & (tl.abs(q) < INF), q, 0.0)


@triton.jit
def combine_max(a, b):
    return tl.maximum(a, b)


@triton.jit
def block_weights(p, q, k):
    """w_0 .. of block verification at k = 0, 1, ...: w_i = prod p/q over its largest prefix, at
    most 1 (Sun et al. 2024, Algorithm 2, unrolled), for tiles with p_i, q_i at k = i - 1."""
    steps = tl.where(p > 0, tl.log(p) - tl.where(q > 0, tl.log(q), -1e30), -INF)
    steps = tl.minimum(steps, 1e30)
    total = tl.cumsum(steps, axis=0)
    top = tl.associative_scan(total, 0, combine_max)
    return tl.exp(total - tl.maximum(top, 0.0))


@triton.jit
def mass_kernel(
    mass_ptr,
    row_max_ptr,
    row_sum_ptr,
    row_p_ptr,
    row_q_ptr,
    row_qmax_ptr,
    row_qsum_ptr,
    row_token_ptr,
    row_tau_ptr,
    target_ptr,
    stride_tb,
    stride_tk,
    stride_tv,
    draft_ptr,
    stride_db,
    stride_dk,
    stride_dv,
    cu_ptr,
    num_draft_ptr,
    temperature,
    min_p,
    K,
    rows_per_request,
    num_v,
    num_draft_v,
    num_chunks,
    DRAFT: tl.constexpr,
    PACKED: tl.constexpr,
    FLAT: tl.constexpr,
    RAGGED: tl.constexpr,
    T_TENSOR: tl.constexpr,
    MIN_P_TENSOR: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    HAS_TAU: tl.constexpr,
    CHUNK: tl.constexpr,
    KP: tl.constexpr,
):
    """A chunk's part of Z_i = sum (w_i p_{i+1} - q_{i+1})+, i = 1 .. n - 1."""
    b = (tl.program_id(0) // (K - 1)).to(tl.int64)
    i = 1 + tl.program_id(0) % (K - 1)
    chunk = tl.program_id(1)
    n, first = count_drafts(cu_ptr, num_draft_ptr, b, K, PACKED, RAGGED)
    if i >= n:
        return
    k = tl.arange(0, KP)
    rows = b * rows_per_request
    p = tl.load(row_p_ptr + rows + k, mask=k < i, other=1.0)
    q = tl.load(row_q_ptr + rows + k, mask=k < i, other=1.0)
    w = tl.sum(tl.where(k == i - 1, block_weights(p, q, k), 0.0), axis=0)
    row = rows + i
    inverse_t, greedy, _ = read_temperature(temperature, b, T_TENSOR)
    m = tl.load(row_max_ptr + row)
    total = tl.load(row_sum_ptr + row)
    min_keep = parameter(min_p, b, MIN_P_TENSOR).to(tl.float32) if HAS_MIN_P else 0.0
    tau = tl.load(row_tau_ptr + row) if HAS_TAU else -INF
    x_row = (
        target_ptr + (first + i) * stride_tk
        if PACKED
        else target_ptr + b * stride_tb + i * stride_tk
    )
    y_row = draft_ptr + ((first - b + i) * stride_dk if FLAT else b * stride_db + i * stride_dk)
    x, ids, _ = load_chunk(x_row, stride_tv, chunk, num_v, CHUNK)
    p_x = tl.div_rn(weight_of(x, ids, m, inverse_t, False, tau, min_keep), total)
    if greedy:
        p_x = (ids == tl.load(row_token_ptr + row)).to(tl.float32)
    y, _, _ = load_chunk(y_row, stride_dv, chunk, num_draft_v, CHUNK)
    if DRAFT == "probs":
        y = tl.where(ids < num_draft_v, y, 0.0)
    y_max = tl.load(row_qmax_ptr + row) if DRAFT == "logits" else 0.0
    y_sum = tl.load(row_qsum_ptr + row) if DRAFT == "logits" else 1.0
    q_x = draft_prob(y, ids, y_max, y_sum, DRAFT)
    mass = tl.sum(tl.sum(tl.maximum(w * p_x - q_x, 0.0), axis=1), axis=0)
    tl.store(mass_ptr + row * num_chunks + chunk, mass)


@triton.jit
def residual_weights(
    x,
    y,
    ids,
    w,
    m,
    inverse_t,
    total,
    tau,
    min_keep,
    y_max,
    y_sum,
    drafted,
    num_draft_v,
    DRAFT: tl.constexpr,
):
    """(w p - q)+ of a tile; with a one-hot q, p without the drafted token."""
    p = tl.div_rn(weight_of(x, ids, m, inverse_t, False, tau, min_keep), total)
    if DRAFT == "none":
        return tl.where(ids == drafted, 0.0, p)
    else:
        if DRAFT == "probs":
            y = tl.where(ids < num_draft_v, y, 0.0)
        return tl.maximum(w * p - draft_prob(y, ids, y_max, y_sum, DRAFT), 0.0)


@triton.jit
def residual_kernel(
    tokens_ptr,
    num_accepted_ptr,
    error_ptr,
    stride_ob,
    block_max_ptr,
    block_sum_ptr,
    mass_ptr,
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
    min_p,
    seed,
    position,
    K,
    rows_per_request,
    num_v,
    num_draft_v,
    num_blocks,
    num_chunks,
    DRAFT: tl.constexpr,
    BLOCK_RULE: tl.constexpr,
    PACKED: tl.constexpr,
    FLAT: tl.constexpr,
    RAGGED: tl.constexpr,
    T_TENSOR: tl.constexpr,
    MIN_P_TENSOR: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    HAS_TAU: tl.constexpr,
    SEED_TENSOR: tl.constexpr,
    POSITION_TENSOR: tl.constexpr,
    CHUNK: tl.constexpr,
    NBP: tl.constexpr,
    SP: tl.constexpr,
    KP: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    n, first = count_drafts(cu_ptr, num_draft_ptr, b, K, PACKED, RAGGED)
    if n < 0:
        return  # rows_kernel wrote its result
    k = tl.arange(0, KP)
    rows = b * rows_per_request
    drafted = k < n
    token_base = (first - b) * stride_xk if FLAT else b * stride_xb
    d = tl.load(draft_tokens_ptr + token_base + k * stride_xk, mask=drafted, other=-1).to(tl.int64)
    p = tl.load(row_p_ptr + rows + k, mask=drafted, other=0.0)
    q = tl.load(row_q_ptr + rows + k, mask=drafted, other=1.0)
    flags = tl.load(row_flag_ptr + rows + k, mask=drafted, other=0)
    s = parameter(seed, b, SEED_TENSOR)
    p0 = parameter(position, b, POSITION_TENSOR)
    inverse_t, greedy, valid_t = read_temperature(temperature, b, T_TENSOR)

    # every program decides by itself: K numbers, read by all
    known = drafted & (d >= 0) & (d < num_v)
    limit = tl.min(tl.where(known, KP, k), axis=0)
    g = tl.minimum(tl.min(tl.where(known & (flags == 0), KP, k), axis=0), n)
    limit = tl.minimum(limit, n)
    word, word1, word2, word3 = words4(s, p0, k * 0, k + 1, ACCEPT)
    u = to_uniform(word)
    if BLOCK_RULE:
        w_k = block_weights(tl.where(drafted, p, 1.0), q, k)  # w after k + 1 drafts
        if DRAFT == "none":
            p_after = shifted_up(p, k, KP)
            mass = w_k * (1.0 - p_after)
        else:
            c = tl.arange(0, SP)
            inside = (k[:, None] + 1 < n) & (c[None, :] < num_chunks)
            parts = tl.load(
                mass_ptr + (rows + k[:, None] + 1) * num_chunks + c[None, :], mask=inside, other=0.0
            )
            mass = tl.sum(parts, axis=1)
        rest = mass + 1.0 - w_k
        h = tl.where(
            (mass == 0.0) & (rest == 0.0), 1.0, tl.div_rn(mass, tl.where(rest == 0.0, 1.0, rest))
        )
        h = tl.where(k + 1 == g, w_k, h)
        accepted = tl.max(tl.where((u < h) & (k + 1 <= g), k + 1, 0), axis=0)
        w = tl.where(accepted == 0, 1.0, tl.sum(tl.where(k + 1 == accepted, w_k, 0.0), axis=0))
    else:
        ratio = tl.where(
            q == 0.0, tl.where(p > 0, INF, 0.0), tl.div_rn(p, tl.where(q == 0.0, 1.0, q))
        )
        accepted = tl.minimum(tl.min(tl.where((u < ratio) & (k < g), KP, k), axis=0), g)
        w = 1.0

    row = rows + accepted
    rejected = (accepted < g) & (greedy == 0)
    x_row = (
        target_ptr + (first + accepted) * stride_tk
        if PACKED
        else target_ptr + b * stride_tb + accepted * stride_tk
    )
    y_row = draft_ptr + (
        (first - b + accepted) * stride_dk if FLAT else b * stride_db + accepted * stride_dk
    )
    min_keep = parameter(min_p, b, MIN_P_TENSOR).to(tl.float32) if HAS_MIN_P else 0.0
    tau = tl.load(row_tau_ptr + row) if HAS_TAU else -INF
    x_drafted = tl.sum(tl.where(k == accepted, d, 0), axis=0)
    m = 0.0
    total = 1.0
    y_max = 0.0
    y_sum = 1.0
    x, ids, block = load_chunk(x_row, stride_tv, chunk, num_v, CHUNK)
    if rejected:
        m = tl.load(row_max_ptr + row)
        total = tl.load(row_sum_ptr + row)
        y = x
        if DRAFT == "logits":
            y_max = tl.load(row_qmax_ptr + row)
            y_sum = tl.load(row_qsum_ptr + row)
        if DRAFT != "none":
            y, y_ids, y_block = load_chunk(y_row, stride_dv, chunk, num_draft_v, CHUNK)
        v = residual_weights(
            x,
            y,
            ids,
            w,
            m,
            inverse_t,
            total,
            tau,
            min_keep,
            y_max,
            y_sum,
            x_drafted,
            num_draft_v,
            DRAFT,
        )
        block_top = tl.zeros([CHUNK], tl.float32)
        block_total = tl.sum(v, axis=1)
    else:
        block_top, block_total = block_sums(x, inverse_t, greedy)
        if HAS_TAU:
            if greedy == 0:
                # the row's maximum is known: weights at once
                bonus = weight_of(
                    x, ids, tl.load(row_max_ptr + row), inverse_t, False, tau, min_keep
                )
                bonus_total = tl.sum(bonus, axis=1)
                block_total = tl.where(block_total == block_total, bonus_total, block_total)
                block_top = tl.where(block_top == INF, INF, 0.0)
    stat = b * num_blocks + block
    tl.store(block_max_ptr + stat, block_top, mask=block < num_blocks)
    tl.store(block_sum_ptr + stat, block_total, mask=block < num_blocks)

    if last_to_arrive(request_counter_ptr + b, num_chunks):
        top, weight, row_m, error = row_summary(
            block_max_ptr + b * num_blocks,
            block_sum_ptr + b * num_blocks,
            num_blocks,
            inverse_t,
            greedy,
            NBP,
        )
        use_p = rejected == 0
        if rejected:
            error = False
            if tl.sum(weight, axis=0) == 0.0:
                # rounding left no residual: p itself, read again
                use_p = True
                index = tl.arange(0, NBP)
                top = tl.where(index < num_blocks, m, -INF)
                weight, w_log_w = filtered_weights(
                    x_row, stride_tv, num_v, top, m, inverse_t, tau, min_keep, False, NBP
                )
        else:
            error = error | (valid_t == 0)
            m = row_m
            if HAS_TAU:
                m = tl.where(greedy, row_m, tl.load(row_max_ptr + row))
                error = error | ((tl.load(row_flag_ptr + row) & BAD_TARGET) != 0)
            elif HAS_MIN_P:
                if (error == 0) & (greedy == 0) & (min_keep > 0):
                    weight, w_log_w = filtered_weights(
                        x_row, stride_tv, num_v, top, m, inverse_t, tau, min_keep, False, NBP
                    )
        chosen = tl.minimum(
            pick_block(weight, greedy, s, p0, accepted, RESIDUAL, NBP), num_blocks - 1
        )
        x1, ids1 = load_block(x_row, stride_tv, chosen, num_v)
        v1 = weight_of(x1, ids1, m, inverse_t, greedy, tau, min_keep)
        if use_p == 0:
            y1 = x1
            if DRAFT != "none":
                y1, y_ids1 = load_block(y_row, stride_dv, chosen, num_draft_v)
            v1 = residual_weights(
                x1,
                y1,
                ids1,
                w,
                m,
                inverse_t,
                total,
                tau,
                min_keep,
                y_max,
                y_sum,
                x_drafted,
                num_draft_v,
                DRAFT,
            )
        token = pick_entry(v1, ids1, greedy, s, p0, accepted, RESIDUAL)
        token = tl.where(error, 0, tl.minimum(token, num_v - 1))
        at = tl.sum(tl.where(k == accepted, flags, 0), axis=0)
        bad_q = (accepted == g) & (accepted < limit) & ((at & BAD_DRAFT) != 0)
        write_result(
            tokens_ptr,
            num_accepted_ptr,
            error_ptr,
            stride_ob,
            d,
            b,
            accepted,
            token,
            error | bad_q,
            True,
            K,
            KP,
        )


@triton.jit
def shifted_up(value, k, KP: tl.constexpr):
    """value[k + 1], 0 behind the end."""
    here = tl.arange(0, KP)
    return tl.sum(tl.where(k[:, None] + 1 == here[None, :], value[None, :], 0.0), axis=1)
