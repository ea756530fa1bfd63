"""The figures of a call: identities, and what a round costs in reads of the device."""

import contextlib
import json

import pytest
import torch

import specdec
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


@pytest.fixture(scope="module")
def target():
    return tiny_model(seed=1)


def assert_adds_up(out):
    """Every count, derived again from the mask of accepted tokens and from the output."""
    stats = out.stats
    assert stats.emitted == stats.accepted + stats.rounds - stats.trimmed
    for row, mask, reason in zip(stats.rows, out.accepted_mask, out.finish_reasons, strict=True):
        assert row.emitted == len(mask) == row.accepted + row.rounds - row.trimmed
        # each round but a cut-off last one ends with a token that nobody drafted
        cut_off = bool(mask) and mask[-1]
        assert row.rounds == mask.count(False) + cut_off
        # what the verifier kept beyond the output: a cut-off round's bonus token is trimmed too
        assert row.trimmed == row.accepted - mask.count(True) + cut_off
        assert row.trimmed == 0 or reason in ("eos", "stop")
        assert 0 <= row.accepted <= row.drafted
    for name in ("rounds", "drafted", "accepted", "emitted", "trimmed"):
        assert getattr(stats, name) == sum(getattr(row, name) for row in stats.rows)
    drafted, accepted = stats.drafted_per_position, stats.accepted_per_position
    assert sum(drafted) == stats.drafted and sum(accepted) == stats.accepted
    assert len(drafted) == len(accepted)
    for counts in (drafted, accepted):
        assert counts == sorted(counts, reverse=True)
    assert all(a <= d for a, d in zip(accepted, drafted, strict=True))
    assert stats.target_forwards == len(stats.target_widths)
    assert max(row.rounds for row in stats.rows) == stats.target_forwards  # no chunks, here
    if stats.drafted:
        assert stats.acceptance_rate == stats.accepted / stats.drafted
    assert stats.mean_accepted == stats.accepted / stats.rounds
    assert stats.tokens_per_forward == stats.emitted / stats.rounds


SAMPLED = {"do_sample": True, "seed": 3}


@pytest.mark.parametrize(
    "kind, sampling",
    [
        *((kind, {}) for kind in ("none", "ngram", "noisy", "self", "oracle")),
        *((kind, SAMPLED) for kind in ("none", "ngram", "noisy", "self")),
    ],
    ids=str,
)
def test_identities(kind, sampling, target):
    prompts = random_prompts(3, 9, 1)
    path = greedy_path(target, prompts, 24)
    drafter = {
        "none": None,
        "ngram": specdec.NGram(4),
        "noisy": specdec.DraftModel(noisy_copy(target), 4),
        "self": specdec.DraftModel(target, 4),
        "oracle": Oracle([p + new for p, new in zip(prompts, path.tokens, strict=True)]),
    }[kind]
    ids, mask = left_pad(prompts)
    # ends of sequence in some row's way, now and then inside a block
    for eos in ([], path.tokens[0][9:10], path.tokens[1][4:5] + path.tokens[2][7:8]):
        out = specdec.generate(
            target,
            ids,
            mask,
            drafter=drafter,
            max_new_tokens=24,
            eos_token_id=eos or None,
            pad_token_id=0,
            **sampling,
        )
        assert_adds_up(out)


def test_trimmed_by_hand():
    """Rounds 1 2 3 4 5 and 6 [7 8 9 10]: the end at 7 trims 8 9 10, the bonus being 10."""
    model = count_model()
    drafter = Spy(specdec.DraftModel(model, 4))
    ids = torch.tensor([[20, 0]])
    out = specdec.generate(model, ids, drafter=drafter, max_new_tokens=20, eos_token_id=7)
    stats = out.stats
    assert out.sequences.tolist() == [[20, 0, 1, 2, 3, 4, 5, 6, 7]]
    assert (stats.rounds, stats.drafted, stats.accepted, stats.emitted) == (2, 8, 8, 7)
    assert stats.trimmed == 3
    assert out.accepted_mask == [[True] * 4 + [False] + [True] * 2]
    assert stats.drafted_per_position == stats.accepted_per_position == [2, 2, 2, 2]
    assert (stats.mean_accepted, stats.tokens_per_forward) == (4.0, 3.5)
    assert_adds_up(out)


def test_positions_by_hand():
    """Drafts of lengths 3, 2 and 0, of which 2, 0 and 0 are kept."""
    stats = specdec.Stats()
    for drafted, accepted in ((3, 2), (2, 0), (0, 0)):
        stats.count_round(drafted, accepted)
    assert stats.drafted_per_position == [2, 2, 1]
    assert stats.accepted_per_position == [1, 1, 0]


def test_nothing_happened():
    stats = specdec.Stats(rows=[specdec.RowStats()])
    assert stats.rows[0].acceptance_rate == 0
    for name in ("acceptance_rate", "mean_accepted", "tokens_per_forward", "outside_share"):
        assert getattr(stats, name) == 0
    assert specdec.Stats().rounds == 0
    json.dumps(specdec.Stats().to_dict())


def test_to_dict_is_json(target):
    drafter = specdec.DraftModel(noisy_copy(target), 3)
    ids, mask = left_pad(random_prompts(3, 9))
    stats = specdec.generate(target, ids, mask, drafter=drafter, max_new_tokens=10).stats
    read = json.loads(json.dumps(stats.to_dict()))
    assert read["emitted"] == 20 and read["method"] == "greedy"
    assert read["rows"][1]["emitted"] == 10
    assert read["tokens_per_forward"] == stats.tokens_per_forward
    assert read["target_widths"] == stats.target_widths
    assert set(read["seconds"]) == {"draft", "target", "verify", "rest", "total"}


def test_seconds(target):
    drafter = specdec.DraftModel(noisy_copy(target), 3)
    stats = specdec.generate(
        target, torch.tensor(random_prompts(7)), drafter=drafter, max_new_tokens=20
    ).stats
    seconds = stats.seconds
    assert all(value > 0 for value in seconds.values())
    parts = sum(seconds[name] for name in ("draft", "target", "verify", "rest"))
    assert parts == pytest.approx(seconds["total"])
    assert 0 < stats.forward_seconds < seconds["draft"] + seconds["target"]
    assert 0 < stats.outside_share < 1


# ---- reads of the device ----

READS = (
    "tolist",
    "item",
    "cpu",
    "numpy",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
)


@contextlib.contextmanager
def count_reads():
    """Counts calls that wait for a device and bring numbers to the host: on a GPU, each a sync."""
    calls = []

    def counting(name, method):
        def read(self, *args, **kwargs):
            calls.append(name)
            return method(self, *args, **kwargs)

        return read

    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            patch.setattr(torch.Tensor, name, counting(name, getattr(torch.Tensor, name)))
        yield calls


def test_reads_are_counted():
    with count_reads() as calls:
        x = torch.arange(3)
        x.tolist(), x[0].item(), bool(x[1]), int(x[2]), float(x[0]), [1, 2, 3][x[1]]
        x.cpu(), x.numpy(), x.nonzero()
    assert {*calls} == {*READS}
    assert torch.tensor(1).item() == 1 and len(calls) == 9


@pytest.mark.parametrize(
    "sampling",
    [{}, {"do_sample": True, "seed": 1}, {"do_sample": True, "seed": 1, "method": "match"}],
    ids=["greedy", "auto", "match"],
)
@pytest.mark.parametrize("kind", ["none", "ngram", "noisy"])
def test_reads_per_round(kind, sampling, target, monkeypatch):
    """L1: at most two a round, and as many for K = 8 as for 2, for 8 rows as for one."""
    # packing is for CPUs only, and what it reads the host itself has made
    monkeypatch.setattr(CachedModel, "_packs", lambda *args: False)
    draft = noisy_copy(target)
    per_round = {}
    for num_drafts in (2, 8):
        drafter = {
            "none": None,
            "ngram": specdec.NGram(num_drafts),
            "noisy": specdec.DraftModel(draft, num_drafts),
        }[kind]
        for batch in (1, 8):
            ids, mask = left_pad(random_prompts(*range(3, 3 + batch)))
            counts = []
            for num_new in (10, 30):
                with count_reads() as calls:
                    out = specdec.generate(
                        target, ids, mask, drafter=drafter, max_new_tokens=num_new, **sampling
                    )
                counts.append((len(calls), out.stats.target_forwards))
            # the difference: without what preparing a call costs
            (few, rounds), (many, more) = counts
            per_round[num_drafts, batch] = (many - few) / (more - rounds)
    assert all(0 < reads <= 2 for reads in per_round.values())
    assert len(set(per_round.values())) == 1
