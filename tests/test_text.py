import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from specdec.text import encode_prompts, segments


@pytest.fixture
def tokenizer():
    """One token per byte, after a padding token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<end>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", padding_side="right"
    )


def encode(tokenizer, text):
    return tokenizer(text)["input_ids"]


def test_left_padding(tokenizer):
    batch = encode_prompts(tokenizer, ["ab", "cdef"])
    a, b = encode(tokenizer, "ab")
    assert batch["input_ids"].tolist() == [[0, 0, a, b], encode(tokenizer, "cdef")]
    assert batch["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]


def test_template(tokenizer):
    """Applied if there is one, unless told otherwise."""
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    for chat, text in ((None, "[user:hi]"), (True, "[user:hi]"), (False, "hi")):
        ids = encode_prompts(tokenizer, ["hi"], chat)["input_ids"]
        assert ids.tolist() == [encode(tokenizer, text)]
    tokenizer.chat_template = None
    assert encode_prompts(tokenizer, ["hi"])["input_ids"].tolist() == [encode(tokenizer, "hi")]
    with pytest.raises(ValueError, match="chat: the tokenizer has no chat template"):
        encode_prompts(tokenizer, ["hi"], chat=True)


def test_special_tokens_once(tokenizer):
    """The tokenizer adds its own, except behind a template, which has written them."""
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<end> $A", special_tokens=[("<end>", 1)]
    )
    assert encode_prompts(tokenizer, ["hi"])["input_ids"][0, 0] == 1
    tokenizer.chat_template = "<end>{{ messages[0].content }}"
    assert encode_prompts(tokenizer, ["hi"])["input_ids"].tolist()[0].count(1) == 1


def test_without_padding_token(tokenizer):
    """The end token serves, masked; with neither, only rows of one length make a batch."""
    tokenizer.pad_token = None
    assert encode_prompts(tokenizer, ["ab"])["attention_mask"].tolist() == [[1, 1]]
    batch = encode_prompts(tokenizer, ["ab", "c"])
    assert batch["input_ids"].tolist()[1] == [1, *encode(tokenizer, "c")]
    assert batch["attention_mask"].tolist() == [[1, 1], [0, 1]]
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no token to pad"):
        encode_prompts(tokenizer, ["ab", "c"])


def test_empty_prompt(tokenizer):
    with pytest.raises(ValueError, match="prompt 2: no tokens in ''"):
        encode_prompts(tokenizer, ["a", ""])


def test_segments_by_hand(tokenizer):
    tokens = encode(tokenizer, "abcdef")
    flags = [False, True, True, False, False, True]
    expected = [("a", False), ("bc", True), ("de", False), ("f", True)]
    assert segments(tokenizer, tokens, flags) == expected
    assert segments(tokenizer, [], []) == []
    assert segments(tokenizer, [*tokens, 1], [True] * 7) == [("abcdef", True)]


def test_segments_cut_no_character(tokenizer):
    """é is two tokens: it counts with the second."""
    tokens = encode(tokenizer, "aéb")
    assert segments(tokenizer, tokens, [False, False, True, True]) == [("a", False), ("éb", True)]
    assert segments(tokenizer, tokens, [True, True, False, False]) == [("a", True), ("éb", False)]


@pytest.mark.parametrize("seed", range(5))
def test_segments_join_to_the_text(tokenizer, seed):
    """Also where the bytes are no text at all."""
    import random

    rng = random.Random(seed)
    tokens = [rng.randrange(1, 258) for _ in range(60)]
    flags = [rng.random() < 0.5 for _ in tokens]
    pieces = segments(tokenizer, tokens, flags)
    whole = tokenizer.decode(tokens, skip_special_tokens=True)
    assert "".join(text for text, _ in pieces) == whole
