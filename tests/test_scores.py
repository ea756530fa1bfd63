"""N2: scores, logits and log-probabilities of every emitted token, however it came about."""

import pytest
import torch
from transformers import LogitsProcessor

import specdec
from specdec.testing import count_model, left_pad, make_drafter, tiny_model

KINDS = ["none", "ngram", "self", "wrong", "noisy"]
PROMPTS = [[5, 17, 9], [18, 73, 9, 33, 16, 64, 18, 73, 9], [60]]
NEW = 14
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 12, "top_p": 0.95, "min_p": 0.01}
# sum of rounding in another shape of forward
CLOSE = {"rtol": 0, "atol": 1e-4}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def run(model, kind="noisy", K=3, prompts=PROMPTS, **options):
    ids, mask = left_pad(prompts)
    options = {
        "max_new_tokens": NEW,
        "output_scores": True,
        "output_logits": True,
        "top_logprobs": 3,
        "output_logprobs": True,
    } | options
    return specdec.generate(model, ids, mask, drafter=make_drafter(kind, model, K), **options)


def teacher_forced(model, row: torch.Tensor, prompt: list[int], num_new: int) -> torch.Tensor:
    """Logits [num_new, V] of a plain forward over a row's whole text, padding left out."""
    text = row[len(row) - num_new - len(prompt) :]
    with torch.no_grad():
        return model(text[None]).logits[0, len(prompt) - 1 : -1]


@pytest.mark.parametrize(
    "kind, method",
    [
        *[(kind, method) for kind in KINDS for method in ("greedy", "match")],
        # rules for drafts that were sampled
        *[(kind, method) for kind in KINDS[2:] for method in ("token", "block")],
    ],
)
def test_equal_a_teacher_forced_forward(model, kind, method):
    """For accepted, corrected and bonus tokens alike."""
    sampling = {} if method == "greedy" else SAMPLED | {"seed": 5}
    accepted = set()
    for K in (1, 3, 8):
        out = run(model, kind, K, method=method, **sampling)
        assert len(out.scores) == len(out.logits) == NEW
        assert out.logprobs.shape == (3, NEW)
        assert out.top_logprobs.shape == out.top_ids.shape == (3, NEW, 3)
        for b, prompt in enumerate(PROMPTS):
            row = out.sequences[b]
            logits = teacher_forced(model, row, prompt, NEW)
            got = torch.stack([step[b] for step in out.logits])
            torch.testing.assert_close(got, logits, **CLOSE)
            law = logits.log_softmax(-1)
            new = row[-NEW:, None]
            torch.testing.assert_close(out.logprobs[b], law.gather(1, new)[:, 0], **CLOSE)
            values, ids = law.topk(3)
            torch.testing.assert_close(out.top_logprobs[b], values, **CLOSE)
            assert torch.equal(out.top_ids[b], ids)
            accepted |= set(out.accepted_mask[b])
            assert len(out.accepted_mask[b]) == NEW
        assert out.scores[0].dtype == out.logits[0].dtype == torch.float32
    if kind in ("self", "noisy"):
        assert accepted == {True, False}


@pytest.mark.parametrize("method", ["match", "token", "block"])
def test_sampled_tokens_come_from_the_scores(model, method):
    """A token is never one that its own scores rule out; the scores are a filtered law."""
    out = run(model, "noisy", 3, method=method, seed=5, **SAMPLED)
    for step, scores in enumerate(out.scores):
        token = out.sequences[:, step - NEW]
        assert scores.gather(1, token[:, None]).isfinite().all()
        assert (scores.isfinite().sum(dim=1) <= SAMPLED["top_k"]).all()


class Halve(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores / 2 - input_ids[:, -1:] % 3


PROCESSED = [
    {},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    {"logits_processor": [Halve()], "suppress_tokens": [44, 36]},
    {"renormalize_logits": True, "repetition_penalty": 1.3},
]


@pytest.mark.parametrize("options", PROCESSED, ids=lambda o: ",".join(o) or "none")
@pytest.mark.parametrize("kind", KINDS)
def test_scores_equal_transformers(model, kind, options):
    """Processed scores and unprocessed logits, step by step, left-padded rows included."""
    ids, mask = left_pad(PROMPTS)
    expected = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    for K in (1, 8):
        out = run(model, kind, K, **options)
        assert torch.equal(out.sequences, expected.sequences)
        torch.testing.assert_close(out.scores, expected.scores, **CLOSE)
        torch.testing.assert_close(out.logits, expected.logits, **CLOSE)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3, "renormalize_logits": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_scores_equal_transformers(model, kind, options):
    """transformers' own list along the same path: scaled, and -inf where filtered."""
    ids, mask = left_pad(PROMPTS[1:2])
    out = run(model, kind, 3, PROMPTS[1:2], method="match", seed=5, **SAMPLED, **options)
    scores = []

    def follow(model, input_ids, logits_processor, **_):
        for n in range(input_ids.shape[1], out.sequences.shape[1]):
            prefix = out.sequences[:, :n]
            scores.append(logits_processor(prefix, model(prefix).logits[:, -1]))

    model.generate(
        ids, attention_mask=mask, custom_generate=follow, max_new_tokens=NEW, **SAMPLED, **options
    )
    torch.testing.assert_close(out.scores, tuple(scores), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_after_an_end(kind):
    """Trimmed with the tokens; zeros and nan behind the end of a row that others outlive."""
    model = count_model()
    out = run(model, kind, 8, [[0, 1], [10], [3, 20, 21]], eos_token_id=[4, 27], max_new_tokens=8)
    assert [row.emitted for row in out.stats.rows] == [3, 8, 6]
    assert len(out.scores) == len(out.logits) == out.sequences.shape[1] - 3 == 8
    assert out.logprobs.isnan().sum(dim=1).tolist() == [5, 0, 2]
    assert out.logprobs.isnan()[0].tolist() == [False] * 3 + [True] * 5
    for steps in (out.scores, out.logits):
        assert [bool(step[0].any()) for step in steps] == [True] * 3 + [False] * 5
        # rows that go on keep their own
        assert [int(step[1].argmax()) for step in steps] == list(range(11, 19))
        assert [int(step[2].argmax()) for step in steps[:6]] == list(range(22, 28))
    out = run(model, kind, 8, [[0, 1]], eos_token_id=5)
    assert len(out.scores) == len(out.logits) == out.logprobs.shape[1] == 4
    assert out.top_ids.shape == (1, 4, 3)


def test_only_what_was_asked_for(model):
    for name in ("output_scores", "output_logits", "output_logprobs"):
        ids, mask = left_pad(PROMPTS)
        out = specdec.generate(model, ids, mask, max_new_tokens=3, **{name: True})
        present = {f for f in ("scores", "logits", "logprobs") if getattr(out, f) is not None}
        assert present == {name.removeprefix("output_")}
        assert out.top_logprobs is None
    assert specdec.generate(model, ids, mask, max_new_tokens=3).scores is None


def test_output_is_a_transformers_model_output(model):
    out = run(model, K=2)
    assert torch.equal(out[0], out["sequences"])
    assert list(out)[:3] == ["sequences", "scores", "logits"]


def test_low_precision(model):
    """Reported in float32, from the logits in the model's own type."""
    model = tiny_model().to(torch.bfloat16)
    out = run(model, "ngram")
    assert {step.dtype for step in out.scores + out.logits} == {torch.float32}
    assert out.logprobs.dtype == torch.float32
    picked = torch.stack([step.argmax(-1) for step in out.scores], dim=1)
    assert torch.equal(picked, out.sequences[:, -NEW:])
