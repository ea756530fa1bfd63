"""Measure plain against speculative decoding: same model, same prompts, interleaved runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch

from .drafters import Drafter
from .hf import generate
from .prompts import Prompt
from .stats import Stats
from .text import encode_prompts

PLAIN = "plain"
TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class Contender:
    """One way to decode. ``transformers``: by ``model.generate``, without this library."""

    name: str
    drafter: Drafter | None = None
    method: str = "auto"
    transformers: bool = False


@dataclass(frozen=True)
class Run:
    """One call of one contender on one unit, a batch of prompts."""

    contender: str
    unit: int
    repeat: int
    seconds: float  # of the whole call, prefill included
    tokens: list[list[int]]  # what each row said, up to its end
    accepted: list[list[bool]] = field(default_factory=list)
    stats: Stats | None = None  # None: transformers does not tell

    @property
    def num_tokens(self) -> int:
        return sum(len(row) for row in self.tokens)


def make_units(prompts: Sequence[Prompt], batch_size: int = 1) -> list[list[Prompt]]:
    if batch_size < 1:
        raise ValueError(f"batch_size: expected >= 1, got {batch_size}")
    if not prompts:
        raise ValueError("prompts: none given")
    return [list(prompts[i : i + batch_size]) for i in range(0, len(prompts), batch_size)]


def count_runs(num_units: int, num_contenders: int, repeats: int) -> int:
    """How many runs ``measure`` makes, the warm-up included."""
    return num_contenders * (1 + num_units * repeats)


def measure(
    model,
    tokenizer,
    units: Sequence[Sequence[Prompt]],
    contenders: Sequence[Contender],
    *,
    options: dict,
    repeats: int = 3,
    seed: int = 0,
    chat: bool | None = None,
    on_run: Callable[[], None] = lambda: None,
) -> list[Run]:
    """Time every contender on every unit, ``repeats`` times.

    All contenders do a unit before the next one begins, and who goes first changes each time, so
    that a slow spell of the machine hits all of them. One round of warm-up comes before.

    Args:
        options: of ``generate``, the same for everybody.
        seed: of the first repeat; the next one samples with the next seed.
        chat: as in ``encode_prompts``.
        on_run: called after every run, warm-up included.
    """
    if repeats < 1:
        raise ValueError(f"repeats: expected >= 1, got {repeats}")
    texts = [[prompt.text for prompt in unit] for unit in units]
    inputs = [encode_prompts(tokenizer, unit, chat).to(model.device) for unit in texts]
    for contender in contenders:
        run_once(model, inputs[0], contender, options, seed)
        on_run()
    runs = []
    for repeat in range(repeats):
        for unit, batch in enumerate(inputs):
            first = (repeat + unit) % len(contenders)
            for contender in [*contenders[first:], *contenders[:first]]:
                runs.append(run_once(model, batch, contender, options, seed + repeat, unit, repeat))
                on_run()
    return runs


def run_once(
    model, inputs, contender: Contender, options: dict, seed: int, unit: int = 0, repeat: int = 0
) -> Run:
    _wait(model)
    began = perf_counter()
    if contender.transformers:
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            torch.manual_seed(seed)
            sequences = model.generate(**inputs, **options)
        accepted, stats = [], None
    else:
        out = generate(
            model,
            **inputs,
            drafter=contender.drafter,
            method=contender.method,
            seed=seed,
            **options,
        )
        sequences, accepted, stats = out.sequences, out.accepted_mask, out.stats
    _wait(model)
    seconds = perf_counter() - began
    new = sequences[:, inputs["input_ids"].shape[1] :].tolist()
    if stats is None:
        new = [_up_to_eos(row, model.generation_config.eos_token_id) for row in new]
    else:
        new = [row[: len(mask)] for row, mask in zip(new, accepted, strict=True)]
    return Run(contender.name, unit, repeat, seconds, new, accepted, stats)


def _wait(model) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def _up_to_eos(row: list[int], eos: int | list[int] | None) -> list[int]:
    ids = {eos} if isinstance(eos, int) else set(eos or ())
    end = next((i + 1 for i, token in enumerate(row) if token in ids), len(row))
    return row[:end]


def quantile(values: Sequence[float], q: float) -> float:
    """Linear between the two nearest, as numpy's default."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": statistics.median(values),
        "p20": quantile(values, 0.2),
        "p80": quantile(values, 0.8),
    }


def summarise(
    runs: Sequence[Run], units: Sequence[Sequence[Prompt]], contenders: Sequence[Contender]
) -> dict:
    """Figures per unit, per kind, over the copy-heavy units and over all. JSON-ready."""
    kinds = [_common([prompt.kind for prompt in unit]) for unit in units]

    def group(members: Iterable[int]) -> dict:
        return _group(runs, set(members), [contender.name for contender in contenders])

    every = range(len(units))
    copy_heavy = [i for i in every if all(prompt.copy_heavy for prompt in units[i])]
    return {
        "prompts": [
            {
                "ids": [prompt.id for prompt in unit],
                "kind": kinds[i],
                "copy_heavy": i in copy_heavy,
                "contenders": group([i]),
            }
            for i, unit in enumerate(units)
        ],
        "kinds": {
            kind: group(i for i in every if kinds[i] == kind) for kind in dict.fromkeys(kinds)
        },
        "copy_heavy": group(copy_heavy) if copy_heavy else None,
        "total": group(every),
    }


def _common(kinds: list[str]) -> str:
    return kinds[0] if len(set(kinds)) == 1 else "mixed"


def _group(runs: Sequence[Run], members: set[int], names: Sequence[str]) -> dict:
    """Figures of each contender over some units."""
    chosen = [run for run in runs if run.unit in members]
    plain = {(run.unit, run.repeat): run for run in chosen if run.contender == PLAIN}
    figures = {
        name: _figures([run for run in chosen if run.contender == name], plain) for name in names
    }
    if PLAIN in figures:
        base = figures[PLAIN]["tokens_per_second"]["median"]
        for entry in figures.values():
            entry["speedup"] = entry["tokens_per_second"]["median"] / base
    return figures


def _figures(runs: Sequence[Run], plain: dict[tuple[int, int], Run]) -> dict:
    repeats = sorted({run.repeat for run in runs})
    by_repeat = [[run for run in runs if run.repeat == repeat] for repeat in repeats]
    seconds = [sum(run.seconds for run in some) for some in by_repeat]
    tokens = [sum(run.num_tokens for run in some) for some in by_repeat]
    entry = {
        "tokens_per_second": spread([n / s for n, s in zip(tokens, seconds, strict=True)]),
        "seconds": spread(seconds),
        "new_tokens": statistics.median(tokens),
        "speedup": None,
        **_compare(runs, plain),
        "method": None,
        "tokens_per_forward": None,
        "mean_accepted": None,
        "acceptance_rate": None,
        "outside_share": None,
    }
    stats = [run.stats for run in runs if run.stats is not None]
    if stats:
        rounds = sum(s.rounds for s in stats)
        drafted = sum(s.drafted for s in stats)
        total = sum(s.seconds["total"] for s in stats)
        entry["method"] = _common([s.method for s in stats])
        entry["tokens_per_forward"] = sum(s.emitted for s in stats) / rounds
        entry["mean_accepted"] = sum(s.accepted for s in stats) / rounds
        # nothing drafted: no rate, rather than a bad one
        entry["acceptance_rate"] = sum(s.accepted for s in stats) / drafted if drafted else None
        outside = sum(s.outside_share * s.seconds["total"] for s in stats)
        entry["outside_share"] = outside / total if total else None
    return entry


def _compare(runs: Sequence[Run], plain: dict[tuple[int, int], Run]) -> dict:
    """How many rows say what plain decoding says, where they must: in exact arithmetic at least."""
    compared = same = 0
    for run in runs:
        other = plain.get((run.unit, run.repeat))
        if run.contender == PLAIN or other is None:
            continue
        greedy = other.stats.method == "greedy"
        # match draws by position, so it owes the tokens of plain sampling
        if not greedy and not (run.stats and run.stats.method == other.stats.method == "match"):
            continue
        compared += len(run.tokens)
        same += sum(a == b for a, b in zip(run.tokens, other.tokens, strict=True))
    return {
        "identical": same == compared if compared else None,
        "identical_rows": same,
        "compared_rows": compared,
    }
