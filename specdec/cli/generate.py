"""``specdec generate``"""

from __future__ import annotations

import secrets
from time import perf_counter
from typing import Annotated

import typer

from . import options as opt
from .common import (
    coloured,
    load,
    make_drafters,
    number,
    percent,
    print_json,
    read_stdin,
    sampling_options,
    stderr,
    stdout,
)


def generate(
    model: opt.Model,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="A prompt; several make a batch. Default: stdin."),
    ] = None,
    prompt_file: opt.PromptFile = None,
    max_new_tokens: opt.MaxNewTokens = 128,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop behind this text; repeatable.")
    ] = None,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Print as it is generated. Default: with one prompt.",
            show_default=False,
        ),
    ] = None,
    highlight: Annotated[
        bool, typer.Option("--highlight", help="Colour accepted draft tokens; no streaming then.")
    ] = False,
    json: opt.Json = False,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="Who guesses: none, ngram[:K] or draft[:K]. Default: draft if --draft-model is "
            "given, else ngram.",
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
    seed: opt.Seed = None,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    chat: opt.Chat = None,
) -> None:
    """Generate text from one prompt or a batch of them.

    Without options of sampling the model's own generation config decides, as in transformers.
    """
    options = sampling_options(
        do_sample, temperature, top_k, top_p, min_p, repetition_penalty, no_repeat_ngram_size
    )
    spec = drafter or ("draft" if draft_model else "ngram")
    (make_drafter,) = make_drafters(
        [spec],
        draft_model=draft_model,
        num_draft_tokens=num_draft_tokens,
        max_ngram=max_ngram,
        min_ngram=min_ngram,
    ).values()
    texts = _prompts(prompt, prompt_file)
    if stream and (json or highlight):
        raise ValueError("--stream: not with --json or --highlight")
    if stream and len(texts) > 1:
        raise ValueError(f"--stream: one prompt only, got {len(texts)}")
    stream = len(texts) == 1 and not json and not highlight if stream is None else stream

    target, tokenizer = load(model, dtype, device, threads)
    from transformers import TextStreamer

    import specdec

    from ..text import encode_prompts, segments

    def load_draft():
        other, other_tokenizer = load(draft_model, dtype, device)
        return other, {"tokenizer": other_tokenizer, "target_tokenizer": tokenizer}

    inputs = encode_prompts(tokenizer, texts, chat).to(target.device)
    if stop:
        options |= {"stop_strings": stop, "tokenizer": tokenizer}
    # torch's own generator starts the same in every process
    seed = secrets.randbits(32) if seed is None else seed
    began = perf_counter()
    out = specdec.generate(
        target,
        **inputs,
        drafter=make_drafter(load_draft),
        method=method,
        seed=seed,
        max_new_tokens=max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        if stream
        else None,
        **options,
    )
    seconds = perf_counter() - began
    new = out.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    new = [row[: len(mask)] for row, mask in zip(new, out.accepted_mask, strict=True)]
    if json:
        answers = tokenizer.batch_decode(new, skip_special_tokens=True)
        print_json(
            {
                "model": model,
                "drafter": spec,
                "seed": seed,
                "outputs": [
                    {
                        "prompt": text,
                        "text": answer,
                        "tokens": row,
                        "accepted": mask,
                        "finish_reason": reason,
                    }
                    for text, answer, row, mask, reason in zip(
                        texts, answers, new, out.accepted_mask, out.finish_reasons, strict=True
                    )
                ],
                "seconds": seconds,
                "tokens_per_second": out.stats.emitted / seconds,
                "stats": out.stats.to_dict(),
            }
        )
        return
    if not stream:
        console = stdout()
        answers = tokenizer.batch_decode(new, skip_special_tokens=True)
        for i, answer in enumerate(answers):
            if len(new) > 1:
                console.rule(f"{i + 1}", align="left")
            if highlight:
                pieces = segments(tokenizer, new[i], out.accepted_mask[i])
                console.print(coloured(pieces), soft_wrap=True)
            else:
                typer.echo(answer)
    stats = out.stats
    stderr().print(
        f"{stats.emitted} tokens in {seconds:.2f} s ({number(stats.emitted / seconds, 1)}/s), "
        f"{number(stats.tokens_per_forward)} per forward, "
        f"{percent(stats.acceptance_rate if stats.drafted else None)} of {stats.drafted} drafts "
        f"accepted, {stats.method}; ended by {', '.join(out.finish_reasons)}",
        style="dim",
        soft_wrap=True,
    )


def _prompts(prompt: list[str] | None, prompt_file) -> list[str]:
    texts = list(prompt or [])
    if prompt_file is not None:
        from ..prompts import load_prompts

        texts += [entry.text for entry in load_prompts(prompt_file)]
    elif not texts:
        # the line end that a shell adds is no part of the prompt
        text = read_stdin().removesuffix("\n")
        texts = [text] if text.strip() else []
    if not texts:
        raise ValueError("no prompt: give --prompt, --prompt-file, or text on stdin")
    return texts
