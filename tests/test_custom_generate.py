"""``model.generate(custom_generate=specdec.custom_generate)`` gives what ``generate`` gives."""

import pytest
import torch
from transformers import GenerationConfig, StopStringCriteria, TextStreamer

import specdec
from specdec.testing import byte_tokenizer, count_model, left_pad, make_drafter, tiny_model

KINDS = ["none", "ngram", "self", "wrong", "noisy"]
PROMPTS = [[5, 17, 9], [18, 73, 9, 33, 16, 64, 18, 73, 9], [60]]
NEW = 14


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def both(model, prompts=PROMPTS, **options):
    """The same call from either side."""
    ids, mask = left_pad(prompts)
    options.setdefault("max_new_tokens", NEW)
    ours = specdec.generate(model, ids, mask, **options)
    theirs = model.generate(
        ids, attention_mask=mask, custom_generate=specdec.custom_generate, **options
    )
    return ours, theirs


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eos_token_id": [44, 24], "pad_token_id": 9},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [44]},
        {"prefix_allowed_tokens_fn": lambda row, ids: range(row, 97, 3)},
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 7},
        {"do_sample": True, "top_k": 0, "min_p": 0.1, "seed": [4, 5, 6], "min_new_tokens": 3},
        {"do_sample": True, "top_k": 5, "method": "match", "seed": 7},
    ],
    ids=lambda o: ",".join(o) or "none",
)
@pytest.mark.parametrize("kind", KINDS)
def test_same_tokens(model, kind, options):
    ours, theirs = both(model, drafter=make_drafter(kind, model, 3), **options)
    assert type(theirs) is torch.Tensor
    assert torch.equal(ours.sequences, theirs)


def test_greedy_equals_transformers(model):
    """One argument more, nothing else changes."""
    ids, mask = left_pad(PROMPTS)
    plain = model.generate(ids, attention_mask=mask, max_new_tokens=NEW)
    for kind in KINDS:
        got = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=NEW,
            custom_generate=specdec.custom_generate,
            drafter=make_drafter(kind, model, 3),
        )
        assert torch.equal(got, plain)


def test_return_dict(model):
    """The whole output, with figures; scores and logits as asked for."""
    ours, theirs = both(
        model,
        drafter=make_drafter("noisy", model, 3),
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        top_logprobs=2,
    )
    assert isinstance(theirs, specdec.GenerateOutput)
    assert torch.equal(ours.sequences, theirs.sequences)
    for name in ("scores", "logits", "logprobs", "top_logprobs", "top_ids"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=0, atol=0)
    assert ours.finish_reasons == theirs.finish_reasons
    assert ours.accepted_mask == theirs.accepted_mask
    assert ours.stats.rows == theirs.stats.rows


def test_generation_config(model):
    config = GenerationConfig(max_new_tokens=5, do_sample=True, top_k=4, pad_token_id=0)
    ours, theirs = both(model, generation_config=config, seed=3, max_new_tokens=5)
    assert torch.equal(ours.sequences, theirs)
    assert config.max_new_tokens == 5


def test_transformers_defaults_apply(model):
    """There it is top_k 50, not ours; length 20."""
    ids = torch.tensor([[5, 17]])
    hot = {"do_sample": True, "temperature": 5.0, "seed": 2}
    theirs = model.generate(ids, custom_generate=specdec.custom_generate, **hot)
    assert theirs.shape == (1, 22)
    ours = specdec.generate(model, ids, max_new_tokens=20, top_k=50, **hot)
    assert torch.equal(ours.sequences, theirs)
    assert not torch.equal(ours.sequences, specdec.generate(model, ids, **hot).sequences[:, :22])


@pytest.mark.parametrize("kind", KINDS)
def test_stop_strings(kind):
    """transformers hands on no tokenizer and says so; its criterion does the same."""
    model, tokenizer = count_model(), byte_tokenizer(b"abcdefghijklmnopqrstuvwxyz .,!?-")
    ids = torch.tensor([[0, 1]])
    call = {
        "custom_generate": specdec.custom_generate,
        "drafter": make_drafter(kind, model, 8),
        "max_new_tokens": 20,
    }
    ours = specdec.generate(model, ids, stop_strings="ghi", tokenizer=tokenizer)
    criteria = [StopStringCriteria(tokenizer, "ghi")]
    assert torch.equal(ours.sequences, model.generate(ids, stopping_criteria=criteria, **call))
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(ids, stop_strings="ghi", tokenizer=tokenizer, **call)


@pytest.mark.parametrize("kind", KINDS)
def test_token_streamer(kind, capsys):
    model, tokenizer = count_model(), byte_tokenizer(b"abcdefghijklmnopqrstuvwxyz .,!?-")
    model.generate(
        torch.tensor([[0, 1]]),
        custom_generate=specdec.custom_generate,
        drafter=make_drafter(kind, model, 4),
        token_streamer=TextStreamer(tokenizer),
        max_new_tokens=9,
    )
    assert capsys.readouterr().out == "abcdefghijk\n"


def test_token_streamer_ends_after_an_error(model):
    ends = []

    class Streamer:
        def put(self, value):
            raise OSError("closed")

        def end(self):
            ends.append(True)

    with pytest.raises(OSError, match="closed"):
        model.generate(
            torch.tensor([[5]]),
            custom_generate=specdec.custom_generate,
            token_streamer=Streamer(),
            max_new_tokens=3,
        )
    assert ends == [True]


def test_errors_name_the_argument(model):
    ids = torch.tensor([[5, 17]])
    call = {"custom_generate": specdec.custom_generate, "max_new_tokens": 3}
    with pytest.raises(ValueError, match="drafter: expected a specdec Drafter, got LlamaFor"):
        model.generate(ids, drafter=model, **call)
    with pytest.raises(ValueError, match="method"):
        model.generate(ids, method="beam", **call)
    with pytest.raises(ValueError, match="seed: expected one int or one per row"):
        model.generate(ids, seed=[1, 2], do_sample=True, **call)
    with pytest.raises(ValueError, match="no_such_option"):
        model.generate(ids, no_such_option=1, **call)
