"""Prompts to measure with: a built-in set of eight kinds, and files of one's own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["Prompt", "builtin_kinds", "builtin_prompts", "load_prompts"]


@dataclass(frozen=True)
class Prompt:
    """One user message.

    Attributes:
        id: unique in its set.
        kind: what sort of task, for figures by kind.
        copy_heavy: the answer repeats parts of the prompt, which n-gram drafting lives on.
        text: the message, without chat template.
    """

    id: str
    kind: str
    copy_heavy: bool
    text: str


@cache
def _builtin() -> tuple[Prompt, ...]:
    return tuple(load_prompts(Path(__file__).with_name("builtin.json")))


def builtin_prompts() -> list[Prompt]:
    """The built-in set, in English, written for this project; prompts of a kind are neighbours."""
    return list(_builtin())


def builtin_kinds() -> list[str]:
    return list(dict.fromkeys(prompt.kind for prompt in _builtin()))


def load_prompts(path: str | Path) -> list[Prompt]:
    """Read prompts from a file, by its suffix.

    ``.txt``: one prompt a line, empty lines skipped. ``.json``: a list; ``.jsonl``: one item a
    line. An item is a string or an object with "text" and, if wanted, "id", "kind", "copy_heavy".

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no prompts, or something else; the message names file and place.
    """
    path = Path(path)
    if path.suffix not in (".txt", ".json", ".jsonl"):
        raise ValueError(f"{path}: expected a .txt, .json or .jsonl file")
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from None
    # not splitlines: U+2028 and its like may stand inside a prompt
    lines = [(i, line.strip()) for i, line in enumerate(content.split("\n"), 1) if line.strip()]
    if path.suffix == ".txt":
        items = [(f"line {i}", line) for i, line in lines]
    elif path.suffix == ".jsonl":
        items = [(f"line {i}", _parse(line, f"{path}: line {i}")) for i, line in lines]
    else:
        listed = _parse(content, str(path))
        if not isinstance(listed, list):
            raise ValueError(f"{path}: expected a list of prompts, got {type(listed).__name__}")
        items = [(f"item {i}", item) for i, item in enumerate(listed, 1)]
    prompts = [
        _prompt(item, f"{path}: {place}", f"{path.stem}-{i}")
        for i, (place, item) in enumerate(items, 1)
    ]
    if not prompts:
        raise ValueError(f"{path}: no prompts in it")
    seen = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise ValueError(f"{path}: id {prompt.id!r} occurs twice")
        seen.add(prompt.id)
    return prompts


def _parse(text: str, place: str):
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error}") from None


def _prompt(item, place: str, default_id: str) -> Prompt:
    if isinstance(item, str):
        item = {"text": item}
    if not isinstance(item, dict):
        raise ValueError(f"{place}: expected a string or an object, got {type(item).__name__}")
    defaults = {"id": default_id, "kind": "file", "copy_heavy": False}
    if unknown := item.keys() - {"text", *defaults}:
        raise ValueError(f"{place}: unknown key {min(unknown)!r}")
    prompt = Prompt(**{**defaults, "text": None, **item})
    for name, kind in (("text", str), ("id", str), ("kind", str), ("copy_heavy", bool)):
        value = getattr(prompt, name)
        if not isinstance(value, kind) or value == "":
            raise ValueError(f"{place}: {name}: expected a {kind.__name__}, got {value!r}")
    if not prompt.text.strip():
        raise ValueError(f"{place}: text: expected more than white space")
    return prompt
