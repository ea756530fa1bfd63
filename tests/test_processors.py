"""Logits processors at drafted positions: each sees the prefix it would see without drafts."""

import pytest
import torch
from transformers import LogitsProcessor

import specdec
from specdec.model import RowLogits
from specdec.processors import RowProcessors, process_round
from specdec.testing import count_model, left_pad, make_drafter, tiny_model

KINDS = ["none", "ngram", "self", "wrong", "noisy"]
PROMPTS = [[5, 17, 9], [18, 73, 9, 33, 16, 64, 18, 73, 9], [60]]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def count():
    return count_model()


class Recorder(LogitsProcessor):
    """Bans (last id + 1) mod V, and remembers what it was asked about."""

    def __init__(self):
        self.prefixes = []

    def __call__(self, input_ids, scores):
        assert input_ids.shape[0] == scores.shape[0]
        assert scores.dtype == torch.float32
        self.prefixes += input_ids.tolist()
        return scores.scatter(1, (input_ids[:, -1:] + 1) % scores.shape[1], -torch.inf)


class Spy(specdec.Drafter):
    """A drafter that shows what was drafted and kept: (rows, drafts, num_accepted) per round."""

    def __init__(self, drafter):
        self.drafter, self.rounds = drafter, []

    def start(self, context):
        session = self.drafter.start(context)
        propose, observe = session.propose, session.observe

        def spy_propose(rows, limits):
            draft = propose(rows, limits)
            drafts = [[] for _ in rows]
            if draft is not None:
                tokens = draft.tokens
                tokens = tokens.tolist() if isinstance(tokens, torch.Tensor) else tokens
                drafts = [t[:n] for t, n in zip(tokens, draft.num_tokens, strict=True)]
            self.rounds.append([[list(row) for row in rows], drafts])
            return draft

        def spy_observe(num_accepted):
            self.rounds[-1].append(list(num_accepted))
            observe(num_accepted)

        session.propose, session.observe = spy_propose, spy_observe
        return session


@pytest.mark.parametrize("K", [1, 3, 8])
@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("prompts", [PROMPTS[1:2], PROMPTS], ids=["alone", "padded"])
def test_prefixes(model, prompts, kind, K):
    """B3: padding + prompt + accepted + draft[:j], once per verified position, row after row."""
    recorder, plain = Recorder(), Recorder()
    spy = Spy(make_drafter(kind, model, K))
    ids, mask = left_pad(prompts)
    options = {"max_new_tokens": 14, "eos_token_id": 44}
    expected = model.generate(ids, attention_mask=mask, logits_processor=[plain], **options)
    out = specdec.generate(model, ids, mask, drafter=spy, logits_processor=[recorder], **options)
    assert torch.equal(out.sequences, expected)

    asked = iter(recorder.prefixes)
    for rows, drafts, num_accepted in spy.rounds:
        for row, draft, accepted in zip(rows, drafts, num_accepted, strict=True):
            prompt = next(p for p in prompts if row[: len(p)] == p)
            prefix = [0] * (ids.shape[1] - len(prompt)) + row
            for j in range(len(draft) + 1):
                assert next(asked) == prefix + draft[:j]
                banned = (prefix + draft[:j])[-1] + 1
                if j < len(draft) and draft[j] in (banned % 97, 44):
                    # nobody is asked about what follows a banned draft, or the end
                    assert accepted <= j + (draft[j] == 44)
                    break
    assert next(asked, None) is None

    # of every prefix of the output it was asked exactly once, and in order
    for b, row in enumerate(out.stats.rows):
        final = out.sequences[b].tolist()
        kept = [p for p in recorder.prefixes if p == final[: len(p)]]
        assert kept == [final[:n] for n in range(ids.shape[1], ids.shape[1] + row.emitted)]
        assert all(p in plain.prefixes for p in kept)


def test_a_rejected_draft_is_forgotten(count):
    """After a rejection the next call contains no rejected id."""
    recorder = Recorder()
    out = specdec.generate(
        count,
        torch.tensor([[0, 1]]),
        drafter=make_drafter("wrong", count, 4),
        logits_processor=[recorder],
        max_new_tokens=8,
    )
    final = out.sequences[0].tolist()
    for before, after in zip(recorder.prefixes, recorder.prefixes[1:], strict=False):
        if len(after) <= len(before):  # a new round
            assert after == final[: len(after)]


@pytest.mark.parametrize("K", range(1, 7))
@pytest.mark.parametrize("minimum", [4, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_min_new_tokens(kind, minimum, K):
    """B3: EOS is the argmax at every step, and comes at the first position that is allowed."""
    model = tiny_model()
    ids, mask = left_pad(PROMPTS)
    options = {
        "eos_token_id": 7,
        "sequence_bias": {(7,): 500.0},
        "min_new_tokens": minimum,
        "max_new_tokens": 12,
    }
    out = specdec.generate(model, ids, mask, drafter=make_drafter(kind, model, K), **options)
    assert [row.emitted for row in out.stats.rows] == [minimum + 1] * 3
    assert (out.sequences[:, -1] == 7).all()
    assert not (out.sequences[:, ids.shape[1] : -1] == 7).any()


@pytest.mark.parametrize("kind", KINDS)
def test_processors_hold_when_sampling(model, kind):
    """Nothing banned is emitted by any rule, and match does not depend on the drafter."""
    ids, mask = left_pad(PROMPTS)
    options = {"do_sample": True, "temperature": 1.5, "seed": 4, "max_new_tokens": 20}

    def sampled(drafter, method):
        out = specdec.generate(
            model,
            ids,
            mask,
            drafter=drafter,
            method=method,
            logits_processor=[Recorder()],
            no_repeat_ngram_size=1,
            **options,
        )
        new = out.sequences[:, ids.shape[1] :]
        last = out.sequences[:, ids.shape[1] - 1 : -1]
        assert not (new == (last + 1) % 97).any()
        assert all(len(set(row)) == len(row) for row in new.tolist())
        return new

    plain = sampled(None, "match")
    for K in (1, 3, 8):
        drafter = make_drafter(kind, model, K)
        assert torch.equal(sampled(drafter, "match"), plain)
        for method in ("token", "block") if kind in ("self", "wrong", "noisy") else ():
            sampled(drafter, method)


# M3: grammars


class Automaton:
    """Digits, at least one, then END. Refuses to be asked about anything else."""

    DIGITS, END = range(10, 20), 30

    def __init__(self, prompt_length: int, digits: int = 4):
        self.prompt_length, self.most, self.asked = prompt_length, digits, []

    def __call__(self, row: int, ids: torch.Tensor) -> list[int]:
        text = ids[self.prompt_length :].tolist()
        assert all(token in self.DIGITS for token in text), f"asked about {text}"
        assert len(text) <= self.most
        self.asked.append((row, text))
        allowed = [*self.DIGITS] if len(text) < self.most else []
        return allowed + [self.END] if text else allowed


@pytest.mark.parametrize("K", [1, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_grammar(model, kind, K):
    """Drafts that violate it are cut; it is asked about what could be committed only."""
    ids, mask = left_pad(PROMPTS)
    options = {"eos_token_id": Automaton.END, "max_new_tokens": 12}
    end_bias = {"sequence_bias": {(Automaton.END,): 2.0}}
    length = ids.shape[1]
    plain = Automaton(length)
    # transformers asks about finished rows too: compare row by row
    expected = [
        model.generate(
            ids[b : b + 1],
            attention_mask=mask[b : b + 1],
            prefix_allowed_tokens_fn=lambda _, ids: plain(0, ids),
            **options,
            **end_bias,
        )[0]
        for b in range(3)
    ]
    automaton = Automaton(length)
    out = specdec.generate(
        model,
        ids,
        mask,
        drafter=make_drafter(kind, model, K),
        prefix_allowed_tokens_fn=automaton,
        **options,
        **end_bias,
    )
    for b, row in enumerate(expected):
        emitted = len(row) - length
        assert out.sequences[b, length : length + emitted].tolist() == row[length:].tolist()
        assert out.stats.rows[b].emitted == emitted
        assert out.finish_reasons[b] == "eos"
    assert {row for row, _ in automaton.asked} == {0, 1, 2}


@pytest.mark.parametrize("method", ["match", "token", "block"])
def test_grammar_when_sampling(model, method):
    ids, mask = left_pad(PROMPTS)
    for kind in ("noisy", "self"):
        automaton = Automaton(ids.shape[1])
        out = specdec.generate(
            model,
            ids,
            mask,
            drafter=make_drafter(kind, model, 5),
            method=method,
            prefix_allowed_tokens_fn=automaton,
            eos_token_id=Automaton.END,
            do_sample=True,
            temperature=3.0,
            seed=2,
            max_new_tokens=12,
        )
        assert out.finish_reasons == ["eos"] * 3


def test_grammar_is_not_asked_behind_a_drafted_end(count):
    """The end is drafted, accepted, and more drafts follow it."""
    asked = []

    def allowed(row, ids):
        asked.append(ids.tolist())
        assert 5 not in ids
        return list(range(32))

    out = specdec.generate(
        count,
        torch.tensor([[0, 1]]),
        drafter=make_drafter("self", count, 8),
        prefix_allowed_tokens_fn=allowed,
        eos_token_id=5,
        max_new_tokens=20,
    )
    assert out.sequences.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert asked == [list(range(n)) for n in range(2, 6)]


def test_a_grammar_without_way_out_is_an_error(count):
    with pytest.raises(ValueError, match="row 1: the logits of position 4 .* forbid every token"):
        specdec.generate(
            count,
            torch.tensor([[0, 1], [4, 5]]),
            drafter=make_drafter("self", count, 3),
            logits_processor=[
                lambda ids, scores: scores.fill_(-torch.inf) if ids[0, -1] == 7 else scores
            ],
        )


# the module by itself


@pytest.mark.parametrize("packed", [False, True])
def test_process_round_by_hand(packed):
    """Row 0 stops at a forbidden draft, row 1 at a drafted end, row 2 at an id outside."""
    asked = []

    def forbid_four(ids, scores):
        asked.append(ids.tolist())
        return scores.index_fill(1, torch.tensor([4]), -torch.inf)

    shape, starts = ((11, 6), [0, 4, 8, 11]) if packed else ((3, 4, 6), None)
    logits = RowLogits(torch.zeros(shape, dtype=torch.bfloat16), starts)
    processors = [RowProcessors([forbid_four], row, 3) for row in range(3)]
    drafts = [[1, 4, 2], [5, 1, 2], [3, 9]]
    scores, counts = process_round(logits, processors, [[0], [0, 0], [2]], drafts, frozenset({5}))
    assert counts == [2, 1, 2]
    assert asked == [[[0]], [[0, 1]], [[0, 0]], [[2]], [[2, 3]]]
    assert scores.values.dtype == torch.float32
    for row, processed in enumerate((2, 1, 2)):
        assert scores.row(row)[:processed, 4].isneginf().all()
        assert scores.row(row)[processed:].eq(0).all()
    assert not logits.values.any()
