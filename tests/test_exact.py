"""Token-identical output: greedy to ``model.generate``, seeded match to plain sampling."""

import functools
import json
import math
import subprocess
import sys

import pytest
import torch

import specdec
from specdec.model import CachedModel
from specdec.testing import (
    Oracle,
    greedy_path,
    left_pad,
    noisy_copy,
    random_prompts,
    tiny_model,
    wrong_copy,
)

NUM_NEW = 40
LENGTHS = (1, 2, 7, 30)
NUM_DRAFTS = (1, 2, 3, 5, 8)
KINDS = ("ngram", "self", "wrong", "noisy")
# seeds for which the two largest logits are never close, see GreedyPath.check
MODEL_SEEDS = {"llama": 1, "gpt2": 0}


@functools.cache
def models(family="llama", attention="sdpa"):
    target = tiny_model(family, seed=MODEL_SEEDS[family])
    target.set_attn_implementation(attention)
    return {
        "target": target,
        "self": target,
        "wrong": wrong_copy(target),
        "noisy": noisy_copy(target),
    }


def make_drafter(kind, num_draft_tokens, family="llama", attention="sdpa", **options):
    if kind == "none":
        return None
    if kind == "ngram":
        return specdec.NGram(num_draft_tokens, **options)
    return specdec.DraftModel(models(family, attention)[kind], num_draft_tokens, **options)


@functools.cache
def reference(family, attention, lengths, num_new=NUM_NEW):
    prompts = random_prompts(*lengths)
    return prompts, greedy_path(models(family, attention)["target"], prompts, num_new)


# ---- greedy ----


def matrix():
    """All of it; of eager attention, which has the same masks, some only among the slow tests."""
    for attention in ("sdpa", "eager"):
        for kind, num_drafts in [("none", 0), *((kind, k) for kind in KINDS for k in NUM_DRAFTS)]:
            slow = attention == "eager" and num_drafts in (1, 3, 5)
            marks = [pytest.mark.slow] if slow else []
            yield pytest.param(kind, num_drafts, attention, marks=marks)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind, num_drafts, attention", [*matrix()])
def test_greedy_is_generate(kind, num_drafts, length, attention):
    prompts, path = reference("llama", attention, (length,))
    drafter = make_drafter(kind, num_drafts, attention=attention)
    out = specdec.generate(
        models("llama", attention)["target"],
        torch.tensor(prompts),
        drafter=drafter,
        max_new_tokens=NUM_NEW,
    )
    path.check(out)
    assert out.stats.emitted == NUM_NEW
    assert out.stats.acceptance_rate == {"self": 1, "wrong": 0, "none": 0}.get(
        kind, out.stats.acceptance_rate
    )


def test_fixtures_are_mixed():
    """The noisy draft and the n-grams must be right now and then, and wrong now and then."""
    for kind in ("noisy", "ngram"):
        stats = []
        for length in LENGTHS:
            out = specdec.generate(
                models()["target"],
                torch.tensor(random_prompts(length)),
                drafter=make_drafter(kind, 5),
                max_new_tokens=NUM_NEW,
            )
            stats.append(out.stats)
        accepted = sum(s.accepted for s in stats)
        assert 0.02 < accepted / sum(s.drafted for s in stats) < 0.9
        assert accepted > 10


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "kind, num_drafts", [("none", 0), *((k, n) for k in KINDS for n in (2, 5))]
)
def test_batch_is_its_rows(kind, num_drafts, family):
    """Uneven prompts, left-padded: each row as alone, and as transformers' batch."""
    lengths, num_new = (3, 9, 1, 14), 24
    prompts, path = reference(family, "sdpa", lengths, num_new)
    target = models(family)["target"]
    drafter = make_drafter(kind, num_drafts, family)
    outs = []
    for extra in (0, 5):
        ids, mask = left_pad(prompts, extra=extra)
        out = specdec.generate(target, ids, mask, drafter=drafter, max_new_tokens=num_new)
        path.check(out)
        expected = target.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=num_new
        )
        assert torch.equal(out.sequences, expected)
        outs.append(out)
    near, far = outs
    assert torch.equal(near.sequences, far.sequences[:, 5:])
    assert near.stats.target_widths == far.stats.target_widths
    assert near.accepted_mask == far.accepted_mask


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("seed", range(4))
def test_any_pattern_of_acceptance(seed, family, packed, monkeypatch):
    """Each row keeps none, some or all of drafts of any length, so that rows drift apart."""
    monkeypatch.setattr(CachedModel, "_packs", lambda *args: packed)
    prompts, path = reference(family, "sdpa", (3, 9, 1, 14), 24)
    ids, mask = left_pad(prompts)
    texts = [prompt + new for prompt, new in zip(prompts, path.tokens, strict=True)]
    drafter = Oracle(texts, num_draft_tokens=6, seed=seed)
    target = models(family)["target"]
    out = specdec.generate(target, ids, mask, drafter=drafter, max_new_tokens=24)
    path.check(out)
    assert 0.2 < out.stats.acceptance_rate < 0.9
    assert len({row.rounds for row in out.stats.rows}) > 1


def test_ties_go_to_the_lowest_id():
    """Rows 3 and 7 of the head are equal: 7 is never the answer."""
    target = tiny_model(seed=1)
    head = target.lm_head.weight
    with torch.no_grad():
        head[3] *= 2
        head[7] = head[3]
    drafts = [noisy_copy(target), wrong_copy(target), target]
    prompts = random_prompts(7, 2, 11)
    for drafter in (
        None,
        specdec.NGram(4),
        *(specdec.DraftModel(draft, 4) for draft in drafts),
    ):
        for prompt in prompts:
            ids = torch.tensor([prompt])
            expected = target.generate(ids, do_sample=False, max_new_tokens=24)
            out = specdec.generate(target, ids, drafter=drafter, max_new_tokens=24)
            assert torch.equal(out.sequences, expected)
            assert 3 in out.sequences[0, len(prompt) :] and 7 not in out.sequences[0, len(prompt) :]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_bfloat16_differs_only_at_near_ties(family):
    """A forward of K + 1 tokens rounds differently from one of one token; nothing else may show."""
    target = tiny_model(family, seed=MODEL_SEEDS[family]).to(torch.bfloat16)
    drafts = [target, noisy_copy(target), wrong_copy(target)]
    drafters = [None, specdec.NGram(5), *(specdec.DraftModel(d, 4) for d in drafts)]
    compared = 0
    for prompt in random_prompts(2, 7, 30):
        ids = torch.tensor([prompt])
        plain = target.generate(
            ids,
            do_sample=False,
            max_new_tokens=NUM_NEW,
            output_logits=True,
            return_dict_in_generate=True,
        )
        for drafter in drafters:
            out = specdec.generate(target, ids, drafter=drafter, max_new_tokens=NUM_NEW)
            differing = (out.sequences != plain.sequences)[0, len(prompt) :].nonzero().flatten()
            compared += NUM_NEW
            if not len(differing):
                continue
            top = plain.logits[differing[0]][0].float().topk(2).values.tolist()
            ulp = 2.0 ** (math.floor(math.log2(abs(top[0]))) - 7)
            assert top[0] - top[1] <= 2 * ulp
            compared -= NUM_NEW - int(differing[0])
    assert compared > NUM_NEW * 5


# ---- sampled, by match ----

SAMPLING = {"do_sample": True, "temperature": 0.9, "top_p": 0.95}


@functools.cache
def plain_samples(lengths, num_new=NUM_NEW):
    """Plain sampling with a seed per row, row by row."""
    prompts = random_prompts(*lengths)
    rows = []
    for seed, prompt in enumerate(prompts):
        out = specdec.generate(
            models()["target"],
            torch.tensor([prompt]),
            seed=seed,
            max_new_tokens=num_new,
            **SAMPLING,
        )
        rows.append(out.sequences[0, len(prompt) :].tolist())
    return prompts, rows


@pytest.mark.parametrize("num_drafts", [1, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_match_is_plain_sampling(kind, num_drafts):
    """Alone and in a batch, whatever is drafted."""
    prompts, rows = plain_samples((3, 9, 1, 14))
    target, drafter = models()["target"], make_drafter(kind, num_drafts)
    options = {"drafter": drafter, "method": "match", "max_new_tokens": NUM_NEW, **SAMPLING}
    for seed, prompt in enumerate(prompts[:2]):
        out = specdec.generate(target, torch.tensor([prompt]), seed=seed, **options)
        assert out.sequences[0, len(prompt) :].tolist() == rows[seed]
    ids, mask = left_pad(prompts, extra=2)
    out = specdec.generate(target, ids, mask, seed=[0, 1, 2, 3], **options)
    assert out.sequences[:, ids.shape[1] :].tolist() == rows


@pytest.mark.parametrize("options", [{"confidence_threshold": 0.5}, {"greedy": True}, {"top_k": 3}])
def test_match_is_plain_sampling_with_draft_options(options):
    prompts, rows = plain_samples((3, 9, 1, 14))
    ids, mask = left_pad(prompts)
    out = specdec.generate(
        models()["target"],
        ids,
        mask,
        drafter=make_drafter("noisy", 4, **options),
        method="match",
        seed=[0, 1, 2, 3],
        max_new_tokens=NUM_NEW,
        **SAMPLING,
    )
    assert out.sequences[:, ids.shape[1] :].tolist() == rows


@pytest.mark.parametrize("method", ["match", "token", "block"])
@pytest.mark.parametrize("kind", ["none", "ngram", "noisy"])
def test_row_does_not_depend_on_its_place(kind, method):
    """Same seed and prompt: the same tokens in every row, among any neighbours."""
    prompts = random_prompts(3, 9, 1, 14, 6)
    target, drafter = models()["target"], make_drafter(kind, 3)
    options = {"drafter": drafter, "method": method, "max_new_tokens": 20, **SAMPLING}
    # the neighbours end early: rows are dropped and renumbered
    eos = specdec.generate(target, torch.tensor(prompts[1:2]), seed=6, **options).sequences[0, 15]
    options |= {"eos_token_id": int(eos), "pad_token_id": 0}
    alone = specdec.generate(target, torch.tensor(prompts[:1]), seed=5, **options)
    alone = alone.sequences[0, 3:].tolist()
    for place in (0, 2, 4):
        order = prompts[1:]
        order.insert(place, prompts[0])
        seeds = [6, 7, 8, 9]
        seeds.insert(place, 5)
        ids, mask = left_pad(order, extra=place)
        out = specdec.generate(target, ids, mask, seed=seeds, **options)
        got = out.sequences[place, ids.shape[1] :].tolist()
        assert got[: len(alone)] == alone
        assert out.finish_reasons.count("eos") >= 1
        assert len({row.rounds for row in out.stats.rows}) > 1


def test_equal_rows_with_equal_seeds_are_equal_and_others_are_not():
    target = models()["target"]
    ids = torch.tensor(random_prompts(5) * 3)
    out = specdec.generate(target, ids, seed=[1, 2, 1], max_new_tokens=20, **SAMPLING)
    assert torch.equal(out.sequences[0], out.sequences[2])
    assert not torch.equal(out.sequences[0], out.sequences[1])
    one = specdec.generate(target, ids, seed=1, max_new_tokens=20, **SAMPLING)
    assert one.sequences.tolist() == [out.sequences[0].tolist()] * 3


SCRIPT = """
import json, sys, torch, specdec
from specdec.testing import noisy_copy, random_prompts, tiny_model
target = tiny_model("llama", seed=1)
tokens = {}
for method in ("match", "block"):
    out = specdec.generate(
        target, torch.tensor(random_prompts(9)), drafter=specdec.DraftModel(noisy_copy(target), 3),
        method=method, seed=-3, do_sample=True, temperature=0.9, top_p=0.95, max_new_tokens=20,
    )
    tokens[method] = out.sequences[0].tolist()
print(json.dumps(tokens))
"""


def test_fresh_process_gives_the_same_tokens(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    target = tiny_model("llama", seed=1)
    for method, expected in json.loads(run.stdout).items():
        out = specdec.generate(
            target,
            torch.tensor(random_prompts(9)),
            drafter=specdec.DraftModel(noisy_copy(target), 3),
            method=method,
            seed=-3,
            max_new_tokens=20,
            **SAMPLING,
        )
        assert out.sequences[0].tolist() == expected


# ---- the global generator ----


@pytest.mark.parametrize("kind", ["none", "ngram", "noisy"])
@pytest.mark.parametrize("options", [{}, {"seed": 3, **SAMPLING}], ids=["greedy", "seeded"])
def test_global_generator_is_left_alone(kind, options):
    drafter = make_drafter(kind, 3)
    state = torch.get_rng_state()
    ids = torch.tensor(random_prompts(5))
    specdec.generate(models()["target"], ids, drafter=drafter, max_new_tokens=10, **options)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_seed_the_global_generator_decides():
    ids = torch.tensor(random_prompts(5) * 2)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        out = specdec.generate(models()["target"], ids, max_new_tokens=20, **SAMPLING)
        outs.append(out.sequences.tolist())
    assert outs[0] == outs[1] != outs[2]
    assert outs[0][0] != outs[0][1]
