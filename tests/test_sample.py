"""``sample`` and ``filter_logits``: filters, noise, edge cases."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec_kernels import GREEDY_TEMPERATURE, Stream, filter_logits, sample
from specdec_kernels import _law as law_module
from specdec_kernels.testing import BACKENDS, chi_square, reference_draw, reference_law

INF = float("inf")
NAN = float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VOCABULARIES = [1, 2, 31, 97, 511, 512, 513, 1023, 1025, 32000, 50257, 262147]
FILTERS = [
    {},
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 100},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"min_p": 0.05},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.6, "top_p": 0.95, "min_p": 0.3},
]
pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def log(probs):
    return torch.tensor(probs).log()


def probs_of(logits, backend="torch", **options):
    return sample(logits, return_probs=True, backend=backend, **options).probs


def reference_tokens(logits, seeds, position=0, step=0, stream=Stream.TARGET, **filters):
    rows = logits.double().numpy()
    return [
        reference_draw(reference_law(row, **filters), seed, position, step, stream)
        for row, seed in zip(rows, seeds, strict=True)
    ]


# ---- by hand ----


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        # the mass above is 0, .4, .7, .9
        ({"top_p": 0.71}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_p": 0.69}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.0}, [0, 1, 0, 0]),
        # a quarter of the maximum is .1
        ({"min_p": 0.24}, [0.1, 0.4, 0.2, 0.3]),
        ({"min_p": 0.26}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"min_p": 1.0}, [0, 1, 0, 0]),
        # of the three kept: .444, .333, .222; the mass above is 0, .444, .778
        ({"top_k": 3, "top_p": 0.77}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 3, "top_p": 0.79}, [0, 4 / 9, 2 / 9, 3 / 9]),
        # T = 1/2 squares: .01, .16, .04, .09 of .3
        ({"temperature": 0.5}, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        ({"temperature": 0.5, "top_p": 0.84}, [0, 16 / 29, 4 / 29, 9 / 29]),
        ({"temperature": 0.5, "top_p": 0.83}, [0, 16 / 25, 0, 9 / 25]),
        ({"temperature": 0.5, "min_p": 0.3}, [0, 16 / 25, 0, 9 / 25]),
        ({"temperature": 0.0}, [0, 1, 0, 0]),
    ],
)
def test_worked_example(backend, options, expected):
    probs = probs_of(log([[0.1, 0.4, 0.2, 0.3]]), backend, **options)
    expected = torch.tensor([expected], dtype=torch.float32)
    torch.testing.assert_close(probs, expected, rtol=1e-6, atol=0)


def test_top_p_stops_at_the_mass_it_asks_for(backend):
    """As in transformers: half is enough for top_p = 1/2."""
    logits = log([[0.25, 0.5, 0.25], [0.5, 0.5, 0.0]])
    assert probs_of(logits, backend, top_p=0.5).tolist() == [[0, 1, 0], [0.5, 0.5, 0]]
    support = probs_of(logits, backend, top_p=0.5) > 0
    assert torch.equal(support, transformers_support(logits, {"top_p": 0.5}))


# ---- the draw ----


@pytest.mark.parametrize("V", VOCABULARIES)
def test_equals_reference(backend, V):
    B = 32 if V < 5000 else 4
    logits = torch.randn(B, V) * 3
    seeds = torch.randint(-(2**63), 2**63 - 1, (B,))
    for filters in FILTERS if V < 5000 else FILTERS[:2]:
        got = sample(logits, seed=seeds, position=5, backend=backend, **filters)
        assert got.tokens.tolist() == reference_tokens(logits, seeds.tolist(), 5, **filters)
        assert not got.error.any()
        assert got.probs is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_reference_by_dtype_position_step_and_stream(backend, dtype):
    logits = torch.randn(16, 700).to(dtype)
    for stream, position, step in ((0, 9, 0), (1, 9, 3), (3, 2**31, 1), (1, 12, 0)):
        key = {"position": position, "step": step, "stream": Stream(stream)}
        got = sample(logits, seed=77, backend=backend, **key).tokens
        assert got.tolist() == reference_tokens(logits, [77] * 16, **key)
        rows = {"position": torch.full((16,), position), "step": torch.full((16,), step)}
        again = sample(logits, seed=77, stream=Stream(stream), backend=backend, **rows).tokens
        assert torch.equal(got, again)


@pytest.mark.parametrize("V", [3, 97, 1536, 3000])
@pytest.mark.parametrize("filters", [{}, {"temperature": 100.0}, {"top_p": 0.9, "top_k": 400}])
def test_law(backend, V, filters):
    num = 20_000
    logits = torch.randn(V) * 1.5
    counts = torch.zeros(V)
    for first in range(0, num, 4000):
        seeds = torch.arange(first, first + 4000)
        tokens = sample(logits.expand(4000, V), seed=seeds, position=1, backend=backend, **filters)
        counts += torch.bincount(tokens.tokens, minlength=V)
    assert chi_square(counts, reference_law(logits, **filters)) > 1e-4


def test_law_over_positions_of_one_seed(backend):
    """One request's own sequence of draws: pairs of neighbours are independent."""
    law = [0.5, 0.3, 0.2]
    num = 30_000
    tokens = sample(log([law]).expand(num, 3), seed=3, position=torch.arange(num), backend=backend)
    pairs = tokens.tokens.view(-1, 2)
    counts = torch.bincount(pairs[:, 0] * 3 + pairs[:, 1], minlength=9)
    assert chi_square(counts, np.outer(law, law)) > 1e-4


def test_bf16_law_is_that_of_the_rounded_logits(backend):
    """A9 (i): chi-square against the exact law of the bf16 values."""
    V, num = 1024, 24_000
    logits = (torch.randn(V) * 4).bfloat16()
    counts = torch.zeros(V)
    for first in range(0, num, 8000):
        seeds = torch.arange(first, first + 8000)
        tokens = sample(logits.expand(8000, V), seed=seeds, position=3, backend=backend).tokens
        counts += torch.bincount(tokens, minlength=V)
    bins = np.random.default_rng(0).permutation(V) % 32
    law = np.bincount(bins, weights=reference_law(logits.float()), minlength=32)
    assert chi_square(np.bincount(bins, weights=counts, minlength=32), law) > 1e-4


def test_tail_is_reached(backend):
    """A9 (ii): many entries so small that 24-bit noise cannot draw them."""
    num, rows = 18_000, 3_000
    logits = torch.full((1, 262_145), -19.5)
    logits[0, 0] = 0
    mass = 262_144 * np.exp(-19.5)
    weights = law_module.make_law(logits, 1.0, 0, 1.0, 0.0).weights.expand(rows, -1)
    seeds = torch.arange(num).split(rows)
    zero = torch.zeros(rows, dtype=torch.int64)
    tokens = torch.cat([law_module.draw(weights, s, zero, 0, 0) for s in seeds])
    hits = tokens[tokens > 0]
    expected = num * mass / (1 + mass)
    assert abs(len(hits) - expected) < 5 * expected**0.5
    # spread over the vocabulary, not stuck in one block
    assert (hits // 512).unique().numel() > len(hits) // 2


# ---- greedy ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize(
    "ids", [(3, 7), (3, 7, 400), (510, 511), (511, 512), (3, 512, 1999), (1998, 1999), (1999,)]
)
def test_argmax_ties_go_to_the_lowest_id(backend, dtype, batch, ids):
    """B2: in one block, in different blocks, at the end of the vocabulary."""
    logits = torch.randn(batch, 2000).clamp(max=3).to(dtype)
    logits[:, list(ids)] = 4.5
    for temperature in (0, 0.0, GREEDY_TEMPERATURE / 2, torch.zeros(batch)):
        got = sample(logits, temperature=temperature, backend=backend)
        assert got.tokens.tolist() == [ids[0]] * batch


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-6, 1e-4])
@pytest.mark.parametrize("dtype, top", [(torch.float32, 1e4), (torch.float16, 6e4)])
def test_temperature_near_zero_is_greedy(backend, temperature, dtype, top):
    """G6: large logits, small temperatures, no NaN."""
    logits = torch.linspace(-top, top, 64).to(dtype)
    assert logits.unique().numel() == 64
    logits = torch.stack([logits[torch.randperm(64)] for _ in range(50)])
    for value in (temperature, torch.full((50,), temperature)):
        got = sample(logits, temperature=value, seed=4, return_probs=True, backend=backend)
        assert torch.equal(got.tokens, logits.argmax(-1))
        assert not got.error.any()
        assert got.probs.max(-1).values.tolist() == [1.0] * 50


def test_min_p_one_is_greedy(backend):
    """A8 (i)."""
    logits = torch.randn(200, 333)
    got = sample(logits, min_p=1.0, seed=torch.arange(200), backend=backend).tokens
    assert torch.equal(got, logits.argmax(-1))


# ---- filters ----


def transformers_support(logits, options):
    """Support under transformers' own processors, in float64 so that its sums do not round."""
    processors = LogitsProcessorList()
    if options.get("temperature", 1.0) != 1.0:
        processors.append(TemperatureLogitsWarper(options["temperature"]))
    if options.get("top_k"):
        processors.append(TopKLogitsWarper(options["top_k"]))
    if options.get("top_p", 1.0) < 1:
        processors.append(TopPLogitsWarper(options["top_p"]))
    if options.get("min_p"):
        processors.append(MinPLogitsWarper(options["min_p"]))
    logits = logits.double()
    support = processors(None, logits) > -INF
    # its top-p cuts a run of equal values by rank; ours keeps the run
    return logits >= logits.masked_fill(~support, INF).amin(-1, keepdim=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("V, rows", [(5, 2000), (97, 2000), (5000, 200), (49152, 24)])
def test_support_is_that_of_transformers(backend, V, rows, dtype):
    scale = torch.rand(rows, 1) * 6 + 0.5
    logits = (torch.randn(rows, V) * scale).to(dtype)
    for options in FILTERS[1:]:
        want = transformers_support(logits, options)
        probs = probs_of(logits, backend, **options)
        # what float32 cannot hold has left the support of both
        want &= probs_of(logits, backend, temperature=options.get("temperature", 1.0)) > 0
        differ = (want != (probs > 0)).any(-1)
        # a cut may fall within float32's rounding of the sum
        assert differ.sum() <= rows // 200, options
        for row in differ.nonzero().flatten().tolist():
            p = reference_law(logits[row].double(), **{**options, "top_p": 1.0, "min_p": 0.0})
            edge = np.sort(p)[::-1].cumsum() - options["top_p"]
            assert np.abs(edge).min() < 1e-6, options


@pytest.mark.parametrize("V", [7, 200, 5000, 40_003])
def test_law_of_flat_and_peaked_rows(backend, V):
    """The CPU path looks at 64 candidates first: laws that need more, and many more."""
    rows = [
        torch.zeros(V),
        torch.randn(V) * 1e-3,
        torch.randn(V),
        torch.randn(V).sort().values,  # the largest at the very end
        torch.randn(V) * 30,
        -torch.arange(V) * 1e-4,
        -torch.arange(V) * 0.01,
        torch.where(torch.arange(V) == V - 1, 20.0, 0.0),
        torch.where(torch.arange(V) % 7 == 0, 0.0, -INF),
        torch.where(torch.arange(V) == V // 2, 0.0, -INF),
    ]
    logits = torch.stack(rows)
    for options in (
        {"top_p": 0.5},
        {"top_p": 0.99999},
        {"top_k": 65, "top_p": 0.9},
        {"top_k": 600, "top_p": 0.9},
        {"top_k": 3000},
        {"top_p": 0.9, "min_p": 0.9999},
    ):
        probs = probs_of(logits, backend, **options)
        for row, got in zip(rows, probs, strict=True):
            want = reference_law(row, **options)
            # a cut within float32's rounding of the sum may move by one entry
            size = int((want > 1e-35).sum())
            moved = abs(int((got > 1e-35).sum()) - size)
            assert moved <= 1
            assert np.abs(got.double().numpy() - want).sum() < 1e-5 + moved * 2.1 / size
        alone = torch.cat([probs_of(row[None], backend, **options) for row in rows])
        assert torch.equal(alone, probs)


def test_ties_at_a_boundary_are_kept(backend):
    logits = torch.full((1, 600), -8.0)
    logits[0, [5, 100, 511, 512, 599]] = torch.tensor([3.0, 2.0, 2.0, 2.0, 1.0])
    for options in ({"top_k": 2}, {"top_k": 3}, {"top_k": 4}, {"top_p": 0.55}, {"min_p": 0.36}):
        kept = probs_of(logits, backend, **options)[0].nonzero().flatten()
        assert kept.tolist() == [5, 100, 511, 512], options
    # every entry is tied with the last one kept
    flat = torch.zeros(2, 5000)
    for options in ({"top_k": 1}, {"top_k": 70}, {"top_p": 0.0}, {"top_p": 0.5}, {"min_p": 1.0}):
        assert bool((probs_of(flat, backend, **options) > 0).all()), options


@pytest.mark.parametrize("V", [5, 64, 65, 500, 5000])
@pytest.mark.parametrize("excess", [0, 1, 10**6])
def test_top_k_of_the_whole_vocabulary_is_off(backend, V, excess):
    logits = torch.randn(3, V)
    want = probs_of(logits, backend)
    tensor = torch.full((3,), V + excess)
    for top_k in (V + excess, tensor, -1, torch.full((3,), -1)):
        assert torch.equal(probs_of(logits, backend, top_k=top_k), want)
    for options in ({"top_p": 0.8}, {"min_p": 0.2}):
        assert torch.equal(
            probs_of(logits, backend, top_k=V + excess, **options),
            probs_of(logits, backend, **options),
        )


@pytest.mark.parametrize("V", [97, 3000])
def test_rows_with_their_own_parameters(backend, V):
    """Tensors equal numbers, in any mix of rows, 0 and off included."""
    rows = [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (0.0, 0, 1.0, 0.0),
        (0.0, 50, 0.5, 0.5),
        (1e-6, 0, 1.0, 0.0),
        (1.3, 20, 1.0, 0.0),
        (0.9, -1, 0.9, 0.0),
        (1.0, 0, 1.0, 0.1),
        (100.0, 10**9, 0.3, 0.0),
        (0.7, 1, 0.9, 1.0),
        (2.0, 90, 0.95, 0.001),
    ]
    logits = torch.randn(len(rows), V) * 2
    names = ("temperature", "top_k", "top_p", "min_p")
    columns = {n: torch.tensor(c) for n, c in zip(names, zip(*rows, strict=True), strict=True)}
    seed, position = torch.arange(len(rows)), torch.arange(len(rows)) + 40
    whole = sample(
        logits, seed=seed, position=position, return_probs=True, backend=backend, **columns
    )
    filtered = filter_logits(logits, **columns)
    for i, row in enumerate(rows):
        options = dict(zip(names, row, strict=True))
        key = {"seed": i, "position": i + 40}
        alone = sample(logits[i : i + 1], **key, return_probs=True, backend=backend, **options)
        assert torch.equal(alone.probs[0], whole.probs[i])
        assert alone.tokens[0] == whole.tokens[i]
        assert torch.equal(filter_logits(logits[i : i + 1], **options)[0], filtered[i])


def test_numbers_equal_tensors_at_a_boundary(backend):
    """0.9 as a number and as float32 cut at the same place."""
    tenths = torch.tensor([[4, 3, 2, 1], [9, 1, 0, 0], [5, 3, 1, 1], [6, 2, 1, 1], [7, 2, 1, 0.0]])
    logits = (tenths / 10).log()
    for value in (0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9):
        for name in ("top_p", "min_p"):
            number = probs_of(logits, backend, **{name: value})
            assert torch.equal(number, probs_of(logits, backend, **{name: torch.full((5,), value)}))


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_filter_logits_agrees(backend, options):
    logits = torch.randn(20, 5000) * 3
    logits[:, 17] = -INF
    filtered = filter_logits(logits, **options)
    torch.testing.assert_close(filtered.softmax(-1), probs_of(logits, backend, **options))
    kept = filtered > -INF
    scaled = (logits / options.get("temperature", 1.0))[kept]
    torch.testing.assert_close(filtered[kept], scaled)


@pytest.mark.parametrize("temperature", [0, 1e-6, "tensor"])
def test_filter_logits_of_a_greedy_row(backend, temperature):
    """The one logit left is finite, also where it is negative or zero."""
    logits = torch.tensor([[-3.0, -1.0, -2.0], [0.0, -1.0, -1.0], [5.0, 7.0, 7.0]])
    if temperature == "tensor":
        temperature = torch.zeros(3)
    filtered = filter_logits(logits, temperature=temperature)
    assert filtered.softmax(-1).tolist() == [[0, 1, 0], [1, 0, 0], [0, 1, 0]]


def test_filter_logits_leaves_its_argument_alone(backend):
    for dtype in DTYPES:
        logits = torch.randn(3, 50).to(dtype)
        before = logits.clone()
        for options in FILTERS:
            filter_logits(logits, **options)
            sample(logits, backend=backend, **options)
        assert torch.equal(logits, before)
        assert filter_logits(logits).dtype == torch.float32


# ---- edges ----


def test_empty_batch_and_tiny_vocabulary(backend):
    for options in ({}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 0}):
        empty = sample(torch.zeros(0, 9), return_probs=True, backend=backend, **options)
        assert empty.tokens.shape == (0,) and empty.probs.shape == (0, 9)
        single = sample(torch.zeros(4, 1), return_probs=True, backend=backend, **options)
        assert single.tokens.tolist() == [0] * 4
        assert single.probs.tolist() == [[1.0]] * 4
    assert filter_logits(torch.zeros(0, 9), top_p=0.5).shape == (0, 9)


@pytest.mark.parametrize("options", [{}, *FILTERS[4:], {"temperature": 0}], ids=str)
def test_rows_that_cannot_be_read(backend, options):
    """NaN and all -inf are flagged, and leave the rows beside them bit-identical."""
    logits = torch.randn(6, 900)
    bad = logits.clone()
    bad[1, 899] = NAN
    bad[2] = -INF
    bad[4] = NAN
    seeds = torch.arange(6)
    want = sample(logits, seed=seeds, return_probs=True, backend=backend, **options)
    got = sample(bad, seed=seeds, return_probs=True, backend=backend, **options)
    assert got.error.tolist() == [False, True, True, False, True, False]
    assert got.tokens[got.error].tolist() == [0, 0, 0]
    for row in (0, 3, 5):
        assert got.tokens[row] == want.tokens[row]
        assert torch.equal(got.probs[row], want.probs[row])


def test_infinite_logits(backend):
    """-inf forbids an entry. +inf is no law, yet has an argmax."""
    logits = torch.randn(4, 700)
    logits[0, 600] = INF
    logits[1, [3, 699]] = INF
    logits[2, :] = -INF
    logits[2, 699] = -4.0  # one finite logit
    logits[3, ::2] = -INF
    for options in ({}, {"top_k": 3}, {"top_p": 0.9}, {"temperature": 0.5}):
        got = sample(logits, seed=8, return_probs=True, backend=backend, **options)
        assert got.error.tolist() == [True, True, False, False]
        assert got.tokens[:2].tolist() == [0, 0]
        assert got.tokens[2] == 699 and got.probs[2, 699] == 1
        assert got.tokens[3] % 2 == 1 and not got.probs[3, ::2].any()
    for temperature in (0, torch.zeros(4)):
        greedy = sample(logits, temperature=temperature, backend=backend)
        assert greedy.tokens[:3].tolist() == [600, 3, 699]
        assert not greedy.error.any()


@pytest.mark.parametrize("value", [-1.0, NAN, INF])
def test_temperature_tensors_out_of_range_set_the_error(backend, value):
    logits = torch.randn(3, 40)
    logits[1, 5] = -INF
    want = sample(logits, seed=1, temperature=torch.tensor([1.0, 1.0, 0.5]), backend=backend)
    got = sample(logits, seed=1, temperature=torch.tensor([1.0, value, 0.5]), backend=backend)
    assert got.error.tolist() == [False, True, False]
    assert got.tokens[[0, 2]].tolist() == want.tokens[[0, 2]].tolist()
    assert got.tokens[1] == 0


def test_views(backend):
    logits = torch.randn(6, 1300)
    want = sample(logits, seed=2, top_p=0.9, backend=backend).tokens
    wide = torch.randn(6, 2700)
    wide[:, 7:2607:2] = logits
    holder = torch.randn(9, 6, 1300)
    holder[4] = logits
    views = [
        logits.t().contiguous().t(),
        wide[:, 7:2607:2],
        holder[4],
        logits.repeat_interleave(2, 0)[::2],
        logits.flip(0).flip(0),
    ]
    for view in views:
        assert torch.equal(sample(view, seed=2, top_p=0.9, backend=backend).tokens, want)
    row = logits[:1].expand(5, 1300)
    assert sample(row, seed=2, backend=backend).tokens.unique().numel() == 1


def test_more_than_one_block_boundary(backend):
    """Point masses at ids around each edge of a block are drawn exactly."""
    ids = [0, 1, 510, 511, 512, 513, 1023, 1024, 1025, 1535, 1536, 1999]
    logits = torch.full((len(ids), 2000), -INF)
    logits[range(len(ids)), ids] = -3.0
    for seed in range(5):
        assert sample(logits, seed=seed, backend=backend).tokens.tolist() == ids


# ---- seeds ----


@pytest.fixture
def two_threads():
    """torch splits the sum of a lone long row over its threads, and rounds it differently."""
    num = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(num)


def test_a_request_does_not_depend_on_its_batch(backend, two_threads):
    """H1: alone, first, last, whatever the neighbours and their seeds."""
    for V in (50, 3000, 60_000):
        logits = torch.randn(5, V)
        seeds = torch.tensor([11, -5, 2**62, 0, 4])
        options = {"position": 9, "top_p": 0.95, "return_probs": True, "backend": backend}
        whole = sample(logits, seed=seeds, **options)
        order = torch.tensor([4, 2, 0, 3, 1])
        moved = sample(logits[order], seed=seeds[order], **options)
        assert torch.equal(moved.tokens, whole.tokens[order])
        for i in range(5):
            alone = sample(logits[i : i + 1], seed=seeds[i].item(), **options)
            assert alone.tokens[0] == whole.tokens[i]
            assert torch.equal(alone.probs[0], whole.probs[i])
        changed = seeds.clone()
        changed[1:] += 1
        assert sample(logits, seed=changed, **options).tokens[0] == whole.tokens[0]


SCRIPT = """
import torch
from specdec_kernels import sample
logits = torch.arange(2000.0).sin()[None] * 3
print([sample(logits, seed=5, position=i, top_p=0.9).tokens.item() for i in range(8)])
"""


def test_a_fresh_process_draws_the_same(backend):
    logits = torch.arange(2000.0).sin()[None] * 3
    here = [sample(logits, seed=5, position=i, top_p=0.9).tokens.item() for i in range(8)]
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(here)


def test_global_generator_is_untouched(backend):
    state = torch.get_rng_state()
    sample(torch.randn(2, 40, generator=torch.Generator()), backend=backend)
    assert torch.equal(torch.get_rng_state(), state)


# ---- errors ----


@pytest.mark.parametrize(
    "change, message",
    [
        ({"logits": torch.zeros(3)}, r"logits: expected 2 dimensions, got shape \[3\]"),
        ({"logits": torch.zeros(2, 3, 4)}, r"logits: expected 2 dimensions"),
        ({"logits": torch.zeros(2, 3).long()}, "logits: expected a float dtype, got torch.int64"),
        ({"logits": torch.zeros(2, 0)}, r"logits: the vocabulary is empty, got shape \[2, 0\]"),
        ({"temperature": -0.1}, "temperature: expected a finite number >= 0, got -0.1"),
        ({"temperature": NAN}, "temperature: expected a finite number >= 0, got nan"),
        ({"temperature": INF}, "temperature: expected a finite number >= 0, got inf"),
        ({"top_k": -2}, r"top_k: expected an integer >= 0 \(0 or -1: off\), got -2"),
        ({"top_k": 1.5}, r"top_k: expected an integer .*, got 1.5"),
        ({"top_k": NAN}, r"top_k: expected an integer .*, got nan"),
        ({"top_k": INF}, r"top_k: expected an integer .*, got inf"),
        ({"top_p": 1.1}, r"top_p: expected a number in \[0, 1\], got 1.1"),
        ({"top_p": NAN}, r"top_p: expected a number in \[0, 1\], got nan"),
        ({"min_p": -0.1}, r"min_p: expected a number in \[0, 1\], got -0.1"),
        ({"min_p": 2}, r"min_p: expected a number in \[0, 1\], got 2"),
        ({"temperature": torch.ones(3)}, r"temperature: expected shape \[2\], got \[3\]"),
        ({"top_k": torch.ones(2, 1).long()}, r"top_k: expected shape \[2\], got \[2, 1\]"),
        ({"top_p": torch.ones(1)}, r"top_p: expected shape \[2\], got \[1\]"),
        ({"min_p": torch.ones(1)}, r"min_p: expected shape \[2\], got \[1\]"),
    ],
)
def test_wrong_arguments(backend, change, message):
    arguments = {"logits": torch.zeros(2, 3), **change}
    for op in (lambda logits, **kw: sample(logits, backend=backend, **kw), filter_logits):
        with pytest.raises(ValueError, match=message):
            op(**arguments)


@pytest.mark.parametrize("name", ["seed", "position", "step"])
def test_wrong_key_shape(backend, name):
    with pytest.raises(ValueError, match=rf"^{name}: expected shape \[2\], got \[3\]"):
        sample(torch.zeros(2, 3), backend=backend, **{name: torch.zeros(3).long()})


def test_wrong_backend(backend):
    with pytest.raises(ValueError, match="backend: expected one of .*'torch'.*, got 'cuda'"):
        sample(torch.zeros(2, 3), backend="cuda")
    missing = {"triton", "torch"} - set(BACKENDS)
    for name in missing:
        with pytest.raises(ValueError, match=f"backend: sample has .*, not '{name}'"):
            sample(torch.zeros(2, 3), backend=name)


def test_scalar_tensors_are_numbers(backend):
    logits = torch.randn(3, 90)
    got = sample(logits, seed=torch.tensor(5), top_p=torch.tensor(0.9), backend=backend).tokens
    assert torch.equal(got, sample(logits, seed=5, top_p=0.9, backend=backend).tokens)
