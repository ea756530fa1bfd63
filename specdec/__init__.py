"""Speculative decoding for Hugging Face causal language models."""

import importlib

__version__ = "0.1.0"

# name -> module, imported on first use: the command line must not wait for torch
_EXPORTS = {
    "Draft": "drafters",
    "DraftContext": "drafters",
    "DraftModel": "drafters",
    "DraftSession": "drafters",
    "Drafter": "drafters",
    "GenerateOutput": "hf",
    "NGram": "drafters",
    "RowStats": "stats",
    "Stats": "stats",
    "custom_generate": "hf",
    "generate": "hf",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)


def __dir__():
    return sorted([*globals(), *__all__])
