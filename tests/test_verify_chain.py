"""``verify_chain``: the contract, token by token. Its laws are in test_verify_laws.py."""

import importlib
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_kernels import Stream, resolve_method, sample, verify_chain
from specdec_kernels.testing import BACKENDS, METHODS, reference_chain

INF = float("inf")
NAN = float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BY_RATIO = ["token", "block"]
FILTERS = [
    {},
    {"temperature": 0.6},
    {"temperature": 0.0},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
]
backends = pytest.mark.parametrize("backend", BACKENDS)
methods = pytest.mark.parametrize("method", METHODS)


def make_inputs(B, K, V, dtype=torch.float32, noise=0.5):
    """Target logits, draft logits close to them, and drafts drawn from those."""
    target = torch.randn(B, K + 1, V) * 2
    draft = target[:, :K] + torch.randn(B, K, V) * noise
    target, draft = target.to(dtype), draft.to(dtype)
    rows = draft.float().softmax(-1).reshape(-1, V)
    tokens = rows.multinomial(1).view(B, K) if B * K else torch.zeros(B, K).long()
    return target, tokens, draft


def with_q(method, draft):
    return {"draft_logits": draft} if method in BY_RATIO else {}


def keys(B):
    return torch.randint(-(2**63), 2**63 - 1, (B,)), torch.randint(0, 2**31, (B,))


def assert_equal(got, want, rows=slice(None)):
    for name, a, b in zip(got._fields, got, want, strict=True):
        assert torch.equal(a[rows], b[rows]), name


def assert_reference(got, target, tokens, q, method, seeds, positions, sampling=None, counts=None):
    """Every request of ``got`` is what the NumPy reference makes of it."""
    B, W, _ = target.shape
    q = None if q is None else q.double().numpy()
    for b in range(B):
        want, kept, error = reference_chain(
            target[b].double().numpy(),
            tokens[b].tolist(),
            None if q is None else q[b],
            method=method,
            seed=int(seeds[b]),
            position=int(positions[b]),
            sampling=sampling,
            num_drafts=None if counts is None else int(counts[b]),
        )
        assert got.tokens[b].tolist() == want + [-1] * (W - len(want)), b
        assert got.num_accepted[b] == kept
        assert got.error[b] == error


def check_structure(got, tokens, V, counts):
    """Kept drafts, one token in [0, V), then -1; never more kept than drafted."""
    B, K = tokens.shape
    assert got.tokens.shape == (B, K + 1) and got.tokens.dtype == torch.int64
    assert got.num_accepted.shape == (B,) and got.num_accepted.dtype == torch.int64
    assert got.error.shape == (B,) and got.error.dtype == torch.bool
    for b in range(B):
        kept = int(got.num_accepted[b])
        row, drafted = got.tokens[b].tolist(), tokens[b].tolist()
        usable = 0
        while usable < min(K, counts[b]) and 0 <= drafted[usable] < V:
            usable += 1
        assert 0 <= kept <= usable
        assert row[:kept] == drafted[:kept]
        assert 0 <= row[kept] < V
        assert row[kept + 1 :] == [-1] * (K - kept)


# ---- by hand ----


@backends
def test_worked_example(backend):
    """One-hot laws: the target says 1, 2, 0, 2; drafts agree on the first two."""
    target = torch.full((1, 4, 3), -INF)
    target[0, range(4), [1, 2, 0, 2]] = 0.5
    tokens = torch.tensor([[1, 2, 1]])
    q = torch.full((1, 3, 3), 1 / 3)
    for method in METHODS:
        probs = q if method in BY_RATIO else None
        got = verify_chain(target, tokens, draft_probs=probs, method=method, backend=backend)
        assert got.tokens.tolist() == [[1, 2, 0, -1]]
        assert got.num_accepted.tolist() == [2]
        assert got.error.tolist() == [False]


@backends
def test_worked_ratios(backend, monkeypatch):
    """By hand: p/q = .6/.3, .2/.4, .5/.25 with u = .9, .4, .6, and q = .4 > p = .2 refused."""
    target = torch.tensor([[[0.6, 0.4], [0.2, 0.8], [0.5, 0.5], [0.5, 0.5]]]).log()
    probs = torch.tensor([[[0.3, 0.7], [0.4, 0.6], [0.25, 0.75]]])
    tokens = torch.zeros(1, 3, dtype=torch.int64)

    def kept(method, *uniforms):
        inject_uniforms(monkeypatch, torch.tensor([uniforms]))
        out = verify_chain(target, tokens, draft_probs=probs, method=method, backend=backend)
        return out.num_accepted.item()

    assert kept("token", 0.9, 0.4, 0.6) == 3
    assert kept("token", 0.9, 0.6, 0.6) == 1
    # w = 1, 1/2, 1; Z_1 = .2 = 1 - q.p, h_1 = Z/(Z+0) = 1; Z_2 = (.5*.5-.25)+ + (.5*.5-.75)+ = 0
    assert kept("block", 0.999, 0.999, 0.999) == 3
    assert kept("block", 0.999, 0.0, 1.0) == 1
    assert kept("block", 1.0, 0.0, 1.0) == 0


def inject_uniforms(monkeypatch, uniforms):
    """Replace the uniforms of the acceptance tests (torch backend)."""
    module = importlib.import_module("specdec_kernels.verify_chain")

    def to_uniform(words):
        assert words.shape == uniforms.shape
        return uniforms

    monkeypatch.setattr(module, "to_uniform", to_uniform)


# ---- against the reference ----


@backends
@methods
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_equals_reference(backend, method, dtype, filters):
    B, K, V = 40, 4, 53
    target, tokens, draft = make_inputs(B, K, V, dtype)
    seeds, positions = keys(B)
    got = verify_chain(
        target,
        tokens,
        **with_q(method, draft),
        seed=seeds,
        position=positions,
        method=method,
        backend=backend,
        **filters,
    )
    q = draft.double().softmax(-1) if method in BY_RATIO else None
    assert_reference(got, target, tokens, q, method, seeds, positions, filters)


@backends
@methods
@pytest.mark.parametrize("B", [1, 3, 17])
@pytest.mark.parametrize("K", [0, 1, 3, 5, 7])
def test_equals_reference_on_odd_sizes(backend, method, B, K):
    """G5: K and B that are no powers of two, V around the edges of a block."""
    for V in (1, 2, 31, 97, 511, 513, 1025):
        if V > 500 and B == 17 and K not in (1, 7):
            continue
        target, tokens, draft = make_inputs(B, K, V)
        seeds, positions = keys(B)
        got = verify_chain(
            target,
            tokens,
            **with_q(method, draft),
            seed=seeds,
            position=positions,
            method=method,
            backend=backend,
        )
        q = draft.double().softmax(-1) if method in BY_RATIO else None
        assert_reference(got, target, tokens, q, method, seeds, positions)


@backends
@methods
@pytest.mark.parametrize("V", [1023, 1025, 32000, 50257, 128256, 151936, 256000, 262147])
def test_points_at_the_edges_of_blocks(backend, method, V):
    """G5: one-hot and four-point laws at ids 0, V - 1 and around the edges."""
    B, K = (3, 3) if V < 2000 else (1, 2)
    edges = [0, 1, 510, 511, 512, 513, V // 512 * 512 - 1, V // 512 * 512, V - 2, V - 1]
    edges = torch.tensor(sorted({min(e, V - 1) for e in edges}))
    for points in (1, 4):
        target, draft = torch.full((B, K + 1, V), -INF), torch.full((B, K, V), -INF)
        for b in range(B):
            for i in range(K + 1):
                # the draft shares half of the target's points
                ids = edges[torch.randperm(len(edges))[: points + points // 2]]
                target[b, i, ids[:points]] = torch.randn(points)
                if i < K:
                    draft[b, i, ids[-points:]] = torch.randn(points)
        tokens = (draft + torch.rand(V)).argmax(-1)
        seeds, positions = keys(B)
        key = {"seed": seeds, "position": positions, "method": method, "backend": backend}
        got = verify_chain(target, tokens, **with_q(method, draft), **key)
        q = draft.softmax(-1) if method in BY_RATIO else None
        assert_reference(got, target, tokens, q, method, seeds, positions)
        for b in range(B):
            kept = got.num_accepted[b]
            assert target[b, kept, got.tokens[b, kept]] > -INF


@backends
@methods
def test_ragged_rows_equal_reference(backend, method):
    B, K, V = 24, 5, 37
    target, tokens, draft = make_inputs(B, K, V)
    tokens[3, 2] = -1
    tokens[4, 0] = V
    tokens[5, 4] = 2**62
    tokens[6, 1] = -(2**62)
    counts = torch.arange(B) % (K + 3) - 1  # -1 and K + 1 too
    seeds, positions = keys(B)
    for limit in (None, counts, counts.int()):
        got = verify_chain(
            target,
            tokens,
            **with_q(method, draft),
            num_draft_tokens=limit,
            seed=seeds,
            position=positions,
            method=method,
            backend=backend,
        )
        q = draft.double().softmax(-1) if method in BY_RATIO else None
        assert_reference(got, target, tokens, q, method, seeds, positions, counts=limit)
        check_structure(got, tokens, V, [K] * B if limit is None else counts.tolist())


# ---- match is plain sampling ----


@backends
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("V", [40, 700])
def test_match_is_plain_sampling(backend, filters, V):
    B, K = 30, 3
    target, tokens, draft = make_inputs(B, K, V)
    seeds, positions = keys(B)
    plain = torch.stack(
        [
            sample(
                target[:, i], seed=seeds, position=positions + i, backend=backend, **filters
            ).tokens
            for i in range(K + 1)
        ],
        dim=1,
    )
    others = [tokens, torch.randint(0, V, (B, K)), plain[:, :K], torch.full((B, K), -1)]
    lengths = []
    for drafts in others:
        got = verify_chain(
            target,
            drafts,
            seed=seeds,
            position=positions,
            method="match",
            backend=backend,
            **filters,
        )
        emitted = torch.arange(K + 1) <= got.num_accepted[:, None]
        assert torch.equal(got.tokens, torch.where(emitted, plain, -1))
        lengths.append(got.num_accepted.float().mean().item())
    assert lengths[2:] == [K, 0]


@backends
def test_match_ignores_q(backend):
    target, tokens, draft = make_inputs(9, 3, 20)
    for method in ("match", "greedy", "typical"):
        want = verify_chain(target, tokens, method=method, backend=backend)
        got = verify_chain(target, tokens, draft * NAN, method=method, backend=backend)
        assert_equal(got, want)


# ---- greedy ----


@backends
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("B", [1, 64])
@pytest.mark.parametrize(
    "ids", [(3, 7), (3, 7, 400), (511, 512), (510, 511, 1024), (3, 1999), (1998, 1999), (1999,)]
)
def test_argmax_ties_go_to_the_lowest_id(backend, dtype, B, ids):
    """B2: the same under every method at temperature 0."""
    target = torch.randn(B, 3, 2000).clamp(max=3).to(dtype)
    target[:, :, list(ids)] = 4.5
    tokens = torch.tensor([[ids[0], ids[-1]]]).expand(B, 2)
    kept = 2 if len(ids) == 1 else 1
    for method in METHODS:
        for temperature in (0.0, torch.zeros(B)):
            q = {"draft_logits": torch.zeros(B, 2, 2000)} if method in BY_RATIO else {}
            got = verify_chain(
                target, tokens, **q, temperature=temperature, method=method, backend=backend
            )
            assert got.num_accepted.tolist() == [kept] * B
            assert got.tokens[:, kept].tolist() == [ids[0]] * B


@backends
@methods
@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-6, 1e-4])
@pytest.mark.parametrize("dtype, top", [(torch.float32, 1e4), (torch.float16, 6e4)])
def test_temperature_near_zero_is_greedy(backend, method, temperature, dtype, top):
    """G6: the same tokens as greedy, whatever the magnitude of the logits."""
    B, K, V = 20, 3, 64
    values = torch.linspace(-top, top, V).to(dtype)
    assert values.unique().numel() == V
    target = torch.stack([values[torch.randperm(V)] for _ in range(B * (K + 1))]).view(B, K + 1, V)
    best = target.argmax(-1)
    tokens = torch.where(torch.rand(B, K) < 0.7, best[:, :K], 5)
    want = verify_chain(target, tokens, method="greedy", backend=backend)
    q = {"draft_logits": torch.zeros(B, K, V)} if method in BY_RATIO else {}
    for value in (temperature, torch.full((B,), temperature)):
        got = verify_chain(
            target, tokens, **q, temperature=value, seed=3, method=method, backend=backend
        )
        assert_equal(got, want)


@backends
@methods
def test_mixed_temperatures_in_one_batch(backend, method):
    B, K, V = 12, 3, 60
    target, tokens, draft = make_inputs(B, K, V)
    temperature = torch.tensor([0.0, 0.7, 1e-7, 1.3]).repeat(3)
    top_k, top_p = torch.tensor([0, 5, 10**6]).repeat(4), torch.tensor([1.0, 0.8]).repeat(6)
    seeds, positions = keys(B)
    options = {**with_q(method, draft), "method": method, "backend": backend}
    whole = verify_chain(
        target,
        tokens,
        **options,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=torch.full((B,), 0.01),
        seed=seeds,
        position=positions,
    )
    for b in range(B):
        sampling = {
            "temperature": temperature[b].item(),
            "top_k": top_k[b].item(),
            "top_p": top_p[b].item(),
            "min_p": 0.01,
        }
        one = slice(b, b + 1)
        if method in BY_RATIO:
            options["draft_logits"] = draft[one]
        alone = verify_chain(
            target[one],
            tokens[one],
            **options,
            **sampling,
            seed=seeds[b].item(),
            position=positions[b].item(),
        )
        assert_equal(alone, type(whole)(*(x[one] for x in whole)))


# ---- layouts ----


def pack(target, tokens, draft, counts):
    """Padded to packed: [T, V], cu_logits, [N], [N, V]."""
    B = len(counts)
    rows = [target[b, : counts[b] + 1] for b in range(B)]
    cu_logits = torch.tensor([0, *(len(r) for r in rows)]).cumsum(0)
    return (
        torch.cat(rows),
        cu_logits,
        torch.cat([tokens[b, : counts[b]] for b in range(B)]),
        torch.cat([draft[b, : counts[b]] for b in range(B)]),
    )


@backends
@methods
@pytest.mark.parametrize("counts", [[4, 0, 2, 1, 3], [0, 0, 0], [3], [0, 4], [2, 2, 2, 2]], ids=str)
def test_packed_equals_padded(backend, method, counts):
    B, K, V = len(counts), max(counts), 45
    target, tokens, draft = make_inputs(B, K, V)
    seeds, positions = keys(B)
    key = {"seed": seeds, "position": positions, "method": method, "backend": backend}
    want = verify_chain(
        target, tokens, **with_q(method, draft), num_draft_tokens=torch.tensor(counts), **key
    )
    rows, cu_logits, flat_tokens, flat_draft = pack(target, tokens, draft, counts)
    for cu in (cu_logits, cu_logits.int()):
        # drafts as [N], with K given or not, and as [B, K]
        q = with_q(method, flat_draft)
        for width in (K, sum(counts), None):
            got = verify_chain(rows, flat_tokens, **q, cu_logits=cu, max_draft_tokens=width, **key)
            assert_equal(got._replace(tokens=got.tokens[:, : K + 1]), want)
            assert bool((got.tokens[:, K + 1 :] == -1).all())
        got = verify_chain(rows, tokens, **with_q(method, draft), cu_logits=cu, **key)
        assert_equal(got, want)
        junk = torch.where(torch.arange(K) < torch.tensor(counts)[:, None], tokens, -9)
        got = verify_chain(rows, junk.int(), **with_q(method, draft), cu_logits=cu, **key)
        assert_equal(got, want)


@backends
@methods
def test_packed_buffers_longer_than_the_batch(backend, method):
    """A captured batch has spare rows and requests at its end: they say -1 and disturb nobody."""
    counts, K, V = [2, 0, 3], 3, 20
    target, tokens, draft = make_inputs(3, K, V)
    rows, cu_logits, flat_tokens, flat_draft = pack(target, tokens, draft, counts)
    key = {"method": method, "backend": backend, "seed": 4}
    want = verify_chain(
        rows,
        flat_tokens,
        **with_q(method, flat_draft),
        cu_logits=cu_logits,
        max_draft_tokens=K,
        **key,
    )
    spare = 6
    rows = torch.cat([rows, torch.full((spare, V), NAN)])
    cu_logits = torch.cat([cu_logits, cu_logits[-1:].expand(2)])
    num = rows.shape[0] - 5
    flat_tokens = torch.cat([flat_tokens, torch.full((num - len(flat_tokens),), 7)])
    flat_draft = torch.cat([flat_draft, torch.full((num - len(flat_draft), V), NAN)])
    got = verify_chain(
        rows,
        flat_tokens,
        **with_q(method, flat_draft),
        cu_logits=cu_logits,
        max_draft_tokens=K,
        **key,
    )
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a[:3], b)
    assert bool((got.tokens[3:] == -1).all())
    assert got.num_accepted[3:].tolist() == [0, 0]
    assert got.error[3:].tolist() == [False, False]


@backends
@methods
def test_requests_without_rows(backend, method):
    """Between others, with drafts as [B, K]: only -1, and no error of a neighbour's row."""
    K, V = 2, 20
    target, tokens, draft = make_inputs(4, K, V)
    key = {"method": method, "backend": backend, "seed": torch.arange(4)}
    target[0] = NAN
    want = verify_chain(target, tokens, **with_q(method, draft), **key)
    rows = torch.cat([target[0], target[2]])
    cu_logits = torch.tensor([0, 3, 3, 6, 6])
    got = verify_chain(rows, tokens, **with_q(method, draft), cu_logits=cu_logits, **key)
    for b in (0, 2):
        assert_equal(got, want, [b])
    assert got.tokens[[1, 3]].tolist() == [[-1] * 3] * 2
    assert got.error.tolist() == [True, False, False, False]
    got = verify_chain(
        torch.cat([target[0], target[2]]),
        tokens,
        **with_q(method, draft),
        cu_logits=torch.tensor([0, 0, 3, 3, 6]),
        **key,
    )
    assert got.error.tolist() == [False, True, False, False]
    # fewer rows than requests
    got = verify_chain(
        target[:1, 1],
        tokens[0, :0],
        cu_logits=torch.tensor([0, 0, 0, 1]),
        method=method,
        backend=backend,
    )
    assert got.tokens[:2].tolist() == [[-1], [-1]]
    assert got.error.tolist() == [False, False, True]


@backends
@methods
def test_empty_sizes(backend, method):
    for B, K, V in ((0, 3, 5), (0, 0, 5), (3, 0, 5), (3, 4, 1), (1, 0, 1)):
        target, tokens, draft = make_inputs(B, K, V)
        for filters in FILTERS:
            got = verify_chain(
                target,
                tokens,
                **with_q(method, draft),
                method=method,
                backend=backend,
                **filters,
            )
            check_structure(got, tokens, V, [K] * B)
            if V == 1:
                assert got.num_accepted.tolist() == [K] * B
    got = verify_chain(
        torch.zeros(0, 5),
        torch.zeros(0).long(),
        cu_logits=torch.zeros(1).long(),
        method=method,
        backend=backend,
    )
    assert got.tokens.shape == (0, 1)


@backends
@methods
def test_views(backend, method):
    B, K, V = 5, 3, 600
    target, tokens, draft = make_inputs(B, K, V)
    key = {"seed": 6, "position": 2, "method": method, "backend": backend}
    want = verify_chain(target, tokens, **with_q(method, draft), **key)

    def views(x):
        wide = torch.zeros(*x.shape[:-1], x.shape[-1] * 2 + 3, dtype=x.dtype)
        wide[..., 3::2] = x
        holder = torch.zeros(x.shape[0] + 2, x.shape[1] + 1, *x.shape[2:], dtype=x.dtype)
        holder[1:-1, 1:] = x
        return [
            x.transpose(-1, -2).contiguous().transpose(-1, -2),
            wide[..., 3::2],
            holder[1:-1, 1:],
            x.repeat_interleave(2, 0)[::2],
            x.transpose(0, 1).contiguous().transpose(0, 1),
        ]

    for a, b, c in zip(views(target), views(tokens.int()), views(draft), strict=True):
        assert not a.is_contiguous()
        assert_equal(verify_chain(a, b, **with_q(method, c), **key), want)
    # the last row of one tensor that both models wrote to
    shared = torch.cat([target, draft], dim=1)
    got = verify_chain(shared[:, : K + 1], tokens, **with_q(method, shared[:, K + 1 :]), **key)
    assert_equal(got, want)


@backends
@pytest.mark.parametrize("method", BY_RATIO)
def test_drafter_with_a_smaller_vocabulary(backend, method):
    B, K, V, small = 30, 3, 50, 37
    target, _, _ = make_inputs(B, K, V)
    draft = torch.randn(B, K, small)
    tokens = draft.softmax(-1).view(-1, small).multinomial(1).view(B, K)
    tokens[0, 0] = small + 2  # it cannot have drawn this: q is 0, p is not, so it stays
    padded = torch.nn.functional.pad(draft, (0, V - small), value=-INF)
    key = {"seed": torch.arange(B), "method": method, "backend": backend}
    want = verify_chain(target, tokens, padded, **key)
    assert_equal(verify_chain(target, tokens, draft, **key), want)
    probs = draft.softmax(-1)
    assert_equal(verify_chain(target, tokens, draft_probs=probs, **key), want)
    assert want.num_accepted[0] >= 1
    # the rest of the vocabulary is still reached
    assert bool((want.tokens >= small).any())


@backends
@pytest.mark.parametrize("method", BY_RATIO)
def test_probs_and_logits_are_the_same_q(backend, method):
    target, tokens, draft = make_inputs(50, 3, 40)
    key = {"seed": torch.arange(50), "method": method, "backend": backend}
    want = verify_chain(target, tokens, draft, **key)
    assert_equal(verify_chain(target, tokens, draft_probs=draft.softmax(-1), **key), want)
    assert_equal(verify_chain(target, tokens, draft + 3, **key), want)
    # the drafter's own temperature is not the target's
    got = verify_chain(target, tokens, draft, temperature=0.5, **key)
    scaled = verify_chain(target * 2, tokens, draft, **key)
    assert_equal(got, scaled)


@backends
@pytest.mark.parametrize("method", BY_RATIO)
def test_without_q_drafts_are_one_hot(backend, method):
    B, K, V = 200, 3, 9
    target, tokens, _ = make_inputs(B, K, V)
    one_hot = torch.nn.functional.one_hot(tokens, V).float()
    for filters in ({}, {"top_k": 3}, {"temperature": 0.0}):
        key = {"seed": torch.arange(B), "method": method, "backend": backend, **filters}
        want = verify_chain(target, tokens, draft_probs=one_hot, **key)
        assert_equal(verify_chain(target, tokens, **key), want)


@backends
@methods
def test_arguments_are_left_alone(backend, method):
    target, tokens, draft = make_inputs(4, 3, 30)
    for q in ({"draft_logits": draft}, {"draft_probs": draft.softmax(-1)}):
        before = [x.clone() for x in (target, tokens, *q.values())]
        verify_chain(target, tokens, **q, top_p=0.9, method=method, backend=backend)
        for x, y in zip((target, tokens, *q.values()), before, strict=True):
            assert torch.equal(x, y)


# ---- seeds ----


@backends
@methods
def test_a_request_does_not_depend_on_its_batch(backend, method):
    """H1: alone, first or last of five, padded further, whatever the neighbours do."""
    B, K = 5, 3
    for V in (19, 1300):
        target, tokens, draft = make_inputs(B, K, V)
        seeds, positions = keys(B)
        options = {"method": method, "backend": backend, "top_p": 0.97}
        whole = verify_chain(
            target, tokens, **with_q(method, draft), seed=seeds, position=positions, **options
        )
        again = verify_chain(
            target, tokens, **with_q(method, draft), seed=seeds, position=positions, **options
        )
        assert_equal(again, whole)
        order = torch.tensor([3, 1, 4, 0, 2])
        moved = verify_chain(
            target[order],
            tokens[order],
            **with_q(method, draft[order]),
            seed=seeds[order],
            position=positions[order],
            **options,
        )
        assert_equal(moved, type(whole)(*(x[order] for x in whole)))
        # more columns of padding, junk behind them
        more = torch.full((B, 2), -1)
        wide = verify_chain(
            torch.cat([target, torch.full((B, 2, V), NAN)], 1),
            torch.cat([tokens, more], 1),
            **with_q(method, torch.cat([draft, torch.full((B, 2, V), NAN)], 1)),
            seed=seeds,
            position=positions,
            **options,
        )
        assert_equal(wide._replace(tokens=wide.tokens[:, : K + 1]), whole)
        # neighbours with other seeds, other logits, no drafts
        target[1:], seeds[1:], tokens[1:] = 0, 5, -1
        changed = verify_chain(
            target, tokens, **with_q(method, draft), seed=seeds, position=positions, **options
        )
        assert_equal(changed, whole, [0])


SCRIPT = """
import torch
from specdec_kernels import verify_chain
x = torch.arange(4 * 5 * 30.0).sin().view(4, 5, 30) * 3
d = torch.arange(16).view(4, 4) * 7 % 30
for method in ("match", "token", "block"):
    q = x[:, :4].roll(1, 0) if method != "match" else None
    print(verify_chain(x, d, q, seed=torch.arange(4), position=3, method=method).tokens.tolist())
"""


def test_a_fresh_process_says_the_same(capsys):
    exec(SCRIPT, {})
    here = capsys.readouterr().out
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert run.stdout == here
    assert here.count("\n") == 3


@backends
@methods
def test_global_generator_is_untouched(backend, method):
    target, tokens, draft = make_inputs(3, 2, 10)
    state = torch.get_rng_state()
    verify_chain(target, tokens, **with_q(method, draft), method=method, backend=backend)
    assert torch.equal(torch.get_rng_state(), state)


@backends
@pytest.mark.parametrize("method", ["match", "token", "block", "typical"])
def test_seed_and_position_count(backend, method):
    target, tokens, draft = make_inputs(40, 2, 50)
    options = {**with_q(method, draft), "method": method, "backend": backend}
    base = verify_chain(target, tokens, **options, seed=5, position=8).tokens
    for seed, position in ((6, 8), (5, 9), (5 + 2**32, 8)):
        other = verify_chain(target, tokens, **options, seed=seed, position=position).tokens
        assert not torch.equal(other, base)


@backends
@pytest.mark.parametrize("method", BY_RATIO)
def test_noise_of_acceptance_and_residual(backend, method):
    """A certain rejection at step i draws from p with the residual stream, keyed by i."""
    B, K, V = 8, 3, 40
    target = torch.randn(B, K + 1, V)
    for step in range(K + 1):
        laws, tokens = target.clone(), torch.zeros(B, K).long()
        laws[:, :step] = -INF
        laws[:, :step, 0] = 0.0  # sure
        laws[:, step, 0] = -INF  # forbidden
        key = {"seed": torch.arange(B), "position": 30, "backend": backend}
        got = verify_chain(laws, tokens, **key, method=method)
        assert got.num_accepted.tolist() == [step] * B
        want = sample(laws[:, step], **key, step=step, stream=Stream.RESIDUAL).tokens
        assert torch.equal(got.tokens[:, step], want)


# ---- degenerate laws ----


@backends
@pytest.mark.parametrize("method", BY_RATIO)
@pytest.mark.parametrize("V", [1, 2, 40, 3000, 60_000])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9, "temperature": 0.7}], ids=str)
def test_equal_laws_accept_everything(backend, method, V, filters, monkeypatch):
    """G2: p == q bitwise, also at the largest uniform there is, and for a request alone."""
    B, K = (1, 3) if V > 1000 else (40, 3)
    target = torch.randn(B, K + 1, V) * 2
    rows = [
        sample(
            target[:, i],
            **filters,
            seed=torch.arange(B),
            step=i,
            stream=Stream.DRAFT,
            return_probs=True,
            backend=backend,
        )
        for i in range(K)
    ]
    tokens = torch.stack([r.tokens for r in rows], 1)
    probs = torch.stack([r.probs for r in rows], 1)
    key = {"draft_probs": probs, "method": method, "backend": backend, **filters}
    for seed in range(3):
        got = verify_chain(target, tokens, **key, seed=seed)
        assert got.num_accepted.tolist() == [K] * B
        assert not got.error.any()
    if backend == "torch":
        inject_uniforms(monkeypatch, torch.full((B, K), 1 - 2**-24))
        assert verify_chain(target, tokens, **key).num_accepted.tolist() == [K] * B


@pytest.mark.parametrize("method", BY_RATIO)
@pytest.mark.parametrize("word, kept", [(0, 3), (2**32 - 1, 0)])
def test_uniforms_at_their_ends(method, word, kept, monkeypatch):
    """u is never 0, so p = 0 never passes; u is never 1, so a ratio of one always does."""
    module = importlib.import_module("specdec_kernels.verify_chain")
    monkeypatch.setattr(
        module, "philox4x32", lambda seed, *_: torch.full((seed.shape[0], 3, 4), word)
    )
    target, tokens, draft = make_inputs(20, 3, 6, noise=1.0)
    one = torch.nn.functional.one_hot(tokens, 6)
    probs = draft.softmax(-1) * 0.5 + one * 0.5
    laws = target.clone()
    laws[:, :3] = torch.where(one.bool(), laws[:, :3] - 2, laws[:, :3])  # every ratio below one
    got = verify_chain(laws, tokens, draft_probs=probs, method=method)
    assert got.num_accepted.tolist() == [kept] * 20
    # forbidden tokens
    laws[:, 1] = laws[:, 1].masked_fill(one[:, 1].bool(), -INF)
    got = verify_chain(laws, tokens, draft_probs=probs, method=method)
    assert bool((got.num_accepted <= 1).all())
    assert method == "block" or got.num_accepted.tolist() == [min(kept, 1)] * 20
    # p/q = 1
    got = verify_chain(target, tokens, draft_probs=target[:, :3].softmax(-1) * 0.999, method=method)
    assert got.num_accepted.tolist() == [3] * 20


@pytest.mark.parametrize("method", BY_RATIO)
def test_the_comparison_is_strict(method, monkeypatch):
    """Uniforms of other makers may be 0: still no ratio of 0 passes."""
    inject_uniforms(monkeypatch, torch.zeros(1, 2))
    target = torch.tensor([[[-INF, 0.0], [0.0, 0.0], [0.0, 0.0]]])
    for q in ({}, {"draft_logits": torch.zeros(1, 2, 2)}):
        got = verify_chain(target, torch.zeros(1, 2).long(), **q, method=method)
        assert got.tokens.tolist() == [[1, -1, -1]]


# the first word of (seed, position 0, index 0, step 1, ACCEPT) is within 2^-20 of an end
SEEDS_NEAR_ZERO = [938004, 5297937, 10505807, 12270867, 12403412, 16004722, 16078147]
SEEDS_NEAR_ONE = [1899891, 2311445, 2521426, 5567035, 7979168, 7979617, 8268956, 11153175]


@backends
def test_replacement_when_the_residual_is_tiny(backend):
    """A9 (iii): p = .5 -+ 2^-20, q = .5: a rejected 1 becomes 0, never NaN, never 1 again."""
    tiny = 2.0**-20
    target = torch.tensor([0.5 + tiny, 0.5 - tiny]).log().expand(len(SEEDS_NEAR_ONE), 2, 2)
    q = torch.full((len(SEEDS_NEAR_ONE), 1, 2), 0.5)
    tokens = torch.ones(len(SEEDS_NEAR_ONE), 1).long()
    for method in BY_RATIO:
        got = verify_chain(
            target,
            tokens,
            draft_probs=q,
            method=method,
            seed=torch.tensor(SEEDS_NEAR_ONE),
            backend=backend,
        )
        assert got.num_accepted.tolist() == [0] * len(SEEDS_NEAR_ONE)
        assert got.tokens.tolist() == [[0, -1]] * len(SEEDS_NEAR_ONE)
        assert not got.error.any()


@backends
@pytest.mark.parametrize("method", BY_RATIO)
def test_ids_beyond_the_draft_vocabulary_have_no_q(backend, method):
    """The drafter knows id 0 alone; a rejection, however rare, gives one of the others."""
    B, tiny = len(SEEDS_NEAR_ONE), 2.0**-18
    got = verify_chain(
        torch.tensor([1 - 2 * tiny, tiny, tiny]).log().expand(B, 2, 3),
        torch.zeros(B, 1).long(),
        torch.zeros(B, 1, 1),
        seed=torch.tensor(SEEDS_NEAR_ONE),
        method=method,
        backend=backend,
    )
    assert got.num_accepted.tolist() == [0] * B
    assert set(got.tokens[:, 0].tolist()) == {1, 2}


@backends
@pytest.mark.parametrize("method", BY_RATIO)
def test_forbidden_tokens_are_never_kept(backend, method):
    """p(x) = 0 fails at the smallest uniforms too, whatever q says."""
    seeds = torch.tensor(SEEDS_NEAR_ZERO)
    B = len(seeds)
    target = torch.tensor([-INF, 0.0, 1.0]).expand(B, 2, 3)
    tokens = torch.zeros(B, 1).long()
    for q in ([1e-30, 0.5, 0.5], [0.0, 0.5, 0.5], [1e-45, 1.0, 0.0], [1.0, 0.0, 0.0]):
        probs = torch.tensor(q).expand(B, 1, 3)
        got = verify_chain(
            target, tokens, draft_probs=probs, seed=seeds, method=method, backend=backend
        )
        assert got.num_accepted.tolist() == [0] * B
        assert bool((got.tokens[:, 0] > 0).all())
        assert not got.error.any()


@backends
@pytest.mark.parametrize("method", BY_RATIO)
def test_degenerate_q(backend, method):
    """G2: q(x) = 0, q above one, disjoint supports, nothing in the residual."""
    B, V = 300, 4
    law = torch.tensor([0.1, 0.2, 0.3, 0.4])
    target = law.log().expand(B, 2, V)
    key = {"seed": torch.arange(B), "method": method, "backend": backend}

    def run(draft, q):
        tokens = torch.full((B, 1), draft)
        got = verify_chain(target, tokens, draft_probs=torch.tensor(q).expand(B, 1, V), **key)
        assert not got.error.any()
        return got

    # not drawn from q, yet allowed: kept
    assert run(2, [0.5, 0.5, 0.0, 0.0]).num_accepted.tolist() == [1] * B
    # slightly above one, and far above: the ratio decides, the rest of p replaces
    for q in ([0.0, 0.0, 0.0, 1.0 + 1e-6], [0.0, 0.0, 0.0, 3.0]):
        got = run(3, q)
        rejected = got.num_accepted == 0
        assert 0 < rejected.sum() < B
        assert bool((got.tokens[rejected, 0] < 3).all())
    # q covers p: nothing is left, so p itself is drawn from
    got = run(3, [1.0, 1.0, 1.0, 1.0])
    rejected = got.num_accepted == 0
    assert set(got.tokens[rejected, 0].tolist()) == {0, 1, 2, 3}
    # disjoint supports: always refused, the replacement is p's
    got = verify_chain(
        target.masked_fill(torch.arange(V) < 2, -INF),
        torch.zeros(B, 1).long(),
        draft_probs=torch.tensor([0.5, 0.5, 0, 0]).expand(B, 1, V),
        **key,
    )
    assert got.num_accepted.tolist() == [0] * B
    assert set(got.tokens[:, 0].tolist()) == {2, 3}


@backends
@methods
def test_only_one_token_allowed(backend, method):
    """G2: the target is masked down to one id; a draft of it is kept, any other replaced by it."""
    B, K, V = 10, 3, 30
    target = torch.full((B, K + 1, V), -INF)
    target[..., 17] = -3.0
    tokens = torch.full((B, K), 17)
    tokens[5:, 1] = 4
    q = torch.randn(B, K, V)
    got = verify_chain(target, tokens, **with_q(method, q), seed=9, method=method, backend=backend)
    assert got.num_accepted.tolist() == [K] * 5 + [1] * 5
    assert bool((got.tokens[:5] == 17).all())
    assert got.tokens[5:].tolist() == [[17, 17, -1, -1]] * 5


# ---- rows that cannot be read ----


@backends
@methods
@pytest.mark.parametrize("junk", [NAN, -INF, INF, "one nan"])
@pytest.mark.parametrize("row", [0, 1, 3])
def test_bad_target_rows(backend, method, junk, row):
    """The request alone is flagged, if its chain came that far; the others are bit-identical."""
    B, K, V = 8, 3, 700
    target, tokens, draft = make_inputs(B, K, V, noise=0.2)
    if row < K:
        # the id that a row in error answers with is no match, even where the chain does come there
        tokens[5, row] = 0
        target[5, :row] = -INF
        target[5].scatter_(1, tokens[5, :, None], 2.0)
    seeds, positions = keys(B)
    key = {"seed": seeds, "position": positions, "method": method, "backend": backend}
    want = verify_chain(target, tokens, **with_q(method, draft), **key)
    bad = target.clone()
    if junk == "one nan":
        bad[2, row, 699] = NAN
        bad[5, row, 0] = NAN
    else:
        bad[[2, 5], row] = junk
    got = verify_chain(bad, tokens, **with_q(method, draft), **key)
    others = [0, 1, 3, 4, 6, 7]
    assert_equal(got, want, others)
    q = draft.double().softmax(-1) if method in BY_RATIO else None
    if junk == INF and method == "greedy":
        assert not got.error.any()  # an argmax it has
    else:
        assert bool((got.num_accepted <= row)[[2, 5]].all())
        assert torch.equal(got.error[[2, 5]], got.num_accepted[[2, 5]] == row)
    assert_reference(got, bad, tokens, q, method, seeds, positions)
    check_structure(got, tokens, V, [K] * B)


@backends
@pytest.mark.parametrize("method", BY_RATIO)
@pytest.mark.parametrize("junk", [NAN, INF, 0.0, "one nan", "one inf"])
@pytest.mark.parametrize("row", [0, 2])
def test_bad_draft_rows(backend, method, junk, row):
    """A q that cannot be read ends the chain: flagged if reached, the next token is p's."""
    B, K, V = 40, 3, 12
    target, tokens, draft = make_inputs(B, K, V, noise=0.2)
    probs = draft.softmax(-1)
    seeds, positions = keys(B)
    key = {"seed": seeds, "position": positions, "method": method, "backend": backend}
    want = verify_chain(target, tokens, draft_probs=probs, **key)
    bad = probs.clone()
    if isinstance(junk, str):
        bad[::2, row, 5] = NAN if junk == "one nan" else INF
    else:
        bad[::2, row] = junk
    got = verify_chain(target, tokens, draft_probs=bad, **key)
    assert_equal(got, want, slice(1, None, 2))
    assert torch.equal(got.error[::2], got.num_accepted[::2] == row)
    assert got.error.any()
    assert_reference(got, target, tokens, bad, method, seeds, positions)
    check_structure(got, tokens, V, [K] * B)
    # the same from logits
    logits = torch.full((B, K, V), 0.0) + draft
    logits[::2, row] = NAN if junk != 0.0 else -INF
    assert_equal(verify_chain(target, tokens, logits, **key), got)


@backends
@methods
def test_junk_behind_the_chain_is_not_looked_at(backend, method):
    B, K, V = 6, 4, 30
    target, tokens, draft = make_inputs(B, K, V)
    counts = torch.tensor([0, 1, 2, 3, 4, 2])
    key = {"seed": 3, "method": method, "backend": backend, "num_draft_tokens": counts}
    want = verify_chain(target, tokens, **with_q(method, draft), **key)
    unused = torch.arange(K + 1) > counts[:, None]
    for junk in (NAN, INF, -INF):
        target = target.masked_fill(unused[..., None], junk)
        draft = draft.masked_fill((unused | unused.roll(-1, 1))[:, :K, None], junk)
        draft = torch.where((torch.arange(K) < counts[:, None])[..., None], draft, junk)
        got = verify_chain(target, tokens, **with_q(method, draft), **key)
        assert_equal(got, want)
        assert not got.error.any()


@backends
@pytest.mark.parametrize("method", METHODS[1:])  # greedy reads no temperature
@pytest.mark.parametrize("value", [-1.0, NAN, INF])
def test_temperature_tensors_out_of_range_set_the_error(backend, method, value):
    target, tokens, draft = make_inputs(3, 2, 20)
    target[:, :, 3] = -INF
    key = {"seed": 3, "method": method, "backend": backend, **with_q(method, draft)}
    want = verify_chain(target, tokens, temperature=torch.tensor([1.0, 1.0, 0.0]), **key)
    got = verify_chain(target, tokens, temperature=torch.tensor([1.0, value, 0.0]), **key)
    assert_equal(got, want, [0, 2])
    assert got.error.tolist() == [False, True, False]
    assert got.tokens[1].tolist() == [0, -1, -1]


# ---- typical ----


@backends
def test_typical_threshold(backend):
    """By hand: p(x) > min(eps, alpha exp(-H)), strictly."""
    # H = 1.2799, exp(-H) = .2781
    target = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(4, 2, 4)
    tokens = torch.arange(4)[:, None]

    def kept(**options):
        got = verify_chain(target, tokens, method="typical", backend=backend, **options)
        return got.num_accepted.tolist()

    assert kept() == [1, 1, 1, 1]
    assert kept(typical_eps=0.15, typical_alpha=10.0) == [1, 1, 1, 0]
    assert kept(typical_eps=0.9, typical_alpha=1.0) == [1, 1, 0, 0]
    assert kept(typical_eps=0.9, typical_alpha=1.1) == [1, 0, 0, 0]
    assert kept(typical_eps=0.0) == [1, 1, 1, 1]
    target = torch.tensor([0.0, 0.0, -INF, -INF]).expand(4, 2, 4)
    assert kept(typical_eps=0.0) == [1, 1, 0, 0]
    assert kept(typical_eps=0.5, typical_alpha=1.1) == [0, 0, 0, 0]


# ---- properties ----


@st.composite
def problems(draw):
    B, K, V = draw(st.integers(0, 4)), draw(st.integers(0, 5)), draw(st.integers(1, 40))
    if draw(st.integers(0, 9)) == 0:
        V = draw(st.integers(500, 1100))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from([*DTYPES, torch.float64]))
    scale = draw(st.sampled_from([0.0, 0.5, 3.0, 30.0]))
    target = (torch.randn(B, K + 1, V, generator=generator) * scale).to(dtype)
    if draw(st.booleans()):
        target[torch.rand(target.shape, generator=generator) < 0.3] = -INF
    if draw(st.integers(0, 3)) == 0:
        target[torch.rand(target.shape, generator=generator) < 0.02] = NAN
    q = torch.randn(B, K, draw(st.integers(1, V)), generator=generator).to(dtype)
    tokens = torch.randint(-1, V + 1, (B, K), generator=generator)
    tokens = tokens.to(draw(st.sampled_from([torch.int32, torch.int64])))

    def numbers(values):
        value = draw(st.sampled_from([*values, None]))
        if value is not None:
            return value
        index = torch.randint(0, len(values), (B,), generator=generator)
        return torch.tensor(values)[index]

    return {
        "target_logits": target,
        "draft_tokens": tokens,
        "q": q,
        "num_draft_tokens": draw(
            st.sampled_from([None, torch.randint(0, K + 1, (B,), generator=generator)])
        ),
        "temperature": numbers([1.0, 0.0, 0.3, 2.0]),
        "top_k": numbers([0, 1, 7, 2000]),
        "top_p": numbers([1.0, 0.0, 0.5, 0.95]),
        "min_p": numbers([0.0, 0.2, 1.0]),
        "seed": torch.randint(-(2**63), 2**63 - 1, (B,), generator=generator),
        "position": torch.randint(0, 2**32, (B,), generator=generator),
        "method": draw(st.sampled_from(METHODS)),
    }


@backends
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(problem=problems())
def test_properties(backend, problem):
    """Structure, range, determinism, and requests that know nothing of each other."""
    q = problem.pop("q")
    if problem["method"] in BY_RATIO:
        problem["draft_logits"] = q
    B, W, V = problem["target_logits"].shape
    got = verify_chain(**problem, backend=backend)
    counts = problem["num_draft_tokens"]
    counts = [W - 1] * B if counts is None else counts.tolist()
    check_structure(got, problem["draft_tokens"], V, counts)
    assert_equal(verify_chain(**problem, backend=backend), got)
    for b in range(B):
        one = {
            name: value[b : b + 1] if isinstance(value, torch.Tensor) else value
            for name, value in problem.items()
        }
        alone = verify_chain(**one, backend=backend)
        assert_equal(alone, type(got)(*(x[b : b + 1] for x in got)))
        kept = got.num_accepted[b]
        if not got.error[b]:
            # what is emitted was allowed
            assert problem["target_logits"][b, kept, got.tokens[b, kept]] > -INF


# ---- methods and errors ----


def test_auto_method():
    assert resolve_method("auto", 1.0, False) == "match"
    assert resolve_method("auto", 1.0, True) == "block"
    assert resolve_method("auto", 0.0, True) == resolve_method("auto", 0, False) == "greedy"
    assert resolve_method("auto", 1e-6, True) == "greedy"
    assert resolve_method("auto", torch.zeros(3), True) == "block"
    assert resolve_method("auto", torch.zeros(3), False) == "match"
    assert resolve_method("token", 0.0, False) == "token"


@backends
def test_auto_is_the_method_it_names(backend):
    target, tokens, draft = make_inputs(20, 3, 15)
    for options, method in (
        ({}, "match"),
        ({"draft_logits": draft}, "block"),
        ({"draft_logits": draft, "temperature": 0}, "greedy"),
    ):
        want = verify_chain(target, tokens, **options, method=method, backend=backend)
        assert_equal(verify_chain(target, tokens, **options, backend=backend), want)


def arguments(**changes):
    target, tokens, draft = make_inputs(2, 3, 9)
    return {"target_logits": target, "draft_tokens": tokens, "draft_logits": draft, **changes}


def packed(**changes):
    return arguments(
        target_logits=torch.zeros(7, 9),
        draft_tokens=torch.zeros(5).long(),
        draft_logits=torch.zeros(5, 9),
        cu_logits=torch.tensor([0, 3, 7]),
        **changes,
    )


@backends
@pytest.mark.parametrize(
    "change, message",
    [
        ({"target_logits": torch.zeros(4, 9)}, r"target_logits: expected 3 dim.* shape \[4, 9\]"),
        ({"target_logits": torch.zeros(2, 4, 9).int()}, "target_logits: expected a float dtype"),
        ({"target_logits": torch.zeros(2, 4, 0)}, "target_logits: the vocabulary is empty"),
        ({"target_logits": torch.zeros(2, 0, 9)}, r"target_logits: expected \[B, K \+ 1, V\], got"),
        ({"draft_tokens": torch.zeros(2, 4).long()}, r"draft_tokens: expected shape \[2, 3\], got"),
        ({"draft_tokens": torch.zeros(3, 3).long()}, r"draft_tokens: expected shape \[2, 3\], got"),
        (
            {"draft_tokens": torch.zeros(2, 3)},
            "draft_tokens: expected int32 or int64, got torch.fl",
        ),
        ({"draft_logits": torch.zeros(2, 4, 9)}, r"draft_logits: expected shape \[2, 3, 9\], got"),
        ({"draft_logits": torch.zeros(2, 3)}, "draft_logits: expected 3 dimensions"),
        ({"draft_logits": torch.zeros(2, 3, 9).int()}, "draft_logits: expected a float dtype"),
        ({"draft_logits": torch.zeros(2, 3, 0)}, "draft_logits: the vocabulary is empty"),
        ({"draft_logits": torch.zeros(2, 3, 10)}, "draft_logits: vocabulary 10, .* target's is 9"),
        ({"draft_probs": torch.zeros(2, 3, 9)}, "draft_logits, draft_probs: .* got both"),
        (
            {"draft_logits": None, "draft_probs": torch.zeros(2, 2, 9)},
            r"draft_probs: expected shape \[2, 3, 9\], got \[2, 2, 9\]",
        ),
        (
            {"draft_logits": None, "draft_probs": torch.zeros(2, 3, 12)},
            "draft_probs: vocabulary 12",
        ),
        ({"num_draft_tokens": torch.zeros(3).long()}, r"num_draft_tokens: expected shape \[2\]"),
        ({"num_draft_tokens": torch.zeros(2)}, "num_draft_tokens: expected int32 or int64"),
        ({"max_draft_tokens": 3}, "max_draft_tokens: only with cu_logits"),
        ({"temperature": -1}, "temperature: expected a finite number >= 0, got -1"),
        ({"temperature": NAN}, "temperature: expected a finite number"),
        ({"temperature": torch.ones(3)}, r"temperature: expected shape \[2\], got \[3\]"),
        ({"top_k": -2}, "top_k: expected an integer"),
        ({"top_k": torch.ones(3).int()}, r"top_k: expected shape \[2\], got \[3\]"),
        ({"top_p": 1.5}, r"top_p: expected a number in \[0, 1\], got 1.5"),
        ({"min_p": -0.5}, r"min_p: expected a number in \[0, 1\], got -0.5"),
        ({"seed": torch.zeros(3).long()}, r"seed: expected shape \[2\], got \[3\]"),
        ({"position": torch.zeros(2, 1).long()}, r"position: expected shape \[2\], got \[2, 1\]"),
        ({"method": "best"}, "method: expected one of .*'block'.*, got 'best'"),
        ({"backend": "cuda"}, "backend: expected one of .*, got 'cuda'"),
    ],
)
def test_wrong_arguments(backend, change, message):
    with pytest.raises(ValueError, match=message):
        verify_chain(**arguments(**{"backend": backend, **change}))


@backends
@pytest.mark.parametrize(
    "change, message",
    [
        ({"target_logits": torch.zeros(2, 4, 9)}, "target_logits: expected 2 dimensions"),
        ({"cu_logits": torch.zeros(3)}, "cu_logits: expected int32 or int64, got torch.float32"),
        ({"cu_logits": torch.zeros(0).long()}, r"cu_logits: expected shape \[B \+ 1\], got \[0\]"),
        ({"cu_logits": torch.zeros(2, 2).long()}, r"cu_logits: expected shape \[B \+ 1\]"),
        ({"num_draft_tokens": torch.zeros(2).long()}, "num_draft_tokens: cu_logits already says"),
        ({"draft_tokens": torch.zeros(6).long()}, r"draft_tokens: expected shape \[5\], got \[6\]"),
        ({"draft_tokens": torch.zeros(3, 2).long()}, r"draft_tokens: expected shape \[2, 2\], got"),
        ({"draft_logits": torch.zeros(6, 9)}, r"draft_logits: expected shape \[5, 9\], got"),
        ({"draft_logits": torch.zeros(2, 3, 9)}, "draft_logits: expected 2 dimensions"),
        (
            {
                "draft_tokens": torch.zeros(2, 3).long(),
                "draft_logits": None,
                "max_draft_tokens": 3,
            },
            r"max_draft_tokens: only with packed draft_tokens, got \[B, K\]",
        ),
        ({"max_draft_tokens": -1}, "max_draft_tokens: expected a number >= 0, got -1"),
    ],
)
def test_wrong_packed_arguments(backend, change, message):
    with pytest.raises(ValueError, match=message):
        verify_chain(**{**packed(), "backend": backend, **change})


def test_missing_backend():
    for name in {"triton", "torch"} - set(BACKENDS):
        with pytest.raises(ValueError, match=f"backend: verify_chain has .*, not '{name}'"):
            verify_chain(**arguments(backend=name))


def test_wrong_device():
    for name, shape in (
        ("draft_tokens", (2, 3)),
        ("draft_logits", (2, 3, 9)),
        ("num_draft_tokens", (2,)),
    ):
        x = torch.zeros(shape, device="meta")
        x = x if name == "draft_logits" else x.long()
        with pytest.raises(ValueError, match=f"{name}: expected device cpu, got meta"):
            verify_chain(**arguments(**{name: x}))
