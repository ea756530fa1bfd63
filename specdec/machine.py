"""What runs here: versions, devices, and the backends of the ops."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

PACKAGES = ("specdec", "torch", "triton", "transformers", "tokenizers", "numpy")


def versions() -> dict[str, str | None]:
    """Versions by name; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cpu_count() -> int:
    """Cores this process may use, which in a container are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def devices() -> list[dict]:
    """The devices torch can use, the CPU first."""
    import torch

    found = [
        {
            "device": "cpu",
            "name": cpu_name(),
            "cores": cpu_count(),
            "threads": torch.get_num_threads(),
        }
    ]
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        # ROCm answers as "cuda" too, and names its architecture
        arch = getattr(properties, "gcnArchName", None) if torch.version.hip else None
        found.append(
            {
                "device": f"cuda:{i}",
                "name": properties.name,
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "architecture": arch or f"sm_{properties.major}{properties.minor}",
            }
        )
    if torch.backends.mps.is_available():
        found.append({"device": "mps", "name": "Apple GPU"})
    return found


def device_of(model) -> dict:
    """The entry of ``devices()`` for the device a model sits on."""
    device = model.device
    name = device.type if device.type != "cuda" else f"cuda:{device.index or 0}"
    return next(entry for entry in devices() if entry["device"] == name)


def backends() -> dict[str, dict[str, str | None]]:
    """By op and backend: None if it runs on the best device of this machine, else why not."""
    import torch

    from specdec_kernels import sample, verify_chain

    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = torch.zeros(1, 2, 8, device=device)
    drafts = torch.zeros(1, 1, dtype=torch.int64, device=device)
    calls = {
        "sample": lambda backend: sample(logits[:, 0], backend=backend),
        "verify_chain": lambda backend: verify_chain(logits, drafts, backend=backend),
    }
    # tried, not looked up: a backend that cannot run says why by itself
    return {
        op: {backend: _failure(call, backend) for backend in ("torch", "triton")}
        for op, call in calls.items()
    }


def _failure(call, backend: str) -> str | None:
    try:
        call(backend)
    except (ValueError, RuntimeError, ImportError) as error:
        return str(error)
    return None
