"""The laws of ``verify_chain``: exact enumeration, then chi-square with the real random numbers."""

import importlib
import itertools

import numpy as np
import pytest
import torch

from specdec_kernels import Stream, sample, verify_chain
from specdec_kernels.testing import (
    BACKENDS,
    chi_square,
    histogram,
    kept_law,
    one_hot,
    output_law,
    reference_law,
    residual,
    target_law,
    thresholds,
)

BY_RATIO = ["token", "block"]
backends = pytest.mark.parametrize("backend", BACKENDS)
ratio_methods = pytest.mark.parametrize("method", BY_RATIO)


# ---- exact: every draft, every uniform, no sampling ----


def random_laws(V, K, seed, peak=1.0):
    """A law per prefix of up to K tokens, so that every position depends on what came before."""
    rng = np.random.default_rng(seed)
    prefixes = [x for n in range(K + 1) for x in itertools.product(range(V), repeat=n)]
    return {x: rng.dirichlet(np.full(V, peak)) for x in prefixes}


def rows_along(laws, draft, num):
    return np.stack([laws[tuple(draft[:i])] for i in range(num)])


def reference_rule(method, p, q):
    """``verify`` of ``output_law`` from the formulas of the paper."""

    def verify(draft):
        target, drawn = rows_along(p, draft, len(draft) + 1), rows_along(q, draft, len(draft))
        h = thresholds(method, target, drawn, draft)
        laws = [residual(method, target, drawn, draft, i) for i in range(len(draft) + 1)]
        return kept_law(method, h), laws

    return verify


class Probe:
    """The op with uniforms put in by hand, and its unnormalised residuals taken out (torch)."""

    def __init__(self, monkeypatch, method, p, q, V, K):
        self.module = importlib.import_module("specdec_kernels.verify_chain")
        self.monkeypatch, self.method = monkeypatch, method
        self.drafts = list(itertools.product(range(V), repeat=K))
        self.tokens = torch.tensor(self.drafts).view(-1, K)
        self.logits = torch.tensor(np.stack([rows_along(p, d, K + 1) for d in self.drafts])).log()
        self.probs = torch.tensor(np.stack([q(d) for d in self.drafts]))

    def run(self, uniforms):
        """num_accepted [B], and the normalised law [B, V] of the next token."""
        weights = []

        def draw(w, *key):
            weights.append(w.double())
            return torch.zeros(len(w), dtype=torch.int64)

        with self.monkeypatch.context() as patch:
            patch.setattr(self.module, "to_uniform", lambda words: uniforms.expand(words.shape))
            patch.setattr(self.module, "draw", draw)
            out = verify_chain(
                self.logits,
                self.tokens,
                draft_probs=self.probs,
                method=self.method,
                backend="torch",
            )
        return out.num_accepted, weights[0] / weights[0].sum(-1, keepdim=True)

    def thresholds(self):
        """h [B, K], each found by bisection on its own uniform."""
        B, K = self.tokens.shape
        found = torch.zeros(B, K, dtype=torch.float64)
        for i in range(K):
            # token: the ones before pass. block: no other may
            uniforms = torch.ones(B, K)
            if self.method == "token":
                uniforms[:, :i] = 0
            low, high = torch.zeros(B), torch.ones(B)
            for _ in range(26):
                uniforms[:, i] = (low + high) / 2
                kept = self.run(uniforms)[0] >= i + 1
                low = torch.where(kept, uniforms[:, i], low)
                high = torch.where(kept, high, uniforms[:, i])
            found[:, i] = high
        return found

    def residuals(self):
        """The law of the next token for each number of drafts kept, where it can be kept."""
        B, K = self.tokens.shape
        laws = torch.zeros(B, K + 1, self.logits.shape[-1], dtype=torch.float64)
        for i in range(K + 1):
            uniforms = torch.ones(B, K)
            if self.method == "token":
                uniforms[:, :i] = 0
            elif i:
                uniforms[:, i - 1] = 0
            kept, law = self.run(uniforms)
            laws[kept == i, i] = law[kept == i]
        return laws


def close(got, want):
    return np.abs(np.asarray(got) - np.asarray(want)).max() < 2e-6


@ratio_methods
@pytest.mark.parametrize("K", [1, 2, 3])
@pytest.mark.parametrize("case", range(4))
def test_every_draft_by_enumeration(method, K, case, monkeypatch):
    """Thresholds and residuals are the formulas', and the output's joint law is the target's."""
    V, peak = 3, [1.0, 1.0, 0.4, 3.0][case]
    p, q = random_laws(V, K, 10 * case, peak), random_laws(V, K, 10 * case + 1, peak)
    probe = Probe(monkeypatch, method, p, lambda d: rows_along(q, d, K), V, K)
    h, laws = probe.thresholds().numpy(), probe.residuals().numpy()
    formula = reference_rule(method, p, q)
    rule = {}
    for b, draft in enumerate(probe.drafts):
        target, drawn = rows_along(p, draft, K + 1), rows_along(q, draft, K)
        want = thresholds(method, target, drawn, draft)
        assert close(h[b], want), (draft, h[b], want)
        kept_probs, next_laws = formula(draft)
        for i in range(K + 1):
            if kept_probs[i] > 1e-6:
                # a residual of small mass is a small difference of float32 numbers
                error = np.abs(laws[b, i] - next_laws[i]).max() * kept_probs[i]
                assert error < 2e-6, (draft, i)
        rule[draft] = (kept_law(method, h[b]), laws[b])
    want = target_law(p.__getitem__, (V,) * (K + 1))
    law, mean = output_law(p.__getitem__, q.__getitem__, V, K, lambda d: rule[tuple(d)])
    assert np.abs(law - want).sum() / 2 < 1e-6
    # and so is the law of the formulas, to the last digit
    exact, exact_mean = output_law(p.__getitem__, q.__getitem__, V, K, formula)
    assert np.abs(exact - want).sum() / 2 < 1e-12
    assert mean == pytest.approx(exact_mean, abs=1e-5)


def test_motivating_example(monkeypatch):
    """Sun et al., section 2: p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 10/9 kept, then 11/9."""
    prefixes = [(), *itertools.product(range(2)), *itertools.product(range(2), repeat=2)]
    p = {x: np.array([1 / 3, 2 / 3]) for x in prefixes}
    q = {x: np.array([2 / 3, 1 / 3]) for x in prefixes}
    for method, want in (("token", 10 / 9), ("block", 11 / 9)):
        probe = Probe(monkeypatch, method, p, lambda d: rows_along(q, d, 2), 2, 2)
        h, laws = probe.thresholds().numpy(), probe.residuals().numpy()
        rule = {d: (kept_law(method, h[b]), laws[b]) for b, d in enumerate(probe.drafts)}
        law, mean = output_law(p.__getitem__, q.__getitem__, 2, 2, lambda d, r=rule: r[tuple(d)])
        assert mean == pytest.approx(want, abs=1e-6)
        assert np.abs(law - target_law(p.__getitem__, (2, 2, 2))).sum() < 1e-6


@pytest.mark.parametrize("K", [1, 2, 3, 4])
@pytest.mark.parametrize("with_probs", [True, False])
def test_one_hot_block_is_token(K, with_probs, monkeypatch):
    """For drafts that were not sampled both rules keep i tokens with probability prod p."""
    V = 3
    p = random_laws(V, K, 5)
    laws = {}
    for method in BY_RATIO:
        probe = Probe(monkeypatch, method, p, lambda d: [one_hot(x, V) for x in d], V, K)
        if not with_probs:
            probe.probs = None
        kept = np.array([kept_law(method, h) for h in probe.thresholds().tolist()])
        for b, draft in enumerate(probe.drafts):
            reach = np.cumprod([1, *(p[draft[:i]][x] for i, x in enumerate(draft))])
            assert close(kept[b, ::-1].cumsum()[::-1], reach)
        laws[method] = kept[:, :, None] * probe.residuals().numpy()
    assert close(laws["token"], laws["block"])


@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_block_keeps_at_least_as_many(K):
    """Strictly more from two drafts on, the same for one; neither more than the drafts."""
    gains = []
    for seed in range(12):
        p, q = random_laws(3, K, seed), random_laws(3, K, seed + 100)
        mean = {
            m: output_law(p.__getitem__, q.__getitem__, 3, K, reference_rule(m, p, q))[1]
            for m in BY_RATIO
        }
        assert mean["block"] >= mean["token"] - 1e-12
        assert mean["block"] < K
        gains.append(mean["block"] - mean["token"])
    assert (max(gains) > 1e-3) == (K > 1)


@backends
def test_one_draft_block_is_token(backend):
    B, V = 4000, 7
    target, draft = torch.randn(B, 2, V), torch.randn(B, 1, V)
    tokens = draft[:, 0].softmax(-1).multinomial(1)
    key = {"seed": torch.arange(B), "position": 17, "backend": backend}
    for q in ({"draft_logits": draft}, {}):
        token, block = (verify_chain(target, tokens, **q, method=m, **key) for m in BY_RATIO)
        for a, b in zip(token, block, strict=True):
            assert torch.equal(a, b)
        assert 0 < token.num_accepted.sum() < B


# ---- chi-square: the real random numbers, several tokens, several rounds ----

P = torch.tensor(
    [[0.4, 0.4, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4], [0.5, 0.1, 0.3, 0.1], [0.3, 0.1, 0.1, 0.5]]
)
Q = torch.tensor(
    [[0.03, 0.3, 0.27, 0.4], [0.4, 0.3, 0.28, 0.02], [0.1, 0.5, 0.2, 0.2], [0.2, 0.3, 0.4, 0.1]]
)


def draft_key(start, i):
    """The contract: the block's start, the index in the block, the drafters' own stream."""
    return {"position": start, "step": i, "stream": Stream.DRAFT}


def decode(
    *,
    method,
    backend,
    K=3,
    length=4,
    num=20_000,
    target=P,
    drafter=Q,
    first_seed=0,
    draft_key=draft_key,
    draft_sampling=None,
    sampled=True,
    report=lambda q, context: q,
    target_rows=lambda rows: rows,
    finish=lambda out, rows, seed, start: out.tokens,
):
    """The first ``length`` tokens [num, length] of ``num`` requests, made by a speculative loop.

    Target and drafter are Markov chains that start after token 0. The last five arguments are
    where the controls break the loop.
    """
    logits, seed = target.log(), torch.arange(num) + first_seed
    made = torch.zeros(num, length + 1, dtype=torch.int64)  # the last column takes the overflow
    start, last = torch.zeros(num, dtype=torch.int64), torch.zeros(num, dtype=torch.int64)
    total, rounds = torch.zeros(num), 0
    while bool((start < length).any()):
        context, drafts, laws = last, [last], []
        for i in range(K):
            got = sample(
                drafter[context].log(),
                **(draft_sampling or {}),
                seed=seed,
                **draft_key(start, i),
                return_probs=True,
                backend=backend,
            )
            laws.append(got.probs)
            drafts.append(got.tokens)
            context = got.tokens
        path = torch.stack(drafts, 1)
        rows = target_rows(logits[path])
        out = verify_chain(
            rows,
            path[:, 1:],
            draft_probs=report(torch.stack(laws, 1), path[:, :-1]) if sampled else None,
            seed=seed,
            position=start,
            method=method,
            backend=backend,
        )
        tokens = finish(out, rows, seed, start)
        column = start[:, None] + torch.arange(K + 1)
        column = torch.where(tokens >= 0, column, length).clamp(max=length)
        made.scatter_(1, column, tokens)
        last = tokens.gather(1, out.num_accepted[:, None]).squeeze(1)
        start = start + out.num_accepted + 1
        total, rounds = total + out.num_accepted, rounds + 1
    return made[:, :length], total.sum().item() / (num * rounds)


def markov_law(target, length):
    V = target.shape[0]
    rows = target.double().numpy()
    return target_law(lambda x: rows[x[-1] if x else 0], (V,) * length)


def p_value(tokens, target=P):
    return chi_square(histogram(tokens, target.shape[0]), markov_law(target, tokens.shape[1]))


@backends
@ratio_methods
@pytest.mark.parametrize("K", [1, 2, 4])
@pytest.mark.parametrize("first_seed", [0, 2**63 - 10_000])
def test_joint_law(backend, method, K, first_seed):
    num = 20_000 if first_seed == 0 else 10_000
    tokens, _ = decode(method=method, backend=backend, K=K, num=num, first_seed=first_seed)
    assert p_value(tokens) > 1e-4


@backends
@pytest.mark.parametrize("method", ["match", "token", "block"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_joint_law_of_drafts_without_q(backend, method, temperature):
    """Greedy drafts, and sampled ones whose q nobody kept: each is a point mass to the verifier."""
    options = {"draft_sampling": {"temperature": temperature}, "sampled": False}
    tokens, _ = decode(method=method, backend=backend, **options)
    assert p_value(tokens) > 1e-4


@backends
def test_joint_law_of_match_with_shared_noise(backend):
    """A drafter may draw with the noise of match: lossless, and kept nearly as often as can be."""
    tokens, kept = decode(
        method="match",
        backend=backend,
        K=1,
        draft_key=lambda start, i: {"position": start + i},
        sampled=False,
    )
    assert p_value(tokens) > 1e-4
    distance = (P - Q).abs().sum(-1) / 2
    bound = ((1 - distance) / (1 + distance)).min()
    independent = (P * Q).sum(-1).max()
    assert kept > bound > independent


@backends
@ratio_methods
def test_joint_law_with_draft_filters(backend, method):
    """A1 (iii): the drafter's own temperature and filters are in the q it reports."""
    for options in ({"temperature": 0.5}, {"temperature": 1.5}, {"top_k": 2}, {"top_p": 0.6}):
        tokens, _ = decode(method=method, backend=backend, draft_sampling=options, num=10_000)
        assert p_value(tokens) > 1e-4, options


# ---- controls: broken loops that the same test must refuse ----


def refused(**options):
    return p_value(decode(**{"backend": "torch", **options})[0]) < 1e-6


@ratio_methods
@pytest.mark.parametrize(
    "lie",
    [
        lambda q, _: (q**1.5) / (q**1.5).sum(-1, keepdim=True),
        lambda q, _: torch.full_like(q, 0.25),
        lambda q, _: q.roll(1, 1),
    ],
    ids=["sharpened", "uniform", "row of another position"],
)
def test_control_drafter_lies_about_q(method, lie):
    assert refused(method=method, report=lie)


@ratio_methods
def test_control_greedy_drafts_with_softmax_q(method):
    """A1: the drafts are argmaxes, the q handed over is the softmax they came from."""
    assert refused(
        method=method,
        draft_sampling={"temperature": 0.0},
        report=lambda _, context: Q[context],
    )


@ratio_methods
def test_control_draft_filters_missing_from_q(method):
    """A1 (ii): top-k drafts, unfiltered q."""
    V = 4
    target = torch.full((V, V), 0.25)
    drafter = torch.tensor([0.4, 0.3, 0.2, 0.1]).expand(V, V)
    options = {
        "backend": "torch",
        "method": method,
        "target": target,
        "drafter": drafter,
        "draft_sampling": {"top_k": 2},
        "K": 1,
    }
    tokens, _ = decode(**options, report=lambda _, context: drafter[context])
    assert p_value(tokens, target) < 1e-6
    first = torch.bincount(tokens[:, 0], minlength=V) / len(tokens)
    torch.testing.assert_close(
        first, torch.tensor([0.357, 0.357, 0.071, 0.214]), atol=0.015, rtol=0
    )
    assert p_value(decode(**options)[0], target) > 1e-4


@ratio_methods
@pytest.mark.parametrize(
    "key",
    [
        lambda start, i: {"position": start, "step": i + 1, "stream": Stream.ACCEPT},
        lambda start, i: {"position": start, "step": i, "stream": Stream.RESIDUAL},
    ],
    ids=["accept", "residual"],
)
def test_control_noise_shared_with_the_drafter(method, key):
    assert refused(method=method, draft_key=key)


def by_position(start, i):
    return {"position": start + i, "stream": Stream.DRAFT}


def test_control_block_drafts_keyed_by_position():
    """Noise of a discarded position is conditioned by what was kept: it must not be used again."""
    options = {
        "backend": "torch",
        "target": torch.tensor([[0.05, 0.92, 0.03], [0.1, 0.52, 0.38], [0.04, 0.07, 0.89]]),
        "drafter": torch.tensor([[0.01, 0.11, 0.88], [0.13, 0.36, 0.51], [0.26, 0.03, 0.71]]),
    }

    def passes(**changes):
        return p_value(decode(**options, **changes)[0], options["target"])

    assert passes(method="block", draft_key=by_position) < 1e-6
    assert passes(method="block") > 1e-4
    # the token rule never looks back
    assert passes(method="token", draft_key=by_position) > 1e-4


@pytest.mark.parametrize("method", ["match", "token", "block"])
def test_control_bonus_from_the_wrong_row(method):
    assert refused(
        method=method,
        sampled=method != "match",
        K=2,
        target_rows=lambda rows: torch.cat([rows[:, :-1], rows[:, -2:-1]], dim=1),
    )


@ratio_methods
def test_control_target_read_one_row_late(method):
    """The seed article's slip."""
    assert refused(method=method, target_rows=lambda rows: rows.roll(-1, 1))


@ratio_methods
def test_control_residual_skipped(method):
    """After a rejection the token comes from p itself."""

    def finish(out, rows, seed, start):
        kept = out.num_accepted
        again = sample(
            rows[torch.arange(len(rows)), kept],
            seed=seed,
            position=start,
            step=kept,
            stream=Stream.RESIDUAL,
        ).tokens
        return out.tokens.scatter(1, kept[:, None], again[:, None])

    assert refused(method=method, finish=finish)


# ---- one round: histograms with known answers ----


def first_tokens(p, q, drafts, method, backend, report=None, B=20_000):
    """First token and num_accepted of ``B`` requests with one draft each."""
    V = len(p)
    return verify_chain(
        torch.tensor(p).log().expand(B, 2, V),
        drafts[:, None],
        draft_probs=None if report is None else torch.tensor(report).expand(B, 1, V),
        seed=torch.arange(B),
        position=11,
        method=method,
        backend=backend,
    )


def drawn(q, backend, B=20_000, **options):
    logits = torch.tensor(q).log().expand(B, len(q))
    seed = torch.arange(B)
    return sample(logits, seed=seed, **draft_key(11, 0), backend=backend, **options).tokens


@backends
def test_greedy_draft_of_a_known_law(backend):
    """A1 (i, iv): p = .5 .3 .2, draft argmax of .6 .3 .1; with softmax q it is .833, 0, .167."""
    p, q = [0.5, 0.3, 0.2], [0.6, 0.3, 0.1]
    drafts = torch.zeros(20_000, dtype=torch.int64)
    for method in ("match", "token", "block"):
        got = first_tokens(p, q, drafts, method, backend)
        assert chi_square(torch.bincount(got.tokens[:, 0], minlength=3), p) > 1e-4
        # the second token, where the first was kept, is plain p
        bonus = got.tokens[got.num_accepted == 1, 1]
        assert chi_square(torch.bincount(bonus, minlength=3), p) > 1e-4
    for method in BY_RATIO:
        got = first_tokens(p, q, drafts, method, backend, report=q)
        counts = torch.bincount(got.tokens[:, 0], minlength=3)
        assert chi_square(counts, p) < 1e-6
        assert chi_square(counts, [5 / 6, 0, 1 / 6]) > 1e-4


@backends
@ratio_methods
@pytest.mark.parametrize("options", [{}, {"top_p": 0.6}, {"temperature": 0.5}], ids=str)
def test_acceptance_is_the_overlap(backend, method, options):
    """L4: sum min(p, q), of the filtered laws; 5 sigma."""
    p, q, B = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5], 20_000
    law, drafted = (reference_law(np.log(x), **options) for x in (p, q))
    got = verify_chain(
        torch.tensor(p).log().expand(B, 2, 3),
        drawn(q, backend, **options)[:, None],
        draft_probs=torch.tensor(drafted).expand(B, 1, 3),
        seed=torch.arange(B),
        position=11,
        method=method,
        backend=backend,
        **options,
    )
    expected = np.minimum(law, drafted).sum()
    assert options or expected == pytest.approx(0.7)
    sigma = (expected * (1 - expected) / B) ** 0.5
    assert abs(got.num_accepted.double().mean().item() - expected) < 5 * sigma
    assert chi_square(torch.bincount(got.tokens[:, 0], minlength=3), law) > 1e-4


@backends
def test_acceptance_of_match_is_the_target_probability(backend):
    p, B = [0.5, 0.3, 0.2], 20_000
    for x in range(3):
        got = first_tokens(p, None, torch.full((B,), x), "match", backend)
        sigma = (p[x] * (1 - p[x]) / B) ** 0.5
        assert abs(got.num_accepted.double().mean().item() - p[x]) < 5 * sigma


@backends
@ratio_methods
def test_mean_kept_is_that_of_enumeration(backend, method):
    """E[kept] of several drafts, 5 sigma, against the exact value."""
    K, V, B = 4, 3, 20_000
    p, q = random_laws(V, K, 50), random_laws(V, K, 51)
    _, mean = output_law(p.__getitem__, q.__getitem__, V, K, reference_rule(method, p, q))
    tables = [
        [torch.tensor(np.array([x[d] for d in sorted(x) if len(d) == i])) for i in range(K + 1)]
        for x in (p, q)
    ]
    prefix, path, laws = torch.zeros(B, dtype=torch.int64), [], []
    targets = [tables[0][0].expand(B, V)]
    for i in range(K):
        laws.append(tables[1][i][prefix])
        token = sample(
            laws[-1].log(), seed=torch.arange(B), **draft_key(0, i), backend=backend
        ).tokens
        path.append(token)
        prefix = prefix * V + token
        targets.append(tables[0][i + 1][prefix])
    got = verify_chain(
        torch.stack(targets, 1).log(),
        torch.stack(path, 1),
        draft_probs=torch.stack(laws, 1),
        seed=torch.arange(B),
        method=method,
        backend=backend,
    ).num_accepted.double()
    assert abs(got.mean() - mean) < 5 * got.std() / B**0.5


@backends
@pytest.mark.parametrize("method", ["match", "token", "block"])
@pytest.mark.parametrize("V", [1536, 3000])
def test_joint_law_of_a_large_vocabulary(backend, method, V):
    """Two tokens of thousands, completed with p, in bins that do not follow the blocks."""
    num, chunk, K = 6_000, 1_000, 2
    target, draft = torch.randn(K + 1, V) * 2, torch.randn(K, V) * 2
    draft += target[:K]
    draft[:, V // 2 : V // 2 + 200] = -torch.inf  # only the residual reaches these
    bins = torch.randperm(V) % 12
    bins[V // 2 : V // 2 + 200] = 12
    law = target.double().softmax(-1)
    counts = torch.zeros(13 * 13)
    for first in range(0, num, chunk):
        seed = torch.arange(first, first + chunk)
        drafts = torch.stack(
            [
                sample(
                    draft[i].expand(chunk, V), seed=seed, **draft_key(7, i), backend=backend
                ).tokens
                for i in range(K)
            ],
            dim=1,
        )
        tokens = verify_chain(
            target.expand(chunk, K + 1, V),
            drafts,
            draft.expand(chunk, K, V),
            seed=seed,
            position=7,
            method=method,
            backend=backend,
        ).tokens
        rest = law[1].multinomial(chunk, replacement=True)
        second = torch.where(tokens[:, 1] < 0, rest, tokens[:, 1])
        counts += torch.bincount(bins[tokens[:, 0]] * 13 + bins[second], minlength=169)
    binned = [np.bincount(bins.numpy(), weights=row.numpy()) for row in law[:2]]
    assert chi_square(counts, np.outer(*binned)) > 1e-4
