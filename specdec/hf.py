"""The transformers side: ``generate`` and ``custom_generate``, and what they take or refuse.

Both go through ``model.generate``, which merges generation configs, builds logits processors and
stopping criteria and checks arguments, so that every option means what it means there.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from transformers import GenerationConfig
from transformers.generation import logits_process, stopping_criteria
from transformers.utils import ModelOutput

from .decode import Request, Row, decode
from .drafters import Drafter, Sampling
from .model import CachedModel, check_length, check_model, vocab_size
from .stats import Stats

# generation-config entries that would change the output and are not built: value that is harmless
UNSUPPORTED = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "num_beam_groups": (None, 1),
    "diversity_penalty": (None, 0.0),
    "constraints": (None,),
    "force_words_ids": (None,),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "guidance_scale": (None, 1, 1.0),
    "top_h": (None,),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "watermarking_config": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None, False),
    "token_healing": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    # the cache is ours: static slots in the model's dtype on the model's device
    "cache_implementation": (None, "dynamic", "static", "hybrid"),
    "use_cache": (None, True),
}
# arguments of generate() that never reach a custom_generate function
UNSUPPORTED_ARGUMENTS = (
    "assistant_model",
    "assistant_tokenizer",
    "custom_generate",
    "inputs_embeds",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "past_key_values",
    "cache",
    "synced_gpus",
    "num_assistant_tokens",
    "assistant_confidence_threshold",
)


@dataclass
class GenerateOutput(ModelOutput):
    """What ``specdec.generate`` returns. Indexing and unpacking work as in transformers.

    Attributes:
        sequences: [B, prompt + new] int64, prompt and left padding as given, padded on the right
            with ``pad_token_id``.
        scores: if ``output_scores``: one [B, V] float32 per new token, the processed (and, when
            sampling, filtered) logits it was chosen from; zeros behind a row's end.
        logits: if ``output_logits``: the same, unprocessed.
        logprobs: if ``output_logprobs``: [B, new] float32, log-softmax of the unprocessed logits
            at each new token; nan behind a row's end.
        top_logprobs, top_ids: if ``top_logprobs=n``: [B, new, n], the n largest of the same law.
        finish_reasons: per row "eos", "stop" or "length".
        accepted_mask: per row one bool per new token: whether a drafter guessed it.
        stats: see ``Stats``.
    """

    sequences: torch.Tensor | None = None
    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None
    logprobs: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    finish_reasons: list[str] | None = None
    accepted_mask: list[list[bool]] | None = None
    stats: Stats | None = None


def generate(
    model,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    drafter: Drafter | None = None,
    method: str = "auto",
    seed: int | Sequence[int] | None = None,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    streamer=None,
    tokenizer=None,
    generation_config: GenerationConfig | None = None,
    output_logprobs: bool = False,
    top_logprobs: int = 0,
    **kwargs,
) -> GenerateOutput:
    """Generate with ``model``, speculatively: same tokens or same law as ``model.generate``.

    Args:
        model: a decoder-only causal LM of transformers. Left as it was, also after an error.
        input_ids: [B, L] int64, left-padded.
        attention_mask: [B, L]; default: no padding (or, as in transformers, where it can be told).
        drafter: who guesses; None decodes plainly with the same loop, cache and noise.
        method: the rule of ``specdec_kernels.verify_chain``. "auto": greedy without sampling, block
            for drafters that sample, match for the others; all lossless.
        seed: one int for every row, or one per row; None: drawn from torch's global generator. With
            method "match", and with ``drafter=None``, a row's tokens depend on its seed and prompt
            alone; with "token" and "block" also on the drafter and its number of tokens.
        max_new_tokens: default 128, unless a generation config sets a length.
        temperature: 0 means ``do_sample=False``.
        top_k: default 0 (off), unless a generation config sets it; transformers' default of 50 does
            not apply.
        streamer: as in transformers; batch size 1.
        tokenizer: needed with ``stop_strings``.
        output_logprobs, top_logprobs: see ``GenerateOutput``.
        generation_config, kwargs: as in ``model.generate``: do_sample, top_p, min_p, max_length,
            eos_token_id, pad_token_id, repetition_penalty, no_repeat_ngram_size, bad_words_ids,
            suppress_tokens, min_new_tokens, sequence_bias, prefix_allowed_tokens_fn,
            logits_processor, stopping_criteria, stop_strings, max_time, output_scores,
            output_logits, token_type_ids, ... Processors and criteria are called per row, with the
            prefix of each position.

    Raises:
        ValueError: what cannot be honoured, by name (beams, several return sequences, contrastive
            search, watermarks, quantised or offloaded caches, ...); what transformers refuses.
    """
    streaming = _Streaming(streamer, input_ids) if streamer is not None else None

    def run(model, input_ids, **prepared) -> GenerateOutput:
        return _decode(
            model,
            input_ids,
            drafter=drafter,
            method=method,
            seed=seed,
            streaming=streaming,
            output_logprobs=output_logprobs,
            top_logprobs=top_logprobs,
            **prepared,
        )

    with streaming or contextlib.nullcontext():
        check_model(model)
        _check_prompts(input_ids)
        _refuse_arguments(kwargs)
        settings = _Settings(kwargs, generation_config, model.generation_config)
        _refuse(settings)
        options = kwargs | _defaults(settings, max_new_tokens, temperature, top_k)
        if settings["stop_strings"] is not None:
            options |= _stop_strings(settings, tokenizer)
        if attention_mask is None:
            _warn_if_ambiguous(settings, input_ids)
        return model.generate(
            input_ids,
            attention_mask=attention_mask,
            generation_config=generation_config,
            custom_generate=run,
            **options,
        )


def custom_generate(
    model,
    input_ids: torch.Tensor,
    logits_processor=None,
    stopping_criteria=None,
    generation_config: GenerationConfig | None = None,
    *,
    drafter: Drafter | None = None,
    method: str = "auto",
    seed: int | Sequence[int] | None = None,
    token_streamer=None,
    output_logprobs: bool = False,
    top_logprobs: int = 0,
    **model_kwargs,
) -> GenerateOutput | torch.Tensor:
    """``model.generate(**inputs, custom_generate=specdec.custom_generate, drafter=...)``.

    The arguments are those of ``generate``, and so is the output where ``return_dict_in_generate``
    is set; otherwise its ``sequences``. Differences that transformers imposes: it keeps
    ``streamer`` to itself (pass ``token_streamer``), ``tokenizer`` too (for stop strings pass its
    ``StopStringCriteria`` as one of ``stopping_criteria``), ignores ``assistant_model``, and its
    default ``top_k`` is 50.
    """
    streaming = _Streaming(token_streamer, input_ids) if token_streamer is not None else None
    with streaming or contextlib.nullcontext():
        out = _decode(
            model,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            drafter=drafter,
            method=method,
            seed=seed,
            streaming=streaming,
            output_logprobs=output_logprobs,
            top_logprobs=top_logprobs,
            **model_kwargs,
        )
    return out if generation_config.return_dict_in_generate else out.sequences


class _Streaming:
    """A streamer over one call: ends once, whatever happens."""

    def __init__(self, streamer, input_ids: torch.Tensor):
        if input_ids.shape[0] != 1:
            raise ValueError(f"streamer: expected batch size 1, got {input_ids.shape[0]}")
        self._streamer = streamer
        self._prompt = input_ids

    def __enter__(self):
        return self

    def begin(self) -> None:
        self._streamer.put(self._prompt.cpu())

    def put(self, tokens: list[int]) -> None:
        self._streamer.put(torch.tensor(tokens))

    def __exit__(self, *_) -> None:
        self._streamer.end()


class _Settings:
    """The value of each option, from the first source that sets it, as transformers resolves it."""

    def __init__(
        self, kwargs: dict, config: GenerationConfig | None, model_config: GenerationConfig
    ):
        self._kwargs = kwargs
        self._configs = (config, model_config)

    def __getitem__(self, name: str):
        if name in self._kwargs:
            return self._kwargs[name]
        values = (getattr(config, name, None) for config in self._configs)
        return next((value for value in values if value is not None), None)


def _refuse_arguments(kwargs: dict) -> None:
    for name in UNSUPPORTED_ARGUMENTS:
        value = kwargs.get(name)
        if value is not None and value is not False:
            raise ValueError(f"{name}: not supported by specdec.generate")


def _refuse(settings) -> None:
    for name, harmless in UNSUPPORTED.items():
        if settings[name] not in harmless:
            raise ValueError(f"{name}={settings[name]!r}: not supported by specdec")


def _defaults(settings: _Settings, max_new_tokens, temperature, top_k) -> dict:
    """Our own arguments for ``model.generate``, and our defaults where nobody says otherwise."""
    options = {}
    if max_new_tokens is not None:
        options["max_new_tokens"] = max_new_tokens
    elif settings["max_length"] is None and settings["max_new_tokens"] is None:
        options["max_new_tokens"] = 128
    if temperature is not None and temperature == 0:
        options["do_sample"] = False
    elif temperature is not None:
        options["temperature"] = temperature
    if top_k is not None:
        options["top_k"] = top_k
    elif settings["top_k"] is None and settings["do_sample"]:
        options["top_k"] = 0
    return options


def _stop_strings(settings: _Settings, tokenizer) -> dict:
    """transformers passes a custom function no tokenizer, and would raise for want of one."""
    if tokenizer is None:
        raise ValueError("stop_strings: need the model's tokenizer; pass tokenizer=")
    criterion = stopping_criteria.StopStringCriteria(tokenizer, settings["stop_strings"])
    others = settings["stopping_criteria"] or []
    return {"stop_strings": None, "stopping_criteria": [criterion, *others]}


def _warn_if_ambiguous(settings: _Settings, input_ids: torch.Tensor) -> None:
    """A row that begins with its own padding token, where transformers cannot tell."""
    pad, eos = settings["pad_token_id"], settings["eos_token_id"]
    eos = eos if isinstance(eos, (list, tuple)) else [eos]
    if pad is not None and pad not in eos:
        return
    pad = eos[0] if pad is None else pad
    if pad is not None and input_ids.shape[0] > 1 and bool((input_ids[:, 0] == pad).any()):
        warnings.warn(
            "attention_mask: not given, and a row begins with the padding token, which is also an "
            "end-of-sequence token: it is read as text. Pass attention_mask.",
            stacklevel=3,
        )


@contextlib.contextmanager
def _in_eval_mode(*models):
    """Dropout off; each module's own flag back afterwards."""
    training = [m for model in models for m in model.modules() if m.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def _decode(
    model,
    input_ids: torch.Tensor,
    *,
    logits_processor,
    stopping_criteria,
    generation_config: GenerationConfig,
    drafter: Drafter | None,
    method: str,
    seed: int | Sequence[int] | None,
    streaming: _Streaming | None,
    output_logprobs: bool,
    top_logprobs: int,
    **model_kwargs,
) -> GenerateOutput:
    config = generation_config
    _refuse(_Settings({}, None, config))
    if drafter is not None and not isinstance(drafter, Drafter):
        raise ValueError(f"drafter: expected a specdec Drafter, got {type(drafter).__name__}")
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds: not supported by specdec")
    check_model(model)
    _check_prompts(input_ids)
    sampling = _sampling(config)
    if method == "greedy" and config.do_sample:
        raise ValueError("method='greedy' contradicts do_sample=True")
    padding = _padding(input_ids, model_kwargs.pop("attention_mask", None))
    ids = input_ids.tolist()
    prompts = [row[pad:] for row, pad in zip(ids, padding, strict=True)]
    max_new_tokens = config.max_length - input_ids.shape[1]
    capacity = max(map(len, prompts)) + max_new_tokens
    check_length(model, [len(p) for p in prompts], capacity)
    eos_ids = _token_ids(config.eos_token_id)
    criteria = _criteria(stopping_criteria)
    pad_id = _pad_id(config, len(prompts), bool(eos_ids or criteria))
    token_types, forward_kwargs = _forward_kwargs(model_kwargs, padding)
    request = Request(
        target=CachedModel(
            model,
            len(prompts),
            capacity,
            token_type_ids=token_types,
            forward_kwargs=forward_kwargs,
        ),
        prompts=prompts,
        padding=[row[:pad] for row, pad in zip(ids, padding, strict=True)],
        max_new_tokens=max_new_tokens,
        capacity=capacity,
        vocab_size=vocab_size(model),
        sampling=sampling,
        method=method,
        seeds=_seeds(seed, len(prompts), sampling),
        eos_ids=eos_ids,
        processors=_processors(logits_processor, config),
        criteria=criteria,
        on_tokens=streaming.put if streaming else None,
        output_scores=bool(config.output_scores),
        output_logits=bool(config.output_logits),
        output_logprobs=output_logprobs or top_logprobs > 0,
        normalize_scores=bool(config.renormalize_logits),
        top_logprobs=top_logprobs,
    )
    if streaming:
        streaming.begin()
    models = [model, *([drafter.model] if hasattr(drafter, "model") else [])]
    with torch.no_grad(), _in_eval_mode(*models):
        rows, stats = decode(request, drafter)
    return _output(request, rows, stats, input_ids, pad_id)


def _sampling(config: GenerationConfig) -> Sampling:
    if not config.do_sample:
        return Sampling()
    return Sampling(
        temperature=1.0 if config.temperature is None else config.temperature,
        top_k=config.top_k or 0,
        top_p=1.0 if config.top_p is None else config.top_p,
        min_p=config.min_p or 0.0,
    )


def _check_prompts(input_ids: torch.Tensor) -> None:
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids: expected [B, L] with tokens, got {list(input_ids.shape)}")


def _padding(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[int]:
    """How many padding tokens each row begins with."""
    if attention_mask is None:
        return [0] * input_ids.shape[0]
    mask = attention_mask.to(torch.bool)
    if tuple(mask.shape) != tuple(input_ids.shape):
        raise ValueError(
            f"attention_mask: expected {list(input_ids.shape)}, got {list(mask.shape)}"
        )
    padding = (~mask).sum(dim=1)
    left = torch.arange(mask.shape[1], device=mask.device) >= padding[:, None]
    if not bool(mask[:, -1].all()):
        raise ValueError("attention_mask: right padding is not supported; pad on the left")
    if not torch.equal(mask, left):
        raise ValueError("attention_mask: gaps are not supported; only padding on the left")
    return padding.tolist()


def _token_ids(ids: int | Sequence[int] | torch.Tensor | None) -> frozenset[int]:
    if ids is None:
        return frozenset()
    return frozenset(torch.as_tensor(ids).flatten().tolist())


def _pad_id(config: GenerationConfig, batch: int, may_end_early: bool) -> int:
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    if config.eos_token_id is not None:
        return int(torch.as_tensor(config.eos_token_id).flatten()[0])
    if batch > 1 and may_end_early:
        raise ValueError("pad_token_id: needed when rows of a batch may end at different lengths")
    return 0


def _seeds(seed, batch: int, sampling: Sampling) -> list[int]:
    """One 64-bit seed per row, as signed integers."""
    if seed is None:
        if sampling.temperature == 0:
            return [0] * batch  # nothing is drawn: leave the global generator alone
        return torch.randint(2**63 - 1, (batch,)).tolist()
    values = seed.tolist() if hasattr(seed, "tolist") else seed
    seeds = list(values) if isinstance(values, Sequence) else [values] * batch
    if len(seeds) != batch or not all(isinstance(s, Integral) for s in seeds):
        raise ValueError(f"seed: expected one int or one per row ({batch}), got {seed!r}")
    return [(int(s) + 2**63) % 2**64 - 2**63 for s in seeds]


def _processors(processors, config: GenerationConfig) -> list:
    """What transformers built, without the warpers at its end: the verification op applies them."""
    rest = list(processors or [])
    warpers = []
    if config.do_sample:
        warpers = [
            (logits_process.TemperatureLogitsWarper, config.temperature not in (None, 1.0)),
            (logits_process.TopKLogitsWarper, config.top_k not in (None, 0)),
            (logits_process.TopPLogitsWarper, config.top_p is not None and config.top_p < 1.0),
            (logits_process.MinPLogitsWarper, config.min_p is not None),
        ]
    # appended last, because each scales or normalises what the others left
    warpers.append((logits_process.LogitNormalization, config.renormalize_logits is True))
    for kind, present in reversed(warpers):
        if present:
            last = rest.pop()
            assert type(last) is kind, (kind, last)
    return rest


def _criteria(criteria) -> list[Callable]:
    """Stopping criteria that the loop does not know by itself."""
    known = (stopping_criteria.MaxLengthCriteria, stopping_criteria.EosTokenCriteria)
    return [c for c in criteria or [] if not isinstance(c, known)]


def _forward_kwargs(model_kwargs: dict, padding: list[int]) -> tuple[torch.Tensor | None, dict]:
    """Split what is left for the model's forward: token types by position, constants, refusals."""
    ours = ("position_ids", "use_cache", "logits_to_keep", "past_key_values", "cache")
    cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError("past_key_values: a filled cache is not supported")
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        start = torch.tensor(padding, device=positions.device)[:, None]
        expected = torch.arange(positions.shape[-1], device=positions.device) - start
        if bool(((positions != expected) & (expected >= 0)).any()):
            raise ValueError("position_ids: only 0, 1, ... from a row's first token on")
    rest = {k: v for k, v in model_kwargs.items() if k not in ours and v is not None}
    types = rest.pop("token_type_ids", None)
    if types is not None:
        types = torch.stack(
            [
                torch.cat([row[pad:], row[-1:].expand(pad)])
                for row, pad in zip(types, padding, strict=True)
            ]
        )
    for name, value in rest.items():
        if isinstance(value, torch.Tensor):
            raise ValueError(f"{name}: tensor arguments of the forward are not supported")
    return types, rest


def _output(
    request: Request, rows: list[Row], stats: Stats, input_ids: torch.Tensor, pad_id: int
) -> GenerateOutput:
    new = max(row.new for row in rows)
    tail = [row.tokens[len(row.tokens) - row.new :] + [pad_id] * (new - row.new) for row in rows]
    sequences = torch.cat([input_ids, torch.tensor(tail, device=input_ids.device)], dim=1)

    def by_step(values: list[list[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        zero = torch.zeros_like(values[0][0])
        return tuple(
            torch.stack([row[i] if i < len(row) else zero for row in values]) for i in range(new)
        )

    logits = by_step([row.logits for row in rows]) if rows[0].logits else None
    logprobs = top = ids = None
    if request.output_logprobs:
        law = torch.stack(logits, dim=1).log_softmax(dim=-1)
        lengths = torch.tensor([row.new for row in rows], device=law.device)
        behind = torch.arange(new, device=law.device) >= lengths[:, None]
        index = torch.tensor(tail, device=law.device).clamp(0, law.shape[-1] - 1)[..., None]
        logprobs = law.gather(2, index).squeeze(2).masked_fill(behind, torch.nan)
        if request.top_logprobs:
            top, ids = law.topk(request.top_logprobs, dim=-1)
    return GenerateOutput(
        sequences=sequences,
        scores=by_step([row.scores for row in rows]) if request.output_scores else None,
        logits=logits if request.output_logits else None,
        logprobs=logprobs,
        top_logprobs=top,
        top_ids=ids,
        finish_reasons=[row.finish_reason for row in rows],
        accepted_mask=[row.accepted for row in rows],
        stats=stats,
    )
