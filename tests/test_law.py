"""Sampled output has the target's law: chi-square on the joint law of several tokens of several
rounds, each row of one large batch an experiment with its own seed.

And the tests have power: drafters and verifiers that are wrong in a known way are caught by them.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import specdec
from specdec.drafters import Draft
from specdec.drafters.draft_model import DraftModelSession
from specdec.testing import left_pad, markov_model, random_prompts, tiny_model
from specdec_kernels import Stream, sample, verify_chain
from specdec_kernels.testing import chi_square, histogram, reference_law, target_law

SIZE = 8  # of the vocabulary; the laws have fewer symbols
FAIL, RED = 1e-3, 1e-6
METHODS = ("match", "token", "block")


def random_law(num_symbols: int, seed: int, sharpness: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_symbols, num_symbols, generator=generator) * sharpness).softmax(-1)


P3, Q3 = random_law(3, 0), random_law(3, 1)
P4, Q4 = random_law(4, 4), random_law(4, 5)


@dataclass(frozen=True)
class Case:
    """One experiment: ``num_rows`` rows of ``num_new`` tokens, after each prompt in turn."""

    p: torch.Tensor  # [n, n], or [n] for the same law after every token
    num_new: int
    num_rows: int = 3000
    prompts: tuple[tuple[int, ...], ...] = ((0,),)
    sampling: tuple[tuple[str, float], ...] = ()
    method: str = "auto"

    def p_value(self, drafter, seed: int = 0) -> float:
        """Of the joint law of the new tokens, over all prompts."""
        n = self.p.shape[-1]
        prompts = [list(self.prompts[i % len(self.prompts)]) for i in range(self.num_rows)]
        ids, mask = left_pad(prompts, pad=SIZE - 1)
        out = specdec.generate(
            markov_model(self.p, SIZE),
            ids,
            mask,
            drafter=drafter,
            method=self.method,
            seed=[seed + i for i in range(self.num_rows)],
            do_sample=True,
            max_new_tokens=self.num_new,
            **dict(self.sampling),
        )
        tokens = out.sequences[:, ids.shape[1] :]
        assert out.stats.rounds > self.num_rows, "one round is not enough to see shared noise"
        counts, laws = [], []
        rows = self.law()
        for i, prompt in enumerate(self.prompts):
            counts.append(histogram(tokens[i :: len(self.prompts)], n).numpy())

            def next_law(prefix, last=prompt[-1]):
                return rows[prefix[-1] if prefix else last]

            laws.append(target_law(next_law, (n,) * self.num_new))
        return chi_square(np.stack(counts), np.stack(laws))

    def law(self) -> np.ndarray:
        """[n, n], filtered."""
        p = self.p.expand(self.p.shape[-1], -1)
        return np.stack([reference_law(row.log().numpy(), **dict(self.sampling)) for row in p])


def assert_law(case: Case, drafter) -> None:
    """One failure in a thousand is chance, two in a row are not."""
    first = case.p_value(drafter)
    assert first > FAIL or case.p_value(drafter, seed=10**6) > FAIL, first


def draft_model(q: torch.Tensor, num_draft_tokens: int, **options):
    return specdec.DraftModel(markov_model(q, SIZE), num_draft_tokens, **options)


# ---- what must hold ----

NGRAM_PROMPTS = ((0, 1, 2, 0, 2, 1, 0), (2, 2, 1, 2, 2, 1))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_drafts", [2, 3])
def test_sampled_drafts(num_drafts, method):
    p, q, num_new = ((P3, Q3, 5), (P4, Q4, 4))[num_drafts - 2]
    assert_law(Case(p, num_new, method=method), draft_model(q, num_drafts))


@pytest.mark.parametrize("method", METHODS)
def test_greedy_drafts(method):
    assert_law(Case(P3, num_new=5, method=method), draft_model(Q3, 3, greedy=True))


@pytest.mark.parametrize("method", METHODS)
def test_ngram_drafts(method):
    case = Case(P3, num_new=4, prompts=NGRAM_PROMPTS, method=method)
    assert_law(case, specdec.NGram(3))


def test_plain():
    assert_law(Case(P4, num_new=4), None)


@pytest.mark.parametrize("method", ["token", "block"])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.5},
        {"temperature": 1.5},
        {"top_k": 2},
        {"temperature": 0.7, "top_p": 0.8},
        {"confidence_threshold": 0.55},
        {"confidence_threshold": 0.55, "top_k": 2, "temperature": 1.5},
    ],
    ids=str,
)
def test_options_of_the_draft(options, method):
    """Whatever the draft's options, its q is the law it drew from."""
    assert_law(Case(P4, num_new=4, method=method), draft_model(Q4, 3, **options))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.6, "top_k": 3},
        {"temperature": 1.4, "top_p": 0.8},
        {"temperature": 1.2, "min_p": 0.3},
    ],
    ids=str,
)
def test_filters_on_both_sides(sampling, method):
    case = Case(P4, num_new=4, sampling=tuple(sampling.items()), method=method)
    assert 0 < (case.law() == 0).sum() < 12
    assert_law(case, draft_model(Q4, 3))


@pytest.mark.parametrize("drafter", ["sampled", "confident", "ngram"])
@pytest.mark.parametrize("method", ["match", "block"])
def test_ragged_rows(method, drafter):
    """Prompts of several lengths and ends in one batch."""
    prompts = ((0,), (1, 2, 1, 0, 2, 1), (0, 2, 2))
    make = {
        "sampled": lambda: draft_model(Q3, 2),
        "confident": lambda: draft_model(Q3, 3, confidence_threshold=0.5),
        "ngram": lambda: specdec.NGram(2),
    }
    assert_law(Case(P3, num_new=4, prompts=prompts, method=method), make[drafter]())


# ---- what must be caught ----


@dataclass(frozen=True)
class Saboteur(specdec.DraftModel):
    """A ``DraftModel`` whose sessions are of another kind."""

    kind: type = DraftModelSession

    def start(self, context):
        return self.kind(self, context)


class _LiesAboutTemperature(DraftModelSession):
    def _draw(self, logits, start, step):
        return super()._draw(logits, start, step)._replace(probs=(logits / 1.5).softmax(-1))


class _SoftmaxOfGreedy(DraftModelSession):
    def __init__(self, options, context):
        super().__init__(options, context)
        self.has_probs = True

    def _draw(self, logits, start, step):
        return super()._draw(logits, start, step)._replace(probs=logits.softmax(-1))


class _SharesNoise(DraftModelSession):
    def _key(self, start, step):
        raise NotImplementedError

    def _draw(self, logits, start, step):
        options = {"return_probs": True, **self._sampling.kwargs(), **self._key(start, step)}
        return sample(logits, seed=self._seeds, **options)


class _SharesAcceptNoise(_SharesNoise):
    def _key(self, start, step):
        return {"position": start, "step": step + 1, "stream": Stream.ACCEPT}


class _SharesResidualNoise(_SharesNoise):
    def _key(self, start, step):
        return {"position": start, "step": step, "stream": Stream.RESIDUAL}


class _KeysByPosition(_SharesNoise):
    """Harmless to token verification. Block looks at drafts beyond the one it rejects, and the
    next round would draw those again."""

    def _key(self, start, step):
        return {"position": start + step, "stream": Stream.DRAFT}


class _DropsUnlikelyToken(DraftModelSession):
    """Withdraws a token after it was drawn, because it is unlikely."""

    def propose(self, rows, limits):
        draft = super().propose(rows, limits)
        if draft is None:
            return None
        q = draft.probs.gather(2, draft.tokens[..., None]).squeeze(2)
        kept = (q >= 0.3).int().cumprod(dim=1).sum(dim=1).tolist()
        return Draft(draft.tokens, [*map(min, draft.num_tokens, kept)], draft.probs)


def _next_token_from(logits_row):
    """A verifier whose last token is drawn from the target's law at another row."""

    def verify(logits, draft_tokens, **kwargs):
        result = verify_chain(logits, draft_tokens, **kwargs)
        column = logits_row(result.num_accepted, (draft_tokens >= 0).sum(dim=1))
        rows = torch.arange(len(column))
        drawn = sample(
            logits[rows, column.clamp(0, logits.shape[1] - 1)],
            seed=kwargs["seed"],
            position=kwargs["position"],
            step=result.num_accepted,
            stream=Stream.RESIDUAL,
        )
        changes = column >= 0
        last = result.tokens[rows, result.num_accepted]
        result.tokens[rows, result.num_accepted] = torch.where(changes, drawn.tokens, last)
        return result

    return verify


VERIFIERS = {
    # after a rejection: from p itself
    "residual skipped": _next_token_from(lambda kept, num: torch.where(kept < num, kept, -1)),
    # after a full acceptance: one row early
    "bonus from the wrong row": _next_token_from(
        lambda kept, num: torch.where((kept == num) & (num > 0), kept - 1, -1)
    ),
    # after a rejection: the row of the next token
    "correction from the wrong row": _next_token_from(
        lambda kept, num: torch.where(kept < num, kept + 1, -1)
    ),
}

COUNTER = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.4, 0.3, 0.2, 0.1])
PAIR = torch.tensor([0.3, 0.7]), torch.tensor([0.7, 0.3])
# what is wrong, where it shows: laws, drafts, new tokens, rows, methods
SABOTAGE = [
    ("lies about its q", _LiesAboutTemperature, (P4, Q4), 3, 4, 3000, ("token", "block")),
    ("softmax q of greedy drafts", _SoftmaxOfGreedy, (P3, Q3), 2, 5, 3000, ("token", "block")),
    ("accept noise shared", _SharesAcceptNoise, (P3, Q3), 3, 5, 3000, ("token", "block")),
    ("residual noise shared", _SharesResidualNoise, COUNTER, 3, 4, 6000, ("token", "block")),
    ("noise keyed by position", _KeysByPosition, PAIR, 2, 3, 6000, ("block",)),
    ("drops unlikely tokens", _DropsUnlikelyToken, (P3, Q3), 3, 5, 3000, ("token", "block")),
    *(
        (name, verify, (P3, Q3), 2, 5, 3000, ("token", "block"))
        for name, verify in VERIFIERS.items()
    ),
]


@pytest.mark.parametrize(
    "wrong, laws, num_drafts, num_new, num_rows, method",
    [
        pytest.param(wrong, laws, num_drafts, num_new, num_rows, method, id=f"{name}-{method}")
        for name, wrong, laws, num_drafts, num_new, num_rows, methods in SABOTAGE
        for method in methods
    ],
)
def test_sabotage_is_caught(wrong, laws, num_drafts, num_new, num_rows, method, monkeypatch):
    """The same experiment is green with the real thing and red with the wrong one."""
    p, q = laws
    case = Case(p, num_new, num_rows, method=method)
    greedy = wrong is _SoftmaxOfGreedy
    options = {"model": markov_model(q, SIZE), "num_draft_tokens": num_drafts, "greedy": greedy}
    assert_law(case, Saboteur(**options))
    if isinstance(wrong, type):
        assert case.p_value(Saboteur(**options, kind=wrong)) < RED
    else:
        monkeypatch.setattr("specdec.decode.verify_chain", wrong)
        assert case.p_value(Saboteur(**options)) < RED


def test_position_noise_is_harmless_to_token():
    """So that the control above is about block verification, and about nothing else."""
    p, q = PAIR
    case = Case(p, num_new=3, num_rows=6000, method="token")
    assert_law(case, Saboteur(markov_model(q, SIZE), 2, kind=_KeysByPosition))


# ---- and no more is rejected than theory says ----

P, Q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])


def measured_acceptance(method, num_drafts=1, p=P, q=Q, num_new=10, num_rows=2000, **options):
    sampling = {k: v for k, v in options.items() if k in ("temperature", "top_k", "top_p", "min_p")}
    out = specdec.generate(
        markov_model(p, SIZE),
        torch.zeros(num_rows, 1, dtype=torch.int64),
        drafter=draft_model(q, num_drafts, greedy=options.get("greedy", False)),
        method=method,
        seed=list(range(num_rows)),
        do_sample=True,
        max_new_tokens=num_new,
        **sampling,
    )
    return out.stats.acceptance_rate, out.stats.drafted


def assert_rate(rate, trials, expected):
    assert abs(rate - expected) < 5 * math.sqrt(expected * (1 - expected) / trials)


def filtered(law, sampling):
    return torch.tensor(reference_law(law.log().numpy(), **sampling))


@pytest.mark.parametrize("method", ["token", "block"])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.7}, {"top_k": 2}, {"top_p": 0.75}, {"temperature": 1.5, "min_p": 0.5}],
    ids=str,
)
def test_acceptance_is_the_overlap(sampling, method):
    """sum_x min(p, q), of the filtered laws; p q, for drafts without probabilities, is far off."""
    p, q = filtered(P, sampling), filtered(Q, sampling)
    rate, trials = measured_acceptance(method, **sampling)
    assert trials > 5000
    assert_rate(rate, trials, torch.minimum(p, q).sum().item())


def test_acceptance_of_greedy_drafts():
    for method in METHODS:
        rate, trials = measured_acceptance(method, greedy=True)
        assert_rate(rate, trials, P[2].item())


def test_match_with_shared_noise():
    """Both sides take argmax(log law + same Gumbel): they agree on x with probability
    1 / sum_y max(p_y / p_x, q_y / q_x), in all at least (1 - TV) / (1 + TV)."""
    for p, q in ((P, Q), COUNTER):
        rate, trials = measured_acceptance("match", p=p, q=q)
        ratios = torch.maximum(p / p[:, None], q / q[:, None])
        expected = (1 / ratios.sum(dim=1)).sum().item()
        distance = 1 - torch.minimum(p, q).sum().item()
        assert expected > (1 - distance) / (1 + distance)
        assert_rate(rate, trials, expected)
        assert rate > 1.5 * (p * q).sum()


def test_block_keeps_more_than_token():
    """Sun et al. 2024, theorem 2: never fewer in the mean; here clearly more."""
    kept = {}
    for method in ("token", "block"):
        out = specdec.generate(
            markov_model(P, SIZE),
            torch.zeros(2000, 1, dtype=torch.int64),
            drafter=draft_model(Q, 4),
            method=method,
            seed=list(range(2000)),
            do_sample=True,
            max_new_tokens=20,
        )
        kept[method] = out.stats.mean_accepted
    assert kept["block"] > kept["token"] * 1.02


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7, "top_k": 10},
        {"temperature": 0.5, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    ],
    ids=str,
)
def test_own_drafts_are_kept(sampling, method):
    """p = q up to rounding: a draft filtered differently from its verification loses some."""
    target = tiny_model(seed=1)
    ids, mask = left_pad(random_prompts(3, 9, 1, 5, 5, 5, 5, 5))
    out = specdec.generate(
        target,
        ids,
        mask,
        drafter=specdec.DraftModel(target, 4),
        method=method,
        seed=3,
        do_sample=True,
        max_new_tokens=50,
        **sampling,
    )
    assert out.stats.acceptance_rate > 0.99
