"""Where a row ends, and that ids, stream, counters and reasons all end there."""

import time

import pytest
import torch
from transformers import LogitsProcessor, StopStringCriteria, TextStreamer
from transformers.generation.streamers import BaseStreamer

import specdec
from specdec.drafters import Draft, Drafter, DraftSession
from specdec.testing import byte_tokenizer, count_model, left_pad, make_drafter, tiny_model

KINDS = ["none", "ngram", "self", "wrong", "noisy"]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def count():
    return count_model()


def run(model, prompt, kind="self", K=8, **options):
    drafter = kind if isinstance(kind, Drafter) else make_drafter(kind, model, K)
    options.setdefault("max_new_tokens", 20)
    return specdec.generate(model, torch.tensor([prompt]), drafter=drafter, **options)


def new_tokens(out, prompt) -> list[int]:
    return out.sequences[0, len(prompt) :].tolist()


class Recorder(BaseStreamer):
    """What a streamer is given; ``fails`` after so many calls of put."""

    def __init__(self, fails: int | None = None):
        self.puts, self.ends, self.fails = [], 0, fails

    def put(self, value):
        assert self.ends == 0
        if len(self.puts) == self.fails:
            raise OSError("streamer failed")
        self.puts.append(value)

    def end(self):
        self.ends += 1

    @property
    def tokens(self) -> list[int]:
        return [token for value in self.puts[1:] for token in value.tolist()]


# D1: end of sequence


def check_row(out, prompt, expected, reason, recorder=None):
    """Ids, reason, counters, masks and logprobs of a row that ends together."""
    assert new_tokens(out, prompt) == expected
    assert out.finish_reasons == [reason]
    assert [len(mask) for mask in out.accepted_mask] == [len(expected)]
    stats = out.stats.rows[0]
    assert stats.emitted == len(expected) == stats.accepted + stats.rounds - stats.trimmed
    if out.logprobs is not None:
        assert out.logprobs.shape == (1, len(expected))
        assert not out.logprobs.isnan().any()
    if recorder is not None:
        assert recorder.tokens == expected
        assert recorder.ends == 1


@pytest.mark.parametrize("K", [1, 2, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "prompt, eos, expected, reason",
    [
        ([0, 1], 5, [2, 3, 4, 5], "eos"),
        # the end lies inside the run that an n-gram copies
        ([0, 1, 2, 3, 4, 5, 6, 7, 0, 1], 5, [2, 3, 4, 5], "eos"),
        ([0, 1], [9, 5], [2, 3, 4, 5], "eos"),
        ([0, 1], 2, [2], "eos"),
        ([5, 0, 5, 1], [5, 3], [2, 3], "eos"),
        ([0, 1], None, list(range(2, 22)), "length"),
        ([0, 1], 21, list(range(2, 22)), "eos"),
        ([0, 1], 22, list(range(2, 22)), "length"),
    ],
)
def test_end_of_sequence(count, kind, K, prompt, eos, expected, reason):
    recorder = Recorder()
    out = run(count, prompt, kind, K, eos_token_id=eos, streamer=recorder, output_logprobs=True)
    check_row(out, prompt, expected, reason, recorder)


class Script(Drafter):
    """Drafts these tokens in each round, whatever the text is."""

    def __init__(self, *rounds: list[int]):
        self.rounds, self.limits = list(rounds), []

    def start(self, context):
        drafter = self

        class Session(DraftSession):
            def __init__(self):
                self.rounds = list(drafter.rounds)

            def propose(self, rows, limits):
                drafter.limits.append(list(limits))
                tokens = self.rounds.pop(0) if self.rounds else []
                return Draft([tokens[:limit] for limit in limits]) if tokens else None

        return Session()


@pytest.mark.parametrize(
    "rounds",
    [
        [[2, 3, 4, 5, 6, 7]],  # accepted
        [[2, 3, 4]],  # the bonus token
        [[2, 3], [9]],  # the corrected token, in a round of its own
        [[2, 3, 5, 6], [9, 9]],  # drafted too early: not the target's choice
        [[5], [5], [5], [5]],
        [[5, 5, 5, 5, 5]],
    ],
    ids=str,
)
def test_end_as_accepted_corrected_or_bonus_token(count, rounds):
    recorder = Recorder()
    out = run(count, [0, 1], Script(*rounds), eos_token_id=5, streamer=recorder)
    check_row(out, [0, 1], [2, 3, 4, 5], "eos", recorder)


def test_rows_end_on_their_own(count):
    """The other rows go on; a finished one is padded, and takes no part in later forwards."""
    ids, mask = left_pad([[0, 1], [10], [3, 20, 21]], pad=31)
    for kind in KINDS:
        for K in (1, 3, 8):
            out = specdec.generate(
                count,
                ids,
                mask,
                drafter=make_drafter(kind, count, K),
                eos_token_id=[4, 27],
                pad_token_id=30,
                max_new_tokens=9,
            )
            rows = out.sequences[:, 3:].tolist()
            assert rows[0] == [2, 3, 4] + [30] * 6
            assert rows[1] == list(range(11, 20))
            assert rows[2] == [22, 23, 24, 25, 26, 27] + [30] * 3
            assert out.finish_reasons == ["eos", "length", "eos"]
            assert [r.emitted for r in out.stats.rows] == [3, 9, 6]
            assert list(map(len, out.accepted_mask)) == [3, 9, 6]
            assert out.stats.rows[0].rounds <= 3


# D2: the budget


@pytest.mark.parametrize("K", [1, 5, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_never_more_than_the_budget(model, kind, K):
    prompt = [3, 41, 5, 3, 41, 8, 22, 3, 41]
    ids = torch.tensor([prompt])
    greedy = model.generate(ids, max_new_tokens=9)
    drafter = make_drafter(kind, model, K)
    for m in range(1, 10):
        out = specdec.generate(model, ids, drafter=drafter, max_new_tokens=m)
        check_row(out, prompt, greedy[0, 9 : 9 + m].tolist(), "length")
        assert torch.equal(out.sequences, specdec.generate(model, ids, max_length=9 + m).sequences)
        assert out.stats.trimmed == 0
        assert out.stats.drafted <= sum(range(m))
        if m == 1:
            assert out.stats.draft_forwards == out.stats.drafted == 0
            assert out.stats.target_widths == [9]


def test_the_last_token_is_never_drafted(count):
    """Verification adds it anyway: at a remaining budget of one nobody is asked for more."""
    drafter = Script(*[[t] * 9 for t in range(2, 22)])
    ids, mask = left_pad([[0, 1], [10]], pad=31)
    specdec.generate(count, ids, mask, drafter=drafter, max_new_tokens=4)
    # the first row keeps the first drafted token of a round, the second row none
    assert drafter.limits[0] == [3, 3]
    assert all(max(limits) >= 0 for limits in drafter.limits)
    assert drafter.limits[-1] == [0]
    draft = make_drafter("self", count, 3)
    out = specdec.generate(count, ids, mask, drafter=draft, max_new_tokens=9)
    # 4 + 4 tokens, then one: two rounds of three draft forwards
    assert out.stats.draft_forwards == 6
    assert [r.drafted for r in out.stats.rows] == [6, 6]


@pytest.mark.parametrize("kind", ["none", "ngram", "self"])
@pytest.mark.parametrize("options", [{"max_new_tokens": 0}, {"max_new_tokens": -3}], ids=str)
def test_budget_must_be_positive(count, kind, options):
    with pytest.raises(ValueError, match=r"max_new_tokens|max_length"):
        run(count, [0, 1], kind, **options)


@pytest.mark.parametrize("length", [1, 2])
def test_max_length_not_beyond_the_prompt(count, length):
    """As transformers: an error."""
    ids = torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match="max_length"):
        count.generate(ids, max_length=length)
    with pytest.raises(ValueError, match="max_length"):
        specdec.generate(count, ids, max_length=length, drafter=specdec.NGram())


# custom criteria, time, strings


@pytest.mark.parametrize("kind", KINDS)
def test_custom_criteria_end_inside_an_accepted_block(count, kind):
    """Asked once for each new token, in order, and never about tokens behind the end."""
    seen = []

    def criterion(ids, scores, **kwargs):
        seen.append(ids[0].tolist())
        return torch.tensor([int(ids[0, -1]) == 6])

    recorder = Recorder()
    out = run(count, [0, 1], kind, 8, stopping_criteria=[criterion], streamer=recorder)
    check_row(out, [0, 1], [2, 3, 4, 5, 6], "stop", recorder)
    assert seen == [list(range(end)) for end in range(3, 8)]


def test_criteria_in_a_batch(model):
    """As generate() with an end-of-sequence id, without which it goes on with finished rows."""
    ids, mask = left_pad([[5, 17, 9], [3, 41, 5, 3, 41, 8, 22, 3, 41], [60]])
    options = {"max_new_tokens": 14, "eos_token_id": 96}

    def criterion(ids, scores, **kwargs):
        # padding included, as transformers shows it
        assert ids.shape[1] > 9
        return ids[:, -1] % 3 == 2

    expected = model.generate(ids, attention_mask=mask, stopping_criteria=[criterion], **options)
    for kind in KINDS:
        for K in (1, 3, 8):
            out = specdec.generate(
                model,
                ids,
                mask,
                drafter=make_drafter(kind, model, K),
                stopping_criteria=[criterion],
                **options,
            )
            assert torch.equal(out.sequences, expected), (kind, K)
            assert "stop" in out.finish_reasons


def test_criteria_see_the_scores(count):
    """One per token so far, where scores are asked for."""
    lengths = []

    def criterion(ids, scores, **kwargs):
        lengths.append(len(scores))
        assert all(s.shape == (1, 32) for s in scores)
        return len(scores) == 7

    out = run(count, [0, 1], "self", 4, stopping_criteria=[criterion], output_scores=True)
    assert new_tokens(out, [0, 1]) == list(range(2, 9))
    assert lengths == list(range(1, 8))


@pytest.mark.parametrize("kind", ["none", "ngram", "self"])
def test_max_time(count, kind, monkeypatch):
    """A clock that moves a second at each look: as many tokens as in transformers."""
    now = iter(range(1000))
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    expected = count.generate(torch.tensor([[0, 1]]), max_new_tokens=20, max_time=4.5)
    out = run(count, [0, 1], kind, max_time=4.5)
    assert torch.equal(out.sequences, expected)
    assert expected.shape[1] < 22
    assert out.finish_reasons == ["stop"]


LETTERS = byte_tokenizer(b"abcdefghijklmnopqrstuvwxyz .,!?-")


@pytest.mark.parametrize("K", [1, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strings", ["ghi", ["xyz", "fg"], ["b", "qr"]], ids=str)
def test_stop_strings(count, kind, K, strings):
    """Also where the string lies in the middle of an accepted block."""
    options = {"stop_strings": strings, "max_new_tokens": 20}
    ids = torch.tensor([[0, 1]])
    expected = count.generate(ids, tokenizer=LETTERS, **options)
    recorder = Recorder()
    out = run(count, [0, 1], kind, K, tokenizer=LETTERS, streamer=recorder, **options)
    check_row(out, [0, 1], expected[0, 2:].tolist(), "stop", recorder)
    assert LETTERS.decode(out.sequences[0]).endswith(tuple(strings))


def test_stop_strings_in_a_batch(count):
    ids, mask = left_pad([[0, 1], [10], [3, 20, 21]], pad=31)
    options = {"stop_strings": ["def", "nopq"], "eos_token_id": 25, "max_new_tokens": 12}
    expected = count.generate(ids, attention_mask=mask, tokenizer=LETTERS, **options)
    for kind in KINDS:
        out = specdec.generate(
            count, ids, mask, drafter=make_drafter(kind, count, 5), tokenizer=LETTERS, **options
        )
        assert torch.equal(out.sequences, expected)
        assert out.finish_reasons == ["stop", "stop", "eos"]


def test_stop_strings_of_a_generation_config(count):
    """They join the caller's criteria; the config is not changed."""
    config = count.generation_config.__class__(stop_strings=["hi"], max_new_tokens=20)
    more = [StopStringCriteria(LETTERS, ["ef"])]
    for criteria, last in ((None, 8), (more, 5)):
        out = specdec.generate(
            count,
            torch.tensor([[0, 1]]),
            generation_config=config,
            stopping_criteria=criteria,
            tokenizer=LETTERS,
        )
        assert out.sequences[0, -1] == last
    assert config.stop_strings == ["hi"]
    assert len(more) == 1


def test_stop_strings_need_a_tokenizer(count):
    with pytest.raises(ValueError, match="stop_strings: need.*tokenizer"):
        run(count, [0, 1], stop_strings="x")


# D5: the stream


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "seed": 3}], ids=["greedy", "T=1"])
def test_stream_is_the_output(model, kind, sampling):
    """The prompt first, as in transformers, then every token once."""
    prompt = [3, 41, 5, 3, 41, 8, 22, 3, 41]
    for K in (1, 3, 8):
        recorder = Recorder()
        out = run(model, prompt, kind, K, streamer=recorder, **sampling)
        assert torch.equal(recorder.puts[0], torch.tensor([prompt]))
        assert recorder.tokens == new_tokens(out, prompt)
        assert recorder.ends == 1
        assert all(value.ndim == 1 and len(value) for value in recorder.puts[1:])


class FailsAtLength(LogitsProcessor):
    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == 8:
            raise RuntimeError("processor failed")
        return scores


@pytest.mark.parametrize("kind", KINDS)
def test_stream_ends_once_after_an_error(count, kind):
    """What was put until then is a prefix of the output; the same drafter then starts afresh."""
    drafter = make_drafter(kind, count, 3) or kind
    recorder = Recorder()
    with pytest.raises(RuntimeError, match="processor failed"):
        run(count, [0, 1], drafter, logits_processor=[FailsAtLength()], streamer=recorder)
    assert recorder.ends == 1
    assert recorder.tokens == list(range(2, 32))[: len(recorder.tokens)]
    for fails in range(3):
        recorder = Recorder(fails)
        with pytest.raises(OSError, match="streamer failed"):
            run(count, [0, 1], drafter, streamer=recorder)
        assert recorder.ends == 1
    assert new_tokens(run(count, [0, 1], drafter), [0, 1]) == list(range(2, 22))


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"max_new_tokens": 0}, {"nonsense": 1}])
def test_stream_ends_when_the_call_is_refused(count, options):
    """Otherwise whoever reads a TextIteratorStreamer in another thread would wait forever."""
    recorder = Recorder()
    with pytest.raises(ValueError, match=r"num_beams|max_|nonsense"):
        run(count, [0, 1], "self", streamer=recorder, **options)
    assert recorder.ends == 1
    assert recorder.puts == []


def test_streaming_is_for_one_row(count):
    with pytest.raises(ValueError, match="streamer: expected batch size 1, got 2"):
        specdec.generate(count, torch.tensor([[0], [1]]), streamer=Recorder())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("K", [1, 2, 3])
def test_a_character_of_two_tokens_is_printed_whole(count, kind, K):
    """Split over two rounds, or in the middle of one."""
    tokenizer = byte_tokenizer(b"abcdefgh" + "é".encode() + b"ijklmnopqrstuvwxyz .,!")
    pieces = []

    class Streamer(TextStreamer):
        def on_finalized_text(self, text, stream_end=False):
            pieces.append(text)

    run(count, [0, 1], kind, K, streamer=Streamer(tokenizer, skip_prompt=True), max_new_tokens=12)
    assert "".join(pieces) == "cdefghéijkl"
    assert "\ufffd" not in "".join(pieces)
