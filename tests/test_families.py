"""Every supported family, past the edge of its sliding window."""

import functools

import pytest
import torch

import specdec
from specdec.model import CachedModel
from specdec.testing import (
    FAMILIES,
    Oracle,
    greedy_path,
    left_pad,
    noisy_copy,
    random_prompts,
    tiny_model,
    wrong_copy,
)

NUM_NEW = 18
LENGTHS = (3, 12, 1)  # one begins beyond the window of 8, two cross it
KINDS = ("none", "ngram", "self", "wrong", "noisy", "oracle")
# transformers has no sdpa for Gemma 2
PAIRS = [(f, a) for f in FAMILIES for a in ("sdpa", "eager") if (f, a) != ("gemma2", "sdpa")]


@functools.cache
def case(family, attention="eager"):
    target = tiny_model(family, seed=0)
    target.set_attn_implementation(attention)
    drafts = {"self": target, "wrong": wrong_copy(target), "noisy": noisy_copy(target)}
    prompts = random_prompts(*LENGTHS)
    return target, drafts, prompts, greedy_path(target, prompts, NUM_NEW)


def make_drafter(kind, family, attention="eager"):
    _, drafts, prompts, path = case(family, attention)
    if kind == "none":
        return None
    if kind == "ngram":
        return specdec.NGram(5)
    if kind == "oracle":
        return Oracle([p + new for p, new in zip(prompts, path.tokens, strict=True)])
    return specdec.DraftModel(drafts[kind], 5)


def test_windows_are_there():
    windowed = {"qwen2", "mistral", "gemma2", "gemma3", "phi3"}
    for family in FAMILIES:
        window = getattr(case(family)[0].config, "sliding_window", None)
        assert window == (8 if family in windowed else None)


@pytest.mark.parametrize(
    "family, attention, kind",
    [
        (family, attention, kind)
        for family, attention in PAIRS
        for kind in KINDS
        # each drafter once; with eager attention as well what tries the masks most
        if attention == "sdpa" or family == "gemma2" or kind in ("none", "oracle")
    ],
)
def test_greedy_batch(family, attention, kind, monkeypatch):
    target, _, prompts, path = case(family, attention)
    ids, mask = left_pad(prompts)
    drafter = make_drafter(kind, family, attention)
    # rows of the oracle drift apart: one row of all tokens, and a row each
    for packed in (True, False) if kind == "oracle" else (None,):
        if packed is not None:
            monkeypatch.setattr(CachedModel, "_packs", lambda *args, packed=packed: packed)
        out = specdec.generate(target, ids, mask, drafter=drafter, max_new_tokens=NUM_NEW)
        path.check(out)
    assert len(set(sum(path.tokens, []))) > 6, "choose another seed: nothing but repetition"
    rate = out.stats.acceptance_rate
    assert {"self": rate == 1, "wrong": rate == 0}.get(kind, True)
    assert kind != "oracle" or 0.2 < rate < 0.9


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_match(family):
    target, _, prompts, _ = case(family)
    ids, mask = left_pad(prompts)
    options = {"method": "match", "seed": [4, 5, 6], "do_sample": True, "max_new_tokens": NUM_NEW}
    plain = specdec.generate(target, ids, mask, **options)
    for kind in ("noisy", "ngram"):
        out = specdec.generate(target, ids, mask, drafter=make_drafter(kind, family), **options)
        assert torch.equal(out.sequences, plain.sequences)
    assert len(set(plain.sequences[:, ids.shape[1] :].flatten().tolist())) > 20
