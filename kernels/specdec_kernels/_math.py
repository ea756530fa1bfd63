"""Device functions that several kernels share: parameters, noise, blocks of a row, draws.

A row of the vocabulary is cut into blocks of ``BLOCK`` entries. A block is kept as the pair
(maximum m_b, sum s_b of exp((x - m_b) / T)): with the row's maximum m its log-weight is
(m_b - m) / T + log s_b. Rows with temperature 0 have weight by value: the argmax wins, no noise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._law import BLOCK as _BLOCK
from ._law import GREEDY_TEMPERATURE as _GREEDY_TEMPERATURE

BLOCK = tl.constexpr(_BLOCK)
GREEDY_TEMPERATURE = tl.constexpr(_GREEDY_TEMPERATURE)
INF = tl.constexpr(float("inf"))
NAN = tl.constexpr(float("nan"))


@triton.jit
def parameter(value, b, IS_TENSOR: tl.constexpr):
    """A number, or request b's entry of a tensor."""
    if IS_TENSOR:
        return tl.load(value + b)
    else:
        return tl.to_tensor(value)


@triton.jit
def read_temperature(temperature, b, IS_TENSOR: tl.constexpr):
    """-> 1/T, whether the row is greedy, whether T is no temperature."""
    T = parameter(temperature, b, IS_TENSOR).to(tl.float32)
    valid = T >= 0
    greedy = (T < GREEDY_TEMPERATURE) | (T != T)
    return tl.div_rn(1.0, tl.where(greedy, 1.0, T)), greedy, valid


@triton.jit
def words4(seed, position, index, step, STREAM: tl.constexpr):
    """Philox4x32-10, counter (position, index, step, stream); tiles, or numbers, of integers."""
    zero = (index + step).to(tl.uint32) * 0
    return tl.philox(
        seed,
        position.to(tl.uint32) + zero,
        index.to(tl.uint32) + zero,
        step.to(tl.uint32) + zero,
        zero + STREAM,
    )


@triton.jit
def to_uniform(word):
    return tl.minimum(
        (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375
    )


@triton.jit
def to_gumbel(word):
    """-log(-log1p(-u)); log1p as log(w) u / (1 - w), w = 1 - u, exact to a few ulp (Kahan)."""
    u = to_uniform(word)
    w = 1.0 - u
    gap = 1.0 - w
    exponential = tl.where(gap == 0.0, u, -tl.log(w) * (u / tl.where(gap == 0.0, 1.0, gap)))
    return -tl.log(exponential)


@triton.jit
def gumbel(seed, position, first, step, STREAM: tl.constexpr, COUNT: tl.constexpr):
    """[COUNT] Gumbels of the counters first, first + 1, ..., four to each."""
    index = first + tl.arange(0, COUNT // 4)
    r0, r1, r2, r3 = words4(seed, position, index, step + index * 0, STREAM)
    words = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), [COUNT])
    return to_gumbel(words)


@triton.jit
def first_argmax(score, index):
    """The lowest index of the largest score; nan never wins. -> index"""
    score = tl.where(score == score, score, -INF)
    best = tl.max(score, axis=0)
    return tl.min(tl.where(score == best, index, 2147483647), axis=0)


@triton.jit
def last_to_arrive(counter_ptr, num):
    """Whether all ``num`` programs that share the counter have now been here.

    What they stored before is visible to the one that gets True: the barrier orders the block's
    stores before its one atomic, which releases them to the GPU and acquires the others'. The
    counter is back at 0 for the next launch.
    """
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    is_last = arrived == num - 1
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last


@triton.jit
def weight_of(x, ids, m, inverse_t, greedy, tau, min_keep):
    """Unnormalised probability of logits ``x`` in a row with maximum m: what the filters keep has
    x >= tau and a weight of at least min_keep. A greedy row has 1 at its maxima."""
    w = tl.exp((x - m) * inverse_t)
    w = tl.where((x >= tau) & (w >= min_keep), w, 0.0)
    return tl.where(greedy, (x == m).to(tl.float32), w)


@triton.jit
def load_block(x_ptr, stride_v, block, num_v):
    """One block of a row as float32, -inf behind the end, and its ids."""
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + ids.to(tl.int64) * stride_v, mask=ids < num_v, other=-INF)
    return x.to(tl.float32), ids


@triton.jit
def load_chunk(x_ptr, stride_v, chunk, num_v, CHUNK: tl.constexpr):
    """[CHUNK, BLOCK] entries of a row as float32, -inf behind the end, and their ids."""
    block = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + ids.to(tl.int64) * stride_v, mask=ids < num_v, other=-INF)
    return x.to(tl.float32), ids, block


@triton.jit
def block_sums(x, inverse_t, greedy):
    """Maximum of each row of ``x`` [N, BLOCK], and the sum of exp((x - max) / T); a nan anywhere
    makes the sum nan."""
    top = tl.max(x, axis=1)
    is_nan = tl.max((x != x).to(tl.int32), axis=1) > 0
    base = tl.where(top == -INF, 0.0, top)
    total = tl.sum(tl.exp((x - base[:, None]) * inverse_t), axis=1)
    # an infinite maximum is fine for an argmax
    total = tl.where(greedy, 1.0, total)
    return top, tl.where(is_nan, NAN, total)


@triton.jit
def row_summary(block_max_ptr, block_sum_ptr, num_blocks, inverse_t, greedy, NBP: tl.constexpr):
    """From a row's blocks: maxima, weights relative to the row's maximum, the maximum, error."""
    index = tl.arange(0, NBP)
    inside = index < num_blocks
    top = tl.load(block_max_ptr + index, mask=inside, other=-INF, cache_modifier=".cg")
    total = tl.load(block_sum_ptr + index, mask=inside, other=0.0, cache_modifier=".cg")
    m = tl.max(tl.where(top == top, top, -INF), axis=0)
    is_nan = tl.max((total != total).to(tl.int32), axis=0) > 0
    error = is_nan | (m == -INF) | ((m == INF) & (greedy == 0))
    weight = tl.where(inside, tl.exp((top - m) * inverse_t) * total, 0.0)
    weight = tl.where(greedy, (inside & (top == m)).to(tl.float32), weight)
    return top, weight, m, error


@triton.jit
def filtered_weights(
    x_ptr,
    stride_v,
    num_v,
    top,
    m,
    inverse_t,
    tau,
    min_keep,
    ENTROPY: tl.constexpr,
    NBP: tl.constexpr,
):
    """Weight of each block, counting only what the filters keep; reads the blocks that have some.

    Also sum of w log w over what is kept (for the entropy; 0 unless asked for).
    """
    index = tl.arange(0, NBP)
    todo = (top >= tau) & (tl.exp((top - m) * inverse_t) >= min_keep)
    weight = tl.zeros([NBP], tl.float32)
    w_log_w = 0.0
    block = tl.min(tl.where(todo, index, NBP), axis=0)
    while block < NBP:
        x, ids = load_block(x_ptr, stride_v, block, num_v)
        w = weight_of(x, ids, m, inverse_t, False, tau, min_keep)
        weight = tl.where(index == block, tl.sum(w, axis=0), weight)
        if ENTROPY:
            w_log_w += tl.sum(tl.where(w > 0, w * (x - m) * inverse_t, 0.0), axis=0)
        todo = todo & (index != block)
        block = tl.min(tl.where(todo, index, NBP), axis=0)
    return weight, w_log_w


@triton.jit
def pick_block(weight, greedy, seed, position, step, STREAM: tl.constexpr, NBP: tl.constexpr):
    """First level of a draw: a block by its weight [NBP]."""
    noise = gumbel(seed, position, BLOCK // 4, step, STREAM, NBP)
    return first_argmax(tl.log(weight) + tl.where(greedy, 0.0, noise), tl.arange(0, NBP))


@triton.jit
def pick_entry(weight, ids, greedy, seed, position, step, STREAM: tl.constexpr):
    """Second level: an entry of the block, by its weight [BLOCK]."""
    noise = gumbel(seed, position, 0, step, STREAM, BLOCK)
    return first_argmax(tl.log(weight) + tl.where(greedy, 0.0, noise), ids)
