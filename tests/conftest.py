"""Fixtures of every test. Kernels, where there is no GPU, run in Triton's interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# tiny models: a second thread only waits
torch.set_num_threads(1)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poison_empty(monkeypatch):
    """Fill ``torch.empty`` with junk, so that an output a kernel forgets to write cannot pass."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(float("nan") if out.is_floating_point() else -77)

    monkeypatch.setattr(torch, "empty", poisoned)
