"""Drafting with a model: what it is fed, what it drafts, and which models it refuses."""

import copy
import math
import threading

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import specdec
from specdec.testing import (
    Spy,
    greedy_path,
    left_pad,
    noisy_copy,
    random_prompts,
    tiny_model,
    wrong_copy,
)
from specdec_kernels import sample

SAMPLED = {"do_sample": True, "temperature": 0.8, "seed": 7}


@pytest.fixture(scope="module")
def target():
    return tiny_model(seed=1)


@pytest.fixture(scope="module")
def noisy(target):
    return noisy_copy(target)


def watch(model) -> list[tuple[int, int]]:
    """Grows by the shape of ``input_ids`` at each forward of ``model``."""
    shapes = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    return shapes


# ---- what the draft model is fed ----


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_drafts", range(1, 7))
def test_own_drafts_are_all_kept(num_drafts, sampling, target):
    """C1: all of every round's, ceil(n / (K + 1)) forwards, and no token is encoded twice."""
    num_new, length, K = 60, 7, num_drafts
    draft = copy.deepcopy(target)
    shapes = watch(draft)
    drafter = Spy(specdec.DraftModel(draft, K))
    prompt = random_prompts(length)
    out = specdec.generate(
        target, torch.tensor(prompt), drafter=drafter, max_new_tokens=num_new, **sampling
    )
    stats = out.stats
    rounds = math.ceil(num_new / (K + 1))
    last = num_new - (rounds - 1) * (K + 1)  # tokens of the last round
    assert stats.accepted == stats.drafted == num_new - rounds
    assert stats.drafted_per_position == stats.accepted_per_position
    assert stats.rounds == stats.target_forwards == rounds
    assert stats.target_widths == [length + K, *[K + 1] * (rounds - 2), last]
    assert [draft.num_tokens for _, _, draft in drafter.calls] == [[K]] * (rounds - 1) + [
        [last - 1]
    ]

    # the last draft and the bonus token, then one draft after the other
    widths = [length, *[1] * (K - 1)]
    widths += [2, *[1] * (K - 1)] * (rounds - 2)
    widths += [2, *[1] * (last - 2)] if last > 1 else []
    assert shapes == [(1, width) for width in widths]
    assert stats.draft_forwards == len(widths)


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_drafts", [1, 3, 6])
def test_drafts_are_those_of_a_fresh_drafter(num_drafts, sampling, target, noisy):
    """C1: whatever was accepted before, the draft's cache is that of the committed prefix."""
    drafter = specdec.DraftModel(noisy, num_drafts)
    spy = Spy(drafter)
    ids, mask = left_pad(random_prompts(3, 9, 1))
    # two rows alike in length would hide a mixed-up row
    out = specdec.generate(target, ids, mask, drafter=spy, max_new_tokens=24, **sampling)
    assert 0.1 < out.stats.acceptance_rate < 0.95
    (context,) = spy.contexts
    compared = 0
    for rows, limits, draft in spy.calls:
        if len(rows) < 3 or draft is None:  # rows were dropped: seeds go by number
            continue
        fresh = drafter.start(context).propose(rows, limits)
        assert fresh.num_tokens == draft.num_tokens
        for b, n in enumerate(draft.num_tokens):
            assert torch.equal(fresh.tokens[b, :n], draft.tokens[b, :n])
            compared += n
            if draft.probs is not None:
                torch.testing.assert_close(
                    fresh.probs[b, :n], draft.probs[b, :n], rtol=0, atol=1e-4
                )
    assert compared > 30


def test_draft_forwards_are_few_and_narrow(target, noisy):
    """L2: at most K a round, at most two tokens wide after the prompt, in a batch as well."""
    K, (ids, mask) = 4, left_pad(random_prompts(3, 9, 1))
    for model in (copy.deepcopy(noisy), wrong_copy(target), copy.deepcopy(target)):
        shapes = watch(model)
        spy = Spy(specdec.DraftModel(model, K))
        out = specdec.generate(target, ids, mask, drafter=spy, max_new_tokens=30)
        assert out.stats.draft_forwards == len(shapes) <= K * len(spy.calls)
        assert shapes[0] == (3, 9)
        assert max(width for _, width in shapes[1:]) <= 2


def test_wrong_drafts_cost_no_forward(target):
    """L2: one token a forward, as plain decoding."""
    out = specdec.generate(
        target,
        torch.tensor(random_prompts(7)),
        drafter=specdec.DraftModel(wrong_copy(target), 4),
        max_new_tokens=30,
    )
    assert out.stats.accepted == 0
    assert out.stats.target_forwards == out.stats.emitted == 30
    assert out.stats.target_widths == [7 + 4, *[5] * 25, 4, 3, 2, 1]


@pytest.mark.parametrize("rows", [1, 3])
def test_rounds_without_drafts_leave_nothing_stale(rows, target):
    """C2: three drafts, none, three, none: all are kept, and an empty round is one token wide."""
    ids, mask = left_pad(random_prompts(3, 9, 1)[:rows])
    spy = Spy(specdec.DraftModel(copy.deepcopy(target), 3), schedule=(3, 0))
    out = specdec.generate(target, ids, mask, drafter=spy, max_new_tokens=40)
    assert out.stats.accepted == out.stats.drafted == rows * 24
    assert out.stats.target_widths == [ids.shape[1] + 3, *[1, 4] * 7, 1]
    greedy_path(target, random_prompts(3, 9, 1)[:rows], 40).check(out)


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_as_many_drafts_as_asked_for(sampling, target, noisy):
    """M1: three a round, less only where the budget ends; never one that cannot be used."""
    spy = Spy(specdec.DraftModel(noisy, 3))
    out = specdec.generate(
        target, torch.tensor(random_prompts(7)), drafter=spy, max_new_tokens=20, **sampling
    )
    for rows, limits, draft in spy.calls:
        left = 7 + 20 - len(rows[0])
        assert limits == [left - 1]
        assert (draft.num_tokens if draft else [0]) == [min(3, left - 1)]
    assert out.stats.drafted == sum(draft.num_tokens[0] for _, _, draft in spy.calls if draft)


# ---- no state between calls ----


def result(out):
    return out.sequences.tolist(), out.accepted_mask, out.stats.target_widths


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["ngram", "noisy"])
def test_calls_do_not_see_each_other(kind, sampling, target, noisy):
    """C6: the same object for A, B, A; and again after a call that was cut off."""

    def make():
        return specdec.NGram(4) if kind == "ngram" else specdec.DraftModel(noisy, 4)

    class Broken:
        calls = 0

        def put(self, value):
            self.calls += 1
            if self.calls == 4:
                raise RuntimeError("the reader left")

        def end(self):
            pass

    a, b = (torch.tensor([p]) for p in random_prompts(7, 12))
    options = {"max_new_tokens": 20, **sampling}
    fresh = [result(specdec.generate(target, ids, drafter=make(), **options)) for ids in (a, b)]
    shared = make()
    for ids, expected in ((a, fresh[0]), (b, fresh[1]), (a, fresh[0])):
        assert result(specdec.generate(target, ids, drafter=shared, **options)) == expected
    with pytest.raises(RuntimeError, match="the reader left"):
        specdec.generate(target, b, drafter=shared, streamer=Broken(), **options)
    assert result(specdec.generate(target, a, drafter=shared, **options)) == fresh[0]


def test_two_threads_share_a_target(target, noisy):
    """C6: each with a drafter of its own."""
    prompts = random_prompts(7, 12)
    drafters = [specdec.DraftModel(noisy, 3), specdec.DraftModel(copy.deepcopy(noisy), 5)]
    jobs = list(zip(prompts, drafters, strict=True))

    def generate(job):
        prompt, drafter = job
        ids = torch.tensor([prompt])
        return result(specdec.generate(target, ids, drafter=drafter, max_new_tokens=40))

    expected = [generate(job) for job in jobs]
    got = [[None] * 3 for _ in jobs]

    def work(i):
        for repeat in range(3):
            got[i][repeat] = generate(jobs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [[result] * 3 for result in expected]


# ---- options ----


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_confidence_threshold(sampling, target, noisy):
    """The first token without a probability that high is the last one of its draft."""
    threshold = 0.25
    prompts = random_prompts(3, 9, 1)
    ids, mask = left_pad(prompts)
    spy = Spy(specdec.DraftModel(noisy, 6, confidence_threshold=threshold))
    out = specdec.generate(target, ids, mask, drafter=spy, max_new_tokens=24, **sampling)
    lengths = set()
    for rows, limits, draft in spy.calls:
        if draft is None:
            continue
        for b, n in enumerate(draft.num_tokens):
            text = torch.tensor([rows[b] + draft.tokens[b, :n].tolist()])
            with torch.no_grad():
                logits = noisy(text).logits[0, len(rows[b]) - 1 : -1]
            sure = (logits / sampling.get("temperature", 1)).softmax(-1).amax(-1) >= threshold
            assert sure[: n - 1].all()
            assert n in (6, limits[b]) or not sure[n - 1]
            lengths.add(n)
    assert len(lengths) > 3
    if not sampling:
        greedy_path(target, prompts, 24).check(out)


def test_confidence_bounds(target, noisy):
    ids = torch.tensor(random_prompts(7))
    drafted = {}
    for threshold in (0.0, 0.2, 1.0):
        drafter = specdec.DraftModel(noisy, 4, confidence_threshold=threshold)
        out = specdec.generate(target, ids, drafter=drafter, max_new_tokens=20)
        drafted[threshold] = out.stats.drafted / out.stats.rounds
    assert drafted[0.0] > 3 > drafted[0.2] > drafted[1.0]
    # nothing is certain: one draft a round, except in the last
    assert drafted[1.0] <= 1


def test_greedy_drafts_of_a_sampled_request(target, noisy):
    """The argmax of the draft model; nothing to test q with, so "auto" is match."""
    spy = Spy(specdec.DraftModel(noisy, 3, greedy=True))
    ids = torch.tensor(random_prompts(7))
    out = specdec.generate(target, ids, drafter=spy, max_new_tokens=20, **SAMPLED)
    assert out.stats.method == "match"
    for rows, _, draft in spy.calls:
        if draft is not None:
            assert draft.probs is None
            path = greedy_path(noisy, rows, draft.num_tokens[0])
            assert draft.tokens.tolist() == path.tokens


def test_options_reach_the_draft(target, noisy):
    """q is the draft's law after its own options, else after the request's."""
    for own, sampling in (
        ({}, {"temperature": 0.8, "top_k": 5}),
        ({"temperature": 1.7, "top_k": 3}, {"temperature": 1.7, "top_k": 3}),
        ({"top_k": 0, "top_p": 0.5}, {"temperature": 0.8, "top_p": 0.5}),
    ):
        spy = Spy(specdec.DraftModel(noisy, 2, **own))
        ids = torch.tensor(random_prompts(7))
        options = {"do_sample": True, "seed": 1, "temperature": 0.8, "top_k": 5}
        out = specdec.generate(target, ids, drafter=spy, max_new_tokens=12, **options)
        assert out.stats.method == "block"
        rows, _, draft = spy.calls[0]
        with torch.no_grad():
            logits = noisy(torch.tensor(rows)).logits[:, -1]
        law = sample(logits, return_probs=True, **sampling).probs
        torch.testing.assert_close(draft.probs[:, 0], law, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens: expected >= 1, got 0"),
        ({"confidence_threshold": 1.5}, r"confidence_threshold: expected a number in \[0, 1\]"),
        ({"temperature": -1.0}, "temperature: expected a finite number >= 0, got -1.0"),
        ({"temperature": float("nan")}, "temperature: expected a finite number"),
        ({"top_k": -3}, "top_k: expected an integer >= 0"),
        ({"top_p": 1.5}, r"top_p: expected a number in \[0, 1\], got 1.5"),
        ({"min_p": -0.1}, r"min_p: expected a number in \[0, 1\], got -0.1"),
    ],
    ids=str,
)
def test_bad_options(options, message, noisy):
    with pytest.raises(ValueError, match=message):
        specdec.DraftModel(noisy, **options)


# ---- vocabularies ----


def word_tokenizer(words: list[str], name: str) -> PreTrainedTokenizerFast:
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), name_or_path=name)


def test_permuted_tokenizers_are_refused(target, noisy):
    """F2: equal sizes, other ids. The message names both and a token that differs."""
    words = [f"w{i}" for i in range(97)]
    ours = word_tokenizer(words, "org/target")
    theirs = word_tokenizer([*words[:40], words[41], words[40], *words[42:]], "org/draft")
    ids = torch.tensor(random_prompts(5))

    def generate(tokenizer):
        drafter = specdec.DraftModel(noisy, 3, tokenizer=tokenizer, target_tokenizer=ours)
        return specdec.generate(target, ids, drafter=drafter, max_new_tokens=4)

    with pytest.raises(ValueError, match=r"org/draft.*org/target.*'w40' is id 41 there and 40"):
        generate(theirs)
    with pytest.raises(ValueError, match=r"96 tokens.*97 tokens.*'w96' is id None there and 96"):
        generate(word_tokenizer(words[:96], "org/draft"))
    assert generate(word_tokenizer(words, "org/same")).stats.emitted == 4


def test_sizes_that_cannot_be_one_tokenizer_are_refused(target):
    draft = tiny_model(vocab_size=50)
    ids = torch.tensor(random_prompts(5))
    with pytest.raises(ValueError, match="has 50 ids, the target's has 97.*[Cc]ross-tokenizer"):
        specdec.generate(target, ids, drafter=specdec.DraftModel(draft), max_new_tokens=4)


def resized(model, vocab_size: int):
    """A copy with more ids, which it never gives."""
    other = copy.deepcopy(model)
    size = model.config.vocab_size
    other.resize_token_embeddings(vocab_size, mean_resizing=False)
    with torch.no_grad():
        # the new ids' logits are those of id 5, less a little
        other.lm_head.weight[size:] = other.lm_head.weight[5] * 0.9
    return other


@pytest.mark.parametrize("larger", ["target", "draft"])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_padded_vocabularies(larger, sampling, target, noisy):
    """97 ids and 104: the ids that one side lacks are not drafted, and not in the way."""
    big, small = (target, noisy) if larger == "target" else (noisy, target)
    big = resized(big, 104)
    if larger == "target":
        model, drafter = big, specdec.DraftModel(small, 4)
    else:
        model, drafter = small, specdec.DraftModel(big, 4)
    prompts = random_prompts(3, 9, 1)
    ids, mask = left_pad(prompts)
    spy = Spy(drafter)
    out = specdec.generate(model, ids, mask, drafter=spy, max_new_tokens=30, **sampling)
    assert out.stats.accepted > 5
    for _, _, draft in spy.calls:
        if draft is not None:
            assert draft.tokens.max() < 97
            assert draft.probs is None or draft.probs.shape[-1] == 97
    if sampling:
        plain = {"method": "match", **sampling, "max_new_tokens": 30}
        match = specdec.generate(model, ids, mask, drafter=drafter, **plain)
        assert torch.equal(match.sequences, specdec.generate(model, ids, mask, **plain).sequences)
    else:
        greedy_path(model, prompts, 30).check(out)


def test_ids_the_draft_has_not(target):
    """A padded target may give an id behind its tokenizer's: the draft reads another instead."""
    model = tiny_model(seed=1, vocab_size=104)
    prompts = [[103, 98, 5], [100]]
    path = greedy_path(model, prompts, 30)
    assert any(token >= 97 for tokens in path.tokens for token in tokens)
    ids, mask = left_pad(prompts)
    drafter = specdec.DraftModel(target, 4)
    path.check(specdec.generate(model, ids, mask, drafter=drafter, max_new_tokens=30))


# ---- other kinds of models ----


def test_draft_in_another_dtype(target):
    """K2: bfloat16 drafts for a float32 target."""
    draft = copy.deepcopy(target).to(torch.bfloat16)
    prompts = random_prompts(3, 9, 1)
    ids, mask = left_pad(prompts)
    drafter = specdec.DraftModel(draft, 4)
    out = specdec.generate(target, ids, mask, drafter=drafter, max_new_tokens=30)
    greedy_path(target, prompts, 30).check(out)
    assert out.stats.acceptance_rate > 0.5
    options = {"seed": 5, "do_sample": True, "method": "match", "max_new_tokens": 30}
    sampled = specdec.generate(target, ids, mask, drafter=drafter, **options)
    assert torch.equal(sampled.sequences, specdec.generate(target, ids, mask, **options).sequences)
    assert sampled.stats.acceptance_rate > 0.5


@pytest.mark.parametrize("pair", [("llama", "mistral"), ("mistral", "llama"), ("gpt2", "gemma3")])
def test_other_family_drafts(pair):
    """C3: also one with a sliding window for one without."""
    model, draft = (tiny_model(family, seed=1) for family in pair)
    prompts = random_prompts(3, 12, 1)
    ids, mask = left_pad(prompts)
    path = greedy_path(model, prompts, 24)
    out = specdec.generate(
        model, ids, mask, drafter=specdec.DraftModel(draft, 4), max_new_tokens=24
    )
    path.check(out)


def test_window_of_the_draft_only():
    """C3: a copy that sees the last 8 tokens only agrees until the window is full."""
    model = tiny_model("mistral", seed=1, sliding_window=None)
    draft = copy.deepcopy(model)
    draft.config.sliding_window = 8
    prompt = random_prompts(3)
    path = greedy_path(model, prompt, 40)
    drafter = Spy(specdec.DraftModel(draft, 4))
    out = specdec.generate(model, torch.tensor(prompt), drafter=drafter, max_new_tokens=40)
    path.check(out)
    assert all(out.accepted_mask[0][:4])
    assert 0 < out.stats.acceptance_rate < 1


def test_accelerate(target, noisy, tmp_path):
    """Models that accelerate placed: hooks around each module's forward."""
    from accelerate import cpu_offload, dispatch_model

    target.save_pretrained(tmp_path)
    placed = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"})
    hooked = dispatch_model(copy.deepcopy(target), {"": "cpu"}, force_hooks=True)
    assert hasattr(hooked.model.layers[0].mlp, "_hf_hook")
    prompts = random_prompts(3, 9)
    ids, mask = left_pad(prompts)
    path = greedy_path(target, prompts, 20)
    for model in (placed, hooked):
        for draft in (noisy, model):
            drafter = specdec.DraftModel(draft, 3)
            path.check(specdec.generate(model, ids, mask, drafter=drafter, max_new_tokens=20))

    offloaded = cpu_offload(copy.deepcopy(target), execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="^model: LlamaForCausalLM.*offloaded"):
        specdec.generate(offloaded, ids, mask, max_new_tokens=4)
    with pytest.raises(ValueError, match="^draft model: LlamaForCausalLM.*offloaded"):
        specdec.DraftModel(offloaded)


def test_a_draft_too_short_for_the_call_is_refused(target):
    """Rotary frequencies that would change while tokens are drafted."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    draft = tiny_model(seed=1, max_position_embeddings=16, rope_parameters=rope)
    ids = torch.tensor(random_prompts(7))
    with pytest.raises(ValueError, match="^draft model: rope_type 'dynamic'"):
        specdec.generate(target, ids, drafter=specdec.DraftModel(draft), max_new_tokens=20)
