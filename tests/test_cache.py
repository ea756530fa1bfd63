"""The row cache and the forwards around it: slots, rollback, ragged rows, prefill."""

from dataclasses import dataclass

import pytest
import torch
from transformers import DynamicCache

import specdec
from specdec import model as model_module
from specdec.cache import RowCache
from specdec.drafters import Drafter, DraftSession
from specdec.model import CachedModel
from specdec.testing import (
    Oracle,
    Spy,
    count_model,
    greedy_path,
    left_pad,
    noisy_copy,
    random_prompts,
    tiny_model,
)

FAMILIES = ["llama", "gpt2", "mistral", "gemma3"]  # rotary, learned, window, mixed windows


def slots(cached: CachedModel):
    """Keys and values of all layers, [B, slots, heads, dim] each."""
    return [x.transpose(0, 1) for layer in cached._cache.layers for x in (layer.keys, layer.values)]


def addresses(cached: CachedModel):
    return [x.data_ptr() for x in slots(cached)]


def from_scratch(model, tokens: list[int]):
    """Logits [L, V], and keys and values as ``slots`` has them, of one plain forward."""
    cache = DynamicCache(config=model.config)
    name = CachedModel(model, 1, 1)._cache_name
    with torch.no_grad():
        out = model(input_ids=torch.tensor([tokens]), use_cache=True, **{name: cache})
    stored = [x.transpose(1, 2)[0] for layer in cache.layers for x in (layer.keys, layer.values)]
    return out.logits[0], stored


@torch.no_grad()
def run(cached: CachedModel, tokens, drafts=None, num_drafts=None):
    """Each row's logits, [W, V]."""
    drafts = None if drafts is None else torch.tensor(drafts)
    logits = cached.extend(tokens, drafts, num_drafts)
    return [logits.row(b) for b in range(len(cached.lengths))]


def assert_holds(cached: CachedModel, texts: list[list[int]]) -> None:
    """What the cache holds of each row is what one forward over the row computes.

    A window layer of transformers' cache keeps the last window only: compare that.
    """
    for b, (text, length) in enumerate(zip(texts, cached.lengths, strict=True)):
        assert length == len(text)
        for ours, theirs in zip(slots(cached), from_scratch(cached.model, text)[1], strict=True):
            num = theirs.shape[0]
            torch.testing.assert_close(ours[b, length - num : length], theirs, rtol=0, atol=1e-5)


# ---- CachedModel, by hand ----


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_rollback_by_hand(family, packed, monkeypatch):
    """Rows of uneven length draft, lose some, go on: logits and slots as without the detour."""
    monkeypatch.setattr(CachedModel, "_packs", lambda *args: packed)
    model = tiny_model(family, seed=1)
    texts = random_prompts(30, 30, 30)
    cached = CachedModel(model, 3, 40)
    first = run(cached, [texts[0][:4], texts[1][:9], texts[2][:1]])
    for b, n in enumerate((4, 9, 1)):
        expected = from_scratch(model, texts[b][:n])[0]
        torch.testing.assert_close(first[b][-1], expected[-1], rtol=0, atol=1e-4)

    # each row: one committed token, and drafts of which it keeps 2, 0 and 1
    drafts = [texts[0][5:7] + [3], [4, 5, -1], [texts[2][2], -1, -1]]
    logits = run(cached, [texts[0][4:5], texts[1][9:10], texts[2][1:2]], drafts, [3, 2, 1])
    assert cached._cache.packed == packed
    assert [len(row) for row in logits] == ([4, 3, 2] if packed else [4, 4, 4])
    for b, text in enumerate([texts[0][:7] + [3], texts[1][:10] + [4, 5], texts[2][:3]]):
        num = (3, 2, 1)[b]
        expected = from_scratch(model, text)[0][-num - 1 :]
        torch.testing.assert_close(logits[b][: num + 1], expected, rtol=0, atol=1e-4)
    cached.rollback([7, 10, 3])
    assert_holds(cached, [texts[0][:7], texts[1][:10], texts[2][:3]])

    # two tokens, one, and a row that sits out
    logits = run(cached, [texts[0][7:9], texts[1][10:11], []])
    for b, n in ((0, 9), (1, 11)):
        expected = from_scratch(model, texts[b][:n])[0]
        torch.testing.assert_close(logits[b][-1], expected[-1], rtol=0, atol=1e-4)
    assert_holds(cached, [texts[0][:9], texts[1][:11], texts[2][:3]])
    assert cached.widths == [9, 4 + 3 + 2 if packed else 4, 2]


def test_equal_rows_need_no_index():
    """Rows of one length write one slice; a column without a token goes to the bin."""
    cached = CachedModel(tiny_model(), 2, 10)
    prompts = random_prompts(4, 4)
    run(cached, prompts)
    assert cached._cache._write == slice(0, 4)
    run(cached, [[5], [6]], [[7], [8]])
    assert cached._cache._write == slice(4, 6)
    run(cached, [[5], []])
    assert cached._cache._write.tolist() == [6 * 2, cached._cache.bin * 2 + 1]
    assert cached._cache.bin == 10
    # two tokens and one, packed: slot by slot, and the rows within a slot
    run(cached, [[5], [6]], [[7], [-1]], [1, 0])
    assert cached._cache.packed
    assert cached._cache._write.tolist() == [7 * 2, 8 * 2, 6 * 2 + 1]
    assert cached.lengths == [9, 7]


def test_unused_slots_are_finite_and_do_not_matter():
    """Hidden slots are multiplied by 0: they must not be NaN, and may be anything else."""
    model = tiny_model("mistral", seed=1)
    texts = random_prompts(12, 12)
    outs = []
    for junk in (0.0, 1e4):
        cached = CachedModel(model, 2, 20)
        run(cached, [texts[0][:6], texts[1][:2]])
        assert all(x.isfinite().all() for x in slots(cached))
        for x in slots(cached):
            x[0, 6:] += junk
            x[1, 2:] += junk
        outs.append(run(cached, [texts[0][6:7], texts[1][2:3]], [[3, 4], [5, -1]], [2, 1]))
        assert all(x.isfinite().all() for x in slots(cached))
    torch.testing.assert_close(outs[0][0], outs[1][0], rtol=0, atol=0)
    torch.testing.assert_close(outs[0][1][:2], outs[1][1][:2], rtol=0, atol=0)


def test_keep_drops_the_others():
    model = tiny_model(seed=1)
    texts = random_prompts(12, 12, 12, 12)
    cached = CachedModel(model, 4, 20)
    run(cached, [texts[0][:3], texts[1][:7], texts[2][:2], texts[3][:5]])
    before = [x.clone() for x in slots(cached)]
    cached.keep([1, 3])
    assert cached.lengths == [7, 5]
    for x, y in zip(slots(cached), before, strict=True):
        assert torch.equal(x, y[[1, 3]])
    logits = run(cached, [texts[1][7:8], texts[3][5:6]])
    for row, (b, n) in enumerate([(1, 8), (3, 6)]):
        expected = from_scratch(model, texts[b][:n])[0][-1]
        torch.testing.assert_close(logits[row][-1], expected, rtol=0, atol=1e-4)
    assert_holds(cached, [texts[1][:8], texts[3][:6]])


def test_keep_before_the_first_forward():
    """A drafter may not have run yet when rows end."""
    model = tiny_model(seed=1)
    cached = CachedModel(model, 3, 20)
    cached.keep([2])
    prompt = random_prompts(5)
    logits = run(cached, prompt)
    expected = from_scratch(model, prompt[0])[0][-1]
    torch.testing.assert_close(logits[0][-1], expected, rtol=0, atol=1e-4)


def test_capacity_is_exact():
    """The last position is a slot like any other; the bin is behind it."""
    cache = RowCache(batch=1, capacity=7, num_layers=1)
    assert (cache.num_slots, cache.bin) == (8, 7)
    model = tiny_model(seed=1)
    cached = CachedModel(model, 2, 7)
    texts = random_prompts(7, 5)
    run(cached, [texts[0][:5], texts[1][:2]])
    run(cached, [texts[0][5:6], texts[1][2:3]], [[texts[0][6]], [-1]], [1, 0])
    assert_holds(cached, [texts[0], texts[1][:3]])


# ---- through generate ----


class Witness(CachedModel):
    """Remembers itself, and where its slots were after each forward."""

    seen: list = []

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.addresses = []
        Witness.seen.append(self)

    def extend(self, *args, **kwargs):
        logits = super().extend(*args, **kwargs)
        self.addresses.append(addresses(self))
        return logits


@pytest.fixture
def witness(monkeypatch):
    """The target's ``CachedModel`` of the calls of this test."""
    monkeypatch.setattr("specdec.hf.CachedModel", Witness)
    monkeypatch.setattr(Witness, "seen", [])
    return Witness.seen


@dataclass(frozen=True)
class Inspector(Drafter):
    """Drafts as ``inner`` does, after a look at what the target's cache holds."""

    inner: Drafter
    targets: list[CachedModel]

    def start(self, context):
        inner, (target,) = self.inner.start(context), self.targets

        class Session(DraftSession):
            def propose(session, rows, limits):
                if any(target.lengths):
                    assert_holds(target, [row[:-1] for row in rows])
                return inner.propose(rows, limits)

        return Session()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_committed_slots_are_those_of_one_forward(family, packed, witness, monkeypatch):
    """Between rounds that kept none, some and all drafts, the cache has all but the last token."""
    monkeypatch.setattr(CachedModel, "_packs", lambda *args: packed)
    model = tiny_model(family, seed=1)
    prompts = random_prompts(3, 9, 1)
    path = greedy_path(model, prompts, 20)
    texts = [p + new for p, new in zip(prompts, path.tokens, strict=True)]
    ids, mask = left_pad(prompts)
    drafter = Inspector(Oracle(texts), witness)
    out = specdec.generate(model, ids, mask, drafter=drafter, max_new_tokens=20)
    assert out.sequences[:, ids.shape[1] :].tolist() == path.tokens
    assert len(out.stats.target_widths) > 6


def test_slots_stay_where_they_are(witness):
    """Not one reallocation, whatever is rolled back; dropping a row may cost one."""
    model = tiny_model(seed=1)
    ids, mask = left_pad(random_prompts(3, 9, 1))
    drafter = specdec.DraftModel(noisy_copy(model), 3)
    specdec.generate(model, ids[:1], mask[:1], drafter=drafter, max_new_tokens=40)
    (cached,) = witness
    assert len(cached.addresses) > 10
    assert all(a == cached.addresses[0] for a in cached.addresses)

    witness.clear()
    specdec.generate(model, ids, mask, drafter=drafter, max_new_tokens=40)
    (cached,) = witness
    changes = sum(a != b for a, b in zip(cached.addresses, cached.addresses[1:], strict=False))
    assert changes <= 2


def test_rounds_with_and_without_drafts_alternate():
    """C2: each hit of the n-grams is used up by its round, and the next finds nothing."""
    model = count_model()
    # 6 7 and 9+ were seen before, 8 and 12 were not
    prompt = [5, 6, 7, 20, 9, 10, 11, 21, 13, 14, 15, 22, 4]
    drafter = Spy(specdec.NGram(3))
    out = specdec.generate(model, torch.tensor([prompt]), drafter=drafter, max_new_tokens=13)
    assert out.sequences[0, len(prompt) :].tolist() == list(range(5, 18))
    drafted = [draft.tokens[0] if draft else [] for _, _, draft in drafter.calls]
    assert drafted == [[], [6, 7, 20], [], [10, 11, 21], [], [14, 15, 22], []]
    assert out.stats.target_widths == [len(prompt), 4, 1, 4, 1, 4, 1]
    assert out.stats.accepted == 6


# ---- prefill ----


def count_head_rows(model) -> list[int]:
    """Grows by how many positions enter the language-model head, each forward."""
    rows = []
    head = model.get_output_embeddings()
    head.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[:-1].numel()))
    return rows


@pytest.mark.parametrize("kind", ["none", "ngram", "noisy"])
def test_prefill_computes_the_last_logits_only(kind):
    model = tiny_model(seed=1, max_position_embeddings=512)
    draft = noisy_copy(model)
    drafter = {
        "none": None,
        "ngram": specdec.NGram(4),
        "noisy": specdec.DraftModel(draft, 4),
    }[kind]
    heads = [count_head_rows(model), count_head_rows(draft)]
    prompt = random_prompts(300)
    specdec.generate(model, torch.tensor(prompt), drafter=drafter, max_new_tokens=12)
    assert max(heads[0]) <= 5
    assert max(heads[1], default=0) <= 2


@pytest.mark.parametrize("kind", ["none", "ngram", "noisy"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_in_chunks(family, kind, monkeypatch):
    """Long prompts go in pieces, also beside short ones, and nothing shows."""
    monkeypatch.setattr(model_module, "PREFILL_CHUNK", 64)
    size = {"n_positions": 512} if family == "gpt2" else {"max_position_embeddings": 512}
    model = tiny_model(family, seed=1, **size)
    prompts = random_prompts(300, 1, 65, 64, 130)
    path = greedy_path(model, prompts, 10)
    drafter = {
        "none": None,
        "ngram": specdec.NGram(4),
        "noisy": specdec.DraftModel(noisy_copy(model), 4),
    }[kind]
    alone = specdec.generate(model, torch.tensor(prompts[:1]), drafter=drafter, max_new_tokens=10)
    assert alone.stats.target_widths[:4] == [64] * 4
    assert 44 <= alone.stats.target_widths[4] <= 44 + 4
    assert torch.equal(alone.sequences[0, 300:], torch.tensor(path.tokens[0]))
    head = count_head_rows(model)
    ids, mask = left_pad(prompts)
    out = specdec.generate(model, ids, mask, drafter=drafter, max_new_tokens=10)
    path.check(out)
    num_chunks = 4  # of 64 tokens, then what is left of the longest prompt
    assert head[:num_chunks] == [len(prompts)] * num_chunks
    assert max(head) <= 5 * len(prompts)
    assert out.stats.target_widths[:num_chunks] == [64] * num_chunks
    assert max(out.stats.target_widths) <= 64 + 4
