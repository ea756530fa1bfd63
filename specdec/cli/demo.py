"""``specdec demo``"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.panel import Panel
from rich.table import Table

from . import options as opt
from .common import (
    ACCEPTED_STYLE,
    coloured,
    load,
    number,
    percent,
    print_json,
    stderr,
    stdout,
    with_spread,
    yes_no,
)

PROMPT = "code-edit-1"


def demo(
    max_new_tokens: opt.MaxNewTokens = 96,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each.")] = 3,
    dtype: opt.Dtype = "bfloat16",
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    json: opt.Json = False,
) -> None:
    """Answer a prompt with SmolLM2-135M, plainly and speculatively, side by side."""
    model, tokenizer = load("smollm2", dtype, device, threads)
    from .. import bench as measuring
    from ..drafters import NGram
    from ..machine import device_of
    from ..prompts import builtin_prompts
    from ..text import segments

    prompt = next(p for p in builtin_prompts() if p.id == PROMPT)
    units = [[prompt]]
    contenders = [
        measuring.Contender(measuring.PLAIN),
        measuring.Contender("speculative", NGram()),
    ]
    with stderr().status("answering, in turns"):
        runs = measuring.measure(
            model,
            tokenizer,
            units,
            contenders,
            options={"do_sample": False, "max_new_tokens": max_new_tokens},
            repeats=repeats,
        )
    figures = measuring.summarise(runs, units, contenders)["total"]
    pieces = {
        name: segments(
            tokenizer, *next((r.tokens[0], r.accepted[0]) for r in runs if r.contender == name)
        )
        for name in figures
    }
    device_entry = device_of(model)
    if json:
        import torch

        print_json(
            {
                "model": "smollm2",
                "drafter": "ngram",
                "dtype": str(model.dtype).removeprefix("torch."),
                "device": device_entry,
                "threads": torch.get_num_threads(),
                "repeats": repeats,
                "prompt": prompt.text,
                "speedup": figures["speculative"]["speedup"],
                **{
                    name: {
                        **figures[name],
                        "text": "".join(text for text, _ in parts),
                        "segments": [{"text": t, "accepted": a} for t, a in parts],
                    }
                    for name, parts in pieces.items()
                },
            }
        )
        return
    _show(prompt.text, figures, pieces, str(model.dtype).removeprefix("torch."))


def _show(prompt: str, figures: dict, pieces: dict, dtype: str) -> None:
    console = stdout(min_width=100)
    plain, speculative = figures["plain"], figures["speculative"]
    console.print(Panel(prompt, title="prompt", title_align="left"))
    answers = Table.grid(expand=True, padding=(0, 1, 0, 0))
    answers.add_column(ratio=1)
    answers.add_column(ratio=1)
    answers.add_row(
        *(
            Panel(
                coloured(pieces[name]),
                title=f"{name}: {number(entry['tokens_per_second']['median'], 1)} tokens/s",
                title_align="left",
            )
            for name, entry in figures.items()
        )
    )
    console.print(answers)
    console.print(
        f"[{ACCEPTED_STYLE}]coloured[/]: drafted by n-gram look-up, accepted by the model"
    )
    table = Table("", "plain", "speculative")
    for label, show in (
        ("tokens per second, median (p20–p80)", lambda e: with_spread(e["tokens_per_second"])),
        ("tokens per forward", lambda e: number(e["tokens_per_forward"])),
        ("mean accepted drafts per forward", lambda e: number(e["mean_accepted"])),
        ("drafts accepted", lambda e: percent(e["acceptance_rate"])),
        ("time outside the model's forward", lambda e: percent(e["outside_share"])),
    ):
        table.add_row(label, show(plain), show(speculative))
    console.print(table)
    same = f"the same answer: {yes_no(speculative['identical'])}"
    if not speculative["identical"] and dtype != "float32":
        same += f" (in {dtype} a wide forward rounds otherwise, which decides near ties)"
    console.print(f"[bold]{speculative['speedup']:.2f} times as fast[/]; {same}")
