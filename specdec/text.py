"""Between text and tokens: prompts into a batch, accepted drafts into stretches of text."""

from __future__ import annotations

from collections.abc import Sequence


def encode_prompts(tokenizer, texts: Sequence[str], chat: bool | None = None):
    """A left-padded batch, with attention mask.

    Args:
        texts: one user message each.
        chat: apply the tokenizer's chat template; None: if it has one.

    Raises:
        ValueError: ``chat`` without a template, a prompt without tokens, no token to pad with.
    """
    if chat is None:
        chat = bool(tokenizer.chat_template)
    if chat and not tokenizer.chat_template:
        raise ValueError("chat: the tokenizer has no chat template")
    if chat:
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
            )
            for text in texts
        ]
    # a template writes its own special tokens
    rows = tokenizer(list(texts), add_special_tokens=not chat)["input_ids"]
    for i, row in enumerate(rows, 1):
        if not row:
            raise ValueError(f"prompt {i}: no tokens in {texts[i - 1]!r}")
    if len({len(row) for row in rows}) > 1 and tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError("the tokenizer has no token to pad a batch with: give one prompt")
        tokenizer.pad_token = tokenizer.eos_token
    padding = tokenizer.pad_token is not None
    return tokenizer.pad(
        {"input_ids": rows}, padding=padding, padding_side="left", return_tensors="pt"
    )


def segments(tokenizer, tokens: Sequence[int], accepted: Sequence[bool]) -> list[tuple[str, bool]]:
    """The text in stretches, each with whether its tokens were accepted drafts.

    The stretches join to the decoded text. A character made of several tokens counts with its last.
    """
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    out: list[tuple[str, bool]] = []
    begin = 0
    for i, flag in enumerate(accepted):
        if i + 1 < len(accepted) and accepted[i + 1] == flag:
            continue
        prefix = tokenizer.decode(tokens[: i + 1], skip_special_tokens=True)
        # half a character decodes to a replacement that the whole text does not have
        end = len(text) if i + 1 == len(accepted) else len(prefix.rstrip("\ufffd"))
        if end > begin:
            out.append((text[begin:end], flag))
            begin = end
    return out
