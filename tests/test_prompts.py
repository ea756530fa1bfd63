import json
from collections import Counter

import pytest

from specdec.prompts import Prompt, builtin_kinds, builtin_prompts, load_prompts


def test_builtin_set():
    prompts = builtin_prompts()
    kinds = Counter(p.kind for p in prompts)
    assert len(kinds) == 8 and set(kinds.values()) <= {2, 3}
    assert builtin_kinds() == list(kinds)
    assert len({p.id for p in prompts}) == len({p.text for p in prompts}) == len(prompts)
    heavy = {p.kind for p in prompts if p.copy_heavy}
    assert len(heavy) >= 3
    # a kind is copy-heavy or not: figures by kind say one thing
    assert heavy.isdisjoint(p.kind for p in prompts if not p.copy_heavy)
    # neighbours, so that a batch is mostly of one kind
    changes = sum(a.kind != b.kind for a, b in zip(prompts, prompts[1:], strict=False))
    assert changes == 7


def test_builtin_is_a_copy():
    builtin_prompts().clear()
    assert builtin_prompts()


def test_text_file(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("first\n\n  second, with \u2028 inside \n", encoding="utf-8")
    assert load_prompts(path) == [
        Prompt("mine-1", "file", False, "first"),
        Prompt("mine-2", "file", False, "second, with \u2028 inside"),
    ]


ITEMS = ["plain", {"text": "a\nb", "kind": "k", "id": "x", "copy_heavy": True}]
EXPECTED = [Prompt("p-1", "file", False, "plain"), Prompt("x", "k", True, "a\nb")]


def test_json_files(tmp_path):
    (tmp_path / "p.json").write_text(json.dumps(ITEMS))
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(i) for i in ITEMS) + "\n\n")
    assert load_prompts(tmp_path / "p.json") == EXPECTED
    assert load_prompts(str(tmp_path / "p.jsonl")) == EXPECTED


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("p.md", b"x", r"p\.md: expected a \.txt, \.json or \.jsonl file"),
        ("p.txt", b" \n\n", r"p\.txt: no prompts in it"),
        ("p.txt", b"ab\xff", r"p\.txt: not UTF-8 at byte 2"),
        ("p.json", b"[]", r"p\.json: no prompts in it"),
        ("p.json", b"{", r"p\.json: not JSON"),
        ("p.json", b'{"text": "x"}', r"p\.json: expected a list of prompts, got dict"),
        ("p.json", b'["x", 3]', r"p\.json: item 2: expected a string or an object, got int"),
        ("p.json", b'[{"kind": "k"}]', r"item 1: text: expected a str, got None"),
        ("p.json", b'[{"text": ""}]', r"item 1: text: expected a str, got ''"),
        ("p.json", b'["  "]', r"item 1: text: expected more than white space"),
        ("p.json", b'[{"text": "x", "copy_heavy": 1}]', r"copy_heavy: expected a bool, got 1"),
        ("p.json", b'[{"text": "x", "txt": "y"}]', r"item 1: unknown key 'txt'"),
        ("p.jsonl", b'"x"\n\n{]', r"p\.jsonl: line 3: not JSON"),
        (
            "p.json",
            b'[{"text": "x", "id": "a"}, {"text": "y", "id": "a"}]',
            r"p\.json: id 'a' occurs twice",
        ),
    ],
)
def test_bad_files(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_prompts(tmp_path / name)


def test_missing_file(tmp_path):
    with pytest.raises(OSError, match=r"none\.txt"):
        load_prompts(tmp_path / "none.txt")
