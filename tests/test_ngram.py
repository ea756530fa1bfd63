"""Drafting from the text itself."""

import random
import statistics
import time

import pytest
import torch

import specdec
from specdec.drafters import Sampling
from specdec.drafters.ngram import NGramIndex
from specdec.testing import Spy, count_model, left_pad


def lookup(tokens, limit=10, *, min_ngram=1, max_ngram=3):
    return NGramIndex(min_ngram, max_ngram).lookup(tokens, limit)


@pytest.mark.parametrize(
    "tokens, expected",
    [
        # the longest match wins over a later one: 1 2 3 at the start, 2 3 and 3 afterwards
        ([1, 2, 3, 4, 9, 2, 3, 5, 8, 3, 6, 1, 2, 3], [4, 9, 2, 3, 5, 8, 3, 6, 1, 2]),
        # of equally long ones the latest
        ([1, 2, 7, 1, 2, 8, 5, 1, 2], [8, 5, 1, 2]),
        # without a trigram a bigram, without that one token
        ([4, 2, 3, 5, 9, 2, 3], [5, 9, 2, 3]),
        ([4, 3, 5, 9, 3], [5, 9, 3]),
        # the end is not an earlier occurrence of itself
        ([1, 2, 3], []),
        ([3, 3], [3]),
        # a match may overlap the end, and what follows it may be short
        ([5, 5, 5, 5], [5]),
        ([1, 2, 1, 2, 1, 2], [1, 2]),
        ([7], []),
        ([], []),
    ],
    ids=str,
)
def test_by_hand(tokens, expected):
    assert lookup(tokens) == expected
    for limit in (0, 1, 3):
        assert lookup(tokens, limit) == expected[:limit]


def test_lengths_of_the_ngram():
    tokens = [1, 2, 3, 4, 9, 3, 5, 2, 3, 6, 1, 2, 3]
    assert lookup(tokens, 1, max_ngram=3) == [4]
    assert lookup(tokens, 1, max_ngram=2) == [6]
    assert lookup(tokens, 1, max_ngram=1) == [6]
    assert lookup([4, 3, 5, 9, 3], 1, min_ngram=2) == []
    assert lookup([4, 3, 5, 9, 4, 3], 1, min_ngram=2) == [5]
    assert lookup([4, 3, 5, 9, 4, 3], 1, min_ngram=3, max_ngram=3) == []


# inputs and answers of Saxena's prompt look-up, by the original implementation. It takes the first
# occurrence, and only one that a whole draft follows; ours is the latest, and may be short
GOLDEN = [
    ([1, 2, 3, 4, 5, 6, 7, 1, 2, 3], 3, 3, [4, 5, 6], [4, 5, 6]),
    ([1, 2, 3, 4, 9, 2, 3], 3, 4, [4, 9, 2, 3], [4, 9, 2, 3]),
    ([1, 2, 3, 4, 9, 2, 3], 3, 2, [4, 9], [4, 9]),
    ([7, 8, 1, 2, 5, 7, 8, 3, 4, 6, 7, 8], 2, 2, [1, 2], [3, 4]),
    ([1, 2, 3, 4, 5], 3, 2, [], []),
    ([5, 5, 5, 5, 5, 5], 3, 2, [5, 5], [5]),
]


@pytest.mark.parametrize("tokens, max_ngram, limit, original, ours", GOLDEN)
def test_beside_prompt_lookup(tokens, max_ngram, limit, original, ours):
    assert lookup(tokens, limit, max_ngram=max_ngram) == ours
    if ours != original:
        # both are continuations of an earlier occurrence of the same n-gram
        end = tokens[-max_ngram:]
        places = [i for i in range(max_ngram, len(tokens)) if tokens[i - max_ngram : i] == end]
        assert tokens[places[0] :][:limit] == original
        assert tokens[places[-1] :][:limit] == ours


def slow_lookup(tokens, limit, min_ngram, max_ngram):
    for n in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(tokens) - 1, n - 1, -1):
            if len(tokens) >= n and tokens[start - n : start] == tokens[-n:]:
                return tokens[start : start + limit]
    return []


@pytest.mark.parametrize("min_ngram, max_ngram", [(1, 3), (2, 2), (1, 1), (2, 5)])
def test_growing_text_equals_a_search(min_ngram, max_ngram):
    """The index of a text that grew by any steps gives what a search of the whole text gives."""
    rng = random.Random(0)
    for alphabet in (2, 4, 10):
        index = NGramIndex(min_ngram, max_ngram)
        tokens = []
        while len(tokens) < 150:
            tokens += rng.choices(range(alphabet), k=rng.randint(1, 6))
            limit = rng.randint(0, 5)
            expected = slow_lookup(tokens, limit, min_ngram, max_ngram) if limit else []
            assert index.lookup(tokens, limit) == expected


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens: expected >= 1, got 0"),
        ({"min_ngram": 0}, "min_ngram, max_ngram: expected 1 <= min_ngram <= max_ngram, got 0, 3"),
        ({"min_ngram": 4}, "got 4, 3"),
    ],
    ids=str,
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        specdec.NGram(**options)


# ---- in the loop ----


def context(batch: int) -> specdec.DraftContext:
    return specdec.DraftContext(
        target=None,
        batch=batch,
        capacity=20_000,
        vocab_size=300,
        device=torch.device("cpu"),
        sampling=Sampling(),
        method="auto",
        seeds=[0] * batch,
    )


def test_rows_have_indices_of_their_own():
    """A row finds nothing in its neighbour's text, also after rows were dropped."""
    model = count_model()
    prompts = [[5, 6, 7, 8, 9, 4], [20, 3, 5], [30, 5, 6, 7, 3, 4], [8, 9, 10, 11, 12, 13, 7]]
    ids, mask = left_pad(prompts, pad=31)
    spy = Spy(specdec.NGram(4))
    out = specdec.generate(
        model, ids, mask, drafter=spy, max_new_tokens=8, eos_token_id=8, pad_token_id=31
    )
    new = [[5, 6, 7, 8], [6, 7, 8], [5, 6, 7, 8], [8]]
    assert [
        row[:n] for row, n in zip(out.sequences[:, 7:].tolist(), (4, 3, 4, 1), strict=True)
    ] == new
    for rows, limits, draft in spy.calls:
        for b, row in enumerate(rows):
            expected = lookup(row, min(4, limits[b]))
            assert (draft.tokens[b] if draft else []) == expected
    assert {len(rows) for rows, _, _ in spy.calls} >= {4, 3}


def test_never_more_than_the_limits():
    """M1, D2: at most num_draft_tokens, and at most what the budget can use."""
    model = count_model()
    prompt = [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0]]
    for num_new in range(1, 10):
        spy = Spy(specdec.NGram(4))
        out = specdec.generate(model, torch.tensor(prompt), drafter=spy, max_new_tokens=num_new)
        assert out.sequences[0, 11:].tolist() == list(range(1, num_new + 1))
        drafted = [len(draft.tokens[0]) if draft else 0 for _, _, draft in spy.calls]
        assert max(drafted) <= 4
        assert drafted[0] == min(4, num_new - 1)
        assert out.stats.rounds == -(-num_new // 5)


def test_a_long_history_costs_nothing():
    """L1: 16k tokens, under a millisecond a round; the text is indexed once, by the first."""
    rng = random.Random(0)
    tokens = rng.choices(range(300), k=16_000)
    session = specdec.NGram().start(context(batch=1))
    session.propose([tokens], [10])
    seconds, hits = [], 0
    for _ in range(50):
        tokens += rng.choices(range(300), k=rng.randint(1, 8))
        began = time.perf_counter()
        draft = session.propose([tokens], [10])
        seconds.append(time.perf_counter() - began)
        hits += draft is not None
    assert hits > 40
    assert statistics.median(seconds) < 1e-3


def test_drafts_follow_what_was_kept():
    """Half as many after a miss, twice as many after a full hit; 2 at least, as asked at most."""
    text = list(range(20)) * 2

    def lengths(kept, **options):
        session = specdec.NGram(8, **options).start(context(batch=1))
        drafted = []
        for num in (*kept, 0):
            draft = session.propose([text], [100])
            drafted.append(len(draft.tokens[0]))
            session.observe([num])
        return drafted

    assert lengths([3, 4, 0, 1, 1, 2, 4]) == [8, 4, 8, 4, 2, 2, 4, 8]
    assert lengths([3, 0, 1], adaptive=False) == [8] * 4


def test_drafts_of_each_row_follow_its_own():
    """Also after a round without a draft, which says nothing, and after a row has gone."""
    text = list(range(20)) * 2
    session = specdec.NGram(8).start(context(batch=3))
    session.propose([text] * 3, [100] * 3)
    session.observe([0, 8, 5])
    session.propose([[1, 2], text, [3, 4]], [100] * 3)
    session.observe([0, 8, 0])
    session.keep([0, 2])
    assert [len(row) for row in session.propose([text] * 2, [100] * 2).tokens] == [4, 6]
