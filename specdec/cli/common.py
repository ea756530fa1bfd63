"""What several commands do: load models, build drafters, gather options, print."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

ACCEPTED_STYLE = "bold green"
DTYPES = ("auto", "float32", "bfloat16", "float16")


def stdout(min_width: int = 0) -> Console:
    """Made anew, because sys.stdout may be replaced. Wide enough for a table where it is a pipe."""
    console = Console(highlight=False)
    if not console.is_terminal and console.width < min_width:
        console.width = min_width
    return console


def stderr() -> Console:
    return Console(stderr=True, highlight=False)


def print_json(data: dict) -> None:
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False))


def load(name: str, dtype: str, device: str, threads: int | None = None):
    """``(model, tokenizer)``, ready to generate."""
    if dtype not in DTYPES:
        raise ValueError(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    _check_folder(name)
    with stderr().status("loading torch and transformers"):
        import torch
        import transformers

        from ..demo_model import NAME, cached_path, resolve_model
    place = _device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    # what they report, of flags, progress and retries, is not for who types a command
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    preparing = name == NAME and not cached_path().exists()
    with stderr().status(f"{'preparing (once)' if preparing else 'loading'} {name}"):
        path = resolve_model(name)
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(path)
            model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        except (OSError, ValueError) as error:
            raise ValueError(f"model {name!r}: {error}") from error
    return model.to(place).eval(), tokenizer


def _check_folder(name: str) -> None:
    """transformers takes a missing folder for an id, and asks the network for it."""
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name
    if looks_local and not Path(name).is_dir():
        raise ValueError(f"model: no folder {name!r}")


def _device(name: str):
    import torch

    if name == "auto":
        mps = torch.backends.mps.is_available()
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if mps else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device: {name!r} is not a device") from None
    available = {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }
    if (device.index or 0) >= available.get(device.type, 0):
        raise ValueError(f"--device: {name!r} is not available on this machine")
    return device


def make_drafters(
    specs: list[str],
    *,
    draft_model: str | None,
    num_draft_tokens: int | None,
    max_ngram: int | None,
    min_ngram: int | None,
) -> dict:
    """Check the drafters named on the command line, before any model is loaded.

    A spec is ``none``, ``ngram`` or ``draft``, the latter two with ``:K`` if K differs. Returns by
    name (``ngram:5``) a function of ``load_draft`` that makes the drafter.
    """
    kinds = {spec.partition(":")[0] for spec in specs}
    if draft_model is None and "draft" in kinds:
        raise ValueError("--drafter draft: needs --draft-model")
    if draft_model is not None and "draft" not in kinds:
        raise ValueError("--draft-model: only used by --drafter draft")
    for name, value in (("--max-ngram", max_ngram), ("--min-ngram", min_ngram)):
        if value is not None and "ngram" not in kinds:
            raise ValueError(f"{name}: only used by --drafter ngram")
    if num_draft_tokens is not None and kinds == {"none"}:
        raise ValueError("--num-draft-tokens: not used by --drafter none")
    return {
        spec: _maker(spec, num_draft_tokens, max_ngram, min_ngram) for spec in dict.fromkeys(specs)
    }


def _maker(spec: str, num_draft_tokens: int | None, max_ngram: int | None, min_ngram: int | None):
    kind, colon, count = spec.partition(":")
    if kind not in ("none", "ngram", "draft") or (kind == "none" and colon):
        raise ValueError(f"--drafter: expected none, ngram[:K] or draft[:K], got {spec!r}")
    options = {"num_draft_tokens": num_draft_tokens}
    if colon:
        if not count.isdecimal() or int(count) < 1:
            raise ValueError(f"--drafter: expected a whole number >= 1 after ':', got {spec!r}")
        options = {"num_draft_tokens": int(count)}
    if kind == "ngram":
        options |= {"max_ngram": max_ngram, "min_ngram": min_ngram}
    options = {name: value for name, value in options.items() if value is not None}

    def make(load_draft):
        from ..drafters import DraftModel, NGram

        if kind == "none":
            return None
        if kind == "ngram":
            return NGram(**options)
        model, tokenizers = load_draft()
        return DraftModel(model, **tokenizers, **options)

    return make


def sampling_options(
    do_sample: bool | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    repetition_penalty: float | None,
    no_repeat_ngram_size: int | None,
) -> dict:
    """The arguments of ``generate`` that were given; options of sampling switch it on."""
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("temperature") == 0:
        del given["temperature"]
        if do_sample:
            raise ValueError("--do-sample: contradicts --temperature 0")
        do_sample = False
    if given and do_sample is False:
        name = min(given).replace("_", "-")
        raise ValueError(f"--{name}: only used with sampling")
    options: dict = dict(given)
    if given or do_sample is not None:
        options["do_sample"] = bool(given) or bool(do_sample)
    if repetition_penalty is not None:
        options["repetition_penalty"] = repetition_penalty
    if no_repeat_ngram_size:
        options["no_repeat_ngram_size"] = no_repeat_ngram_size
    return options


def coloured(pieces: list[tuple[str, bool]]) -> Text:
    """Stretches of ``specdec.text.segments``, accepted drafts in colour."""
    text = Text()
    for piece, accepted in pieces:
        text.append(piece, style=ACCEPTED_STYLE if accepted else "")
    return text


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}%"


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def with_spread(entry: dict, digits: int = 1) -> str:
    low, high = number(entry["p20"], digits), number(entry["p80"], digits)
    return f"{number(entry['median'], digits)} ({low}–{high})"


def yes_no(value: bool | None) -> str:
    return {None: "–", True: "yes", False: "no"}[value]


def read_stdin() -> str:
    """All of stdin; empty at a terminal, where nobody has been asked to type."""
    with contextlib.suppress(AttributeError):
        if sys.stdin.isatty():
            return ""
    return sys.stdin.read()
