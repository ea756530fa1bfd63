import json
import math

import numpy as np
import pytest
import torch

from specdec import NGram, bench
from specdec.bench import Contender, Run, make_units, measure, quantile, run_once, summarise
from specdec.plots import plot_bench
from specdec.prompts import Prompt
from specdec.stats import RowStats, Stats
from specdec.testing import count_model, tiny_model

COPY = Prompt("c", "copy", True, "x")
CHAT = Prompt("t", "chat", False, "y")
PLAIN = Contender("plain")
NGRAM = Contender("ngram", NGram())


def made_run(contender, unit, repeat, seconds, tokens, *, method="greedy", drafted=0, accepted=0):
    rounds = len(tokens[0]) - accepted
    stats = Stats(
        rows=[RowStats(rounds=rounds, drafted=drafted, accepted=accepted, emitted=len(tokens[0]))],
        method=method,
        seconds={"total": seconds / 2},
        forward_seconds=seconds / 2 * 0.75,
    )
    return Run(contender, unit, repeat, seconds, tokens, [[False] * len(tokens[0])], stats)


def test_summary_by_hand():
    """Two prompts, two repeats: figures of a group are those of its prompts taken together."""
    runs = [
        made_run("plain", 0, 0, 2.0, [[1] * 8]),
        made_run("plain", 0, 1, 4.0, [[1] * 8]),
        made_run("plain", 1, 0, 1.0, [[2] * 4]),
        made_run("plain", 1, 1, 1.0, [[2] * 4]),
        made_run("ngram", 0, 0, 1.0, [[1] * 8], drafted=12, accepted=6),
        made_run("ngram", 0, 1, 1.0, [[1] * 8], drafted=12, accepted=6),
        made_run("ngram", 1, 0, 1.0, [[2] * 4], drafted=8, accepted=1),
        made_run("ngram", 1, 1, 1.0, [[2] * 3 + [3]], drafted=8, accepted=1),
    ]
    report = summarise(runs, [[COPY], [CHAT]], [PLAIN, NGRAM])
    assert list(report["kinds"]) == ["copy", "chat"]
    plain, ngram = report["total"]["plain"], report["total"]["ngram"]
    # 12 tokens in 3 and in 5 seconds: 4 and 2.4 a second
    assert plain["tokens_per_second"]["median"] == pytest.approx(3.2)
    assert plain["tokens_per_second"]["p20"] == pytest.approx(2.4 + 0.2 * 1.6)
    assert plain["seconds"]["median"] == pytest.approx(4)
    assert ngram["tokens_per_second"]["median"] == pytest.approx(6)
    assert ngram["speedup"] == pytest.approx(6 / 3.2)
    assert ngram["new_tokens"] == 12
    # 24 tokens in 2 * (2 + 3) rounds, 14 of 40 drafts accepted
    assert ngram["tokens_per_forward"] == pytest.approx(2.4)
    assert ngram["mean_accepted"] == pytest.approx(1.4)
    assert ngram["acceptance_rate"] == pytest.approx(0.35)
    assert ngram["outside_share"] == pytest.approx(0.25)
    assert (ngram["identical"], ngram["identical_rows"], ngram["compared_rows"]) == (False, 3, 4)
    assert plain["acceptance_rate"] is None and plain["identical"] is None
    assert report["kinds"]["copy"] == report["copy_heavy"] == report["prompts"][0]["contenders"]
    copied = report["copy_heavy"]["ngram"]
    assert copied["speedup"] == pytest.approx(8 / 3) and copied["identical"] is True
    json.dumps(report, allow_nan=False)


def test_what_is_compared_with_plain():
    """Sampled with match: the tokens of plain sampling. With block, or by transformers: others."""

    def compared(method, plain_method="match"):
        runs = [
            made_run("plain", 0, 0, 1.0, [[1, 2]], method=plain_method),
            made_run("other", 0, 0, 1.0, [[1, 3]], method=method),
        ]
        other = summarise(runs, [[CHAT]], [PLAIN, Contender("other")])["total"]["other"]
        return other["compared_rows"]

    assert compared("match") == 1
    assert compared("block") == 0
    assert compared("greedy", "greedy") == 1


def test_units():
    prompts = [COPY, COPY, CHAT]
    assert make_units(prompts, 2) == [[COPY, COPY], [CHAT]]
    runs = [made_run("plain", u, 0, 1.0, [[1], [1]]) for u in (0, 1)]
    report = summarise(runs, [[COPY, CHAT], [COPY, COPY]], [PLAIN])
    assert list(report["kinds"]) == ["mixed", "copy"]
    assert [p["copy_heavy"] for p in report["prompts"]] == [False, True]
    assert summarise(runs[:1], [[COPY, CHAT]], [PLAIN])["copy_heavy"] is None
    with pytest.raises(ValueError, match="batch_size: expected >= 1, got 0"):
        make_units(prompts, 0)
    with pytest.raises(ValueError, match="prompts: none given"):
        make_units([])


@pytest.mark.parametrize("n", [1, 2, 3, 10])
def test_quantile_is_numpys(n):
    values = torch.rand(n).tolist()
    for q in (0, 0.2, 0.5, 0.8, 1):
        assert quantile(values, q) == pytest.approx(np.quantile(values, q))


def test_order_of_runs(monkeypatch):
    """Warm-up first; then unit by unit, and who begins changes."""
    calls, ticks = [], []

    def fake(model, inputs, contender, options, seed, unit=None, repeat=None):
        calls.append((contender.name, seed, unit, repeat))
        return calls[-1]

    class Batch:
        def to(self, device):
            return self

    monkeypatch.setattr(bench, "run_once", fake)
    monkeypatch.setattr(bench, "encode_prompts", lambda *_: Batch())
    third = Contender("third")
    runs = measure(
        *(count_model(), None, [[COPY], [CHAT]], [PLAIN, NGRAM, third]),
        options={},
        repeats=2,
        seed=7,
        on_run=lambda: ticks.append(1),
    )
    assert [c[0] for c in calls[:3]] == ["plain", "ngram", "third"] and runs == calls[3:]
    assert len(ticks) == len(calls) == bench.count_runs(2, 3, 2) == 15
    order = [[c[0] for c in runs[i : i + 3]] for i in range(0, 12, 3)]
    assert [group[0] for group in order] == ["plain", "ngram", "ngram", "third"]
    assert all(sorted(group) == ["ngram", "plain", "third"] for group in order)
    assert [(c[1], c[2], c[3]) for c in runs[::3]] == [(7, 0, 0), (7, 1, 0), (8, 0, 1), (8, 1, 1)]
    with pytest.raises(ValueError, match="repeats: expected >= 1, got 0"):
        measure(None, None, [[COPY]], [PLAIN], options={}, repeats=0)


@pytest.mark.parametrize("transformers", [False, True])
def test_run_counts_what_was_said(transformers):
    """Rows of a batch end at different lengths; padding is not speech."""
    model = count_model()
    model.generation_config.eos_token_id = 10
    model.generation_config.pad_token_id = 10
    ids = torch.tensor([[31, 1, 2], [5, 6, 7]])
    inputs = {"input_ids": ids, "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}
    contender = Contender("x", NGram(), transformers=transformers)
    options = {"do_sample": False, "max_new_tokens": 12}
    state = torch.random.get_rng_state()
    run = run_once(model, inputs, contender, options, seed=3)
    assert run.tokens == [[3, 4, 5, 6, 7, 8, 9, 10], [8, 9, 10]]
    assert run.num_tokens == 11 and run.seconds > 0
    assert (run.stats is None) == transformers
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("transformers", [False, True])
def test_run_is_reproducible(transformers):
    model = tiny_model()
    inputs = {"input_ids": torch.tensor([[3, 4, 5]]), "attention_mask": torch.ones(1, 3).long()}
    options = {"do_sample": True, "temperature": 1.5, "top_k": 0, "max_new_tokens": 20}
    contender = Contender("x", transformers=transformers)
    first, again, other = (run_once(model, inputs, contender, options, s).tokens for s in (1, 1, 2))
    assert first == again != other


def test_plot(tmp_path):
    """Every shape of report makes a picture: with and without drafts, one kind or many."""
    runs = [
        made_run("plain", 0, 0, 1.0, [[1] * 8]),
        made_run("ngram", 0, 0, 1.0, [[1] * 8], drafted=12, accepted=6),
        Run("transformers", 0, 0, 1.0, [[1] * 8]),
    ]
    everybody = [PLAIN, NGRAM, Contender("transformers", transformers=True)]
    for n, (kind, options) in enumerate(
        [
            (COPY, {"do_sample": False, "max_new_tokens": 8}),
            (CHAT, {"do_sample": True, "temperature": 0.7, "top_k": 0, "max_new_tokens": 8}),
        ]
    ):
        for contenders in (everybody, everybody[:1], everybody[::2]):
            report = {
                "model": "m",
                "dtype": "float32",
                "device": {"device": "cpu", "name": "a CPU"},
                "threads": 2,
                "options": options,
                "repeats": 1,
                "batch_size": 1,
                "contenders": [c.name for c in contenders],
                **summarise(runs, [[kind]], contenders),
            }
            path = tmp_path / f"{n}-{len(contenders)}.png"
            plot_bench(report, path)
            assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
            assert math.isfinite(report["total"]["plain"]["speedup"])
