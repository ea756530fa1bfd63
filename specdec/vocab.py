"""Do two models speak the same token ids?"""

from __future__ import annotations


def check_vocabularies(
    draft_size: int, target_size: int, draft_tokenizer=None, target_tokenizer=None
) -> None:
    """Raise ``ValueError`` unless token ids mean the same on both sides.

    With both tokenizers their vocabularies are compared. Without, sizes must be equal or differ as
    padding does: the larger a multiple of 8 and less than 512 above the smaller.
    """
    if draft_tokenizer is not None and target_tokenizer is not None:
        _check_tokenizers(draft_tokenizer, target_tokenizer)
        return
    small, large = sorted((draft_size, target_size))
    if small == large or (large % 8 == 0 and large - small < 512):
        return
    raise ValueError(
        f"draft model: its vocabulary has {draft_size} ids, the target's has {target_size}; they "
        "must share a tokenizer (if they do, pass tokenizer= and target_tokenizer=). "
        "Cross-tokenizer drafting is not supported"
    )


def _check_tokenizers(draft, target) -> None:
    ours, theirs = draft.get_vocab(), target.get_vocab()
    if ours == theirs:
        return
    names = [getattr(t, "name_or_path", "") or type(t).__name__ for t in (draft, target)]
    differing = [t for t in sorted(theirs, key=theirs.get) if ours.get(t) != theirs[t]]
    differing += [t for t in ours if t not in theirs]
    token = differing[0]
    raise ValueError(
        f"draft model: tokenizer {names[0]!r} ({len(ours)} tokens) differs from the target's "
        f"{names[1]!r} ({len(theirs)} tokens): {token!r} is id {ours.get(token)} there and "
        f"{theirs.get(token)} here. Cross-tokenizer drafting is not supported"
    )
