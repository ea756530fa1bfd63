"""``specdec bench``"""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from . import options as opt
from .common import (
    load,
    make_drafters,
    number,
    percent,
    print_json,
    sampling_options,
    stderr,
    stdout,
    with_spread,
    yes_no,
)


def bench(
    model: opt.Model,
    prompts: Annotated[
        str, typer.Option(help="File of prompts as in generate, or 'builtin': eight kinds, ours.")
    ] = "builtin",
    kinds: Annotated[
        str | None, typer.Option(help="Only these kinds of prompt, separated by commas.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most prompts of each kind.")] = None,
    max_new_tokens: opt.MaxNewTokens = 96,
    repeats: Annotated[int, typer.Option("--repeats", "-r", min=1, help="Timed rounds.")] = 3,
    batch_size: Annotated[
        int, typer.Option("--batch-size", "-b", min=1, help="Prompts a run.")
    ] = 1,
    against_transformers: Annotated[
        bool, typer.Option("--against-transformers", help="Time model.generate as well.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for bench.json and bench.png.", file_okay=False)
    ] = None,
    json: opt.Json = False,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="ngram[:K] or draft[:K]; repeatable. Default: ngram, and draft if --draft-model "
            "is given.",
            rich_help_panel="Drafting",
            show_default=False,
        ),
    ] = None,
    draft_model: opt.DraftModel = None,
    num_draft_tokens: opt.NumDraftTokens = None,
    max_ngram: opt.MaxNgram = None,
    min_ngram: opt.MinNgram = None,
    method: opt.Method = "auto",
    do_sample: opt.DoSample = None,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    min_p: opt.MinP = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    no_repeat_ngram_size: opt.NoRepeatNgramSize = None,
    seed: opt.Seed = 0,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    chat: opt.Chat = None,
) -> None:
    """Time plain decoding against each drafter, in turns. Greedy unless told otherwise."""
    given = sampling_options(
        do_sample, temperature, top_k, top_p, min_p, repetition_penalty, no_repeat_ngram_size
    )
    options = {"do_sample": False, **given, "max_new_tokens": max_new_tokens}
    if options["do_sample"]:
        # said aloud, because transformers' default is 50
        options.setdefault("top_k", 0)
    makers = make_drafters(
        drafter or (["ngram", "draft"] if draft_model else ["ngram"]),
        draft_model=draft_model,
        num_draft_tokens=num_draft_tokens,
        max_ngram=max_ngram,
        min_ngram=min_ngram,
    )
    makers.pop("none", None)  # plain decoding is always there
    chosen = _choose(prompts, kinds, limit)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)

    target, tokenizer = load(model, dtype, device, threads)
    import torch

    from .. import bench as measuring
    from ..machine import device_of, versions

    def load_draft():
        other, other_tokenizer = load(draft_model, dtype, device)
        return other, {"tokenizer": other_tokenizer, "target_tokenizer": tokenizer}

    contenders = [
        measuring.Contender(measuring.PLAIN),
        *(measuring.Contender(name, make(load_draft), method) for name, make in makers.items()),
    ]
    if against_transformers:
        contenders.append(measuring.Contender(measuring.TRANSFORMERS, transformers=True))
    units = measuring.make_units(chosen, batch_size)
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr(), transient=True) as progress:
        task = progress.add_task(
            "", total=measuring.count_runs(len(units), len(contenders), repeats)
        )
        runs = measuring.measure(
            target,
            tokenizer,
            units,
            contenders,
            options=options,
            repeats=repeats,
            seed=seed,
            chat=chat,
            on_run=lambda: progress.advance(task),
        )
    report = {
        "model": model,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": device_of(target),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "options": options,
        "method": method,
        "seed": seed,
        "repeats": repeats,
        "batch_size": batch_size,
        "draft_model": draft_model,
        "contenders": [contender.name for contender in contenders],
        **measuring.summarise(runs, units, contenders),
    }
    if out is not None:
        from ..plots import plot_bench

        text = jsonlib.dumps(report, indent=2, ensure_ascii=False, allow_nan=False)
        (out / "bench.json").write_text(text + "\n", encoding="utf-8")
        plot_bench(report, out / "bench.png")
    if json:
        print_json(report)
        return
    stdout(min_width=120).print(_table(report))
    if out is not None:
        stderr().print(f"wrote {out / 'bench.json'} and {out / 'bench.png'}", soft_wrap=True)


def _choose(source: str, kinds: str | None, limit: int | None) -> list:
    from ..prompts import builtin_prompts, load_prompts

    prompts = builtin_prompts() if source == "builtin" else load_prompts(source)
    if kinds is not None:
        wanted = [kind.strip() for kind in kinds.split(",")]
        known = list(dict.fromkeys(prompt.kind for prompt in prompts))
        for kind in wanted:
            if kind not in known:
                raise ValueError(f"--kinds: expected some of {', '.join(known)}, got {kind!r}")
        prompts = [prompt for prompt in prompts if prompt.kind in wanted]
    seen: dict[str, int] = {}
    for prompt in list(prompts):
        seen[prompt.kind] = seen.get(prompt.kind, 0) + 1
        if limit is not None and seen[prompt.kind] > limit:
            prompts.remove(prompt)
    return prompts


def _table(report: dict) -> Table:
    table = Table(
        title=f"{report['model']}, {report['dtype']}, {report['device']['name']}, "
        f"{report['threads']} threads, batch size {report['batch_size']}",
        title_justify="left",
    )
    for name in ("prompts", "decoding", "tokens/s (p20–p80)", "speed-up", "tokens/forward"):
        table.add_column(name, justify="left" if name in ("prompts", "decoding") else "right")
    for name in ("accepted/forward", "accepted", "outside", "= plain"):
        table.add_column(name, justify="right")
    groups = {**report["kinds"], "copy-heavy": report["copy_heavy"], "all": report["total"]}
    for kind, figures in groups.items():
        if figures is None:
            continue
        table.add_section()
        for i, (name, entry) in enumerate(figures.items()):
            same = yes_no(entry["identical"])
            if entry["identical"] is False:
                same = f"{entry['identical_rows']}/{entry['compared_rows']}"
            table.add_row(
                kind if i == 0 else "",
                name,
                with_spread(entry["tokens_per_second"]),
                number(entry["speedup"]),
                number(entry["tokens_per_forward"]),
                number(entry["mean_accepted"]),
                percent(entry["acceptance_rate"]),
                percent(entry["outside_share"]),
                same,
            )
    return table
