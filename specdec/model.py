"""A Hugging Face model with a row cache: the one way the loop and drafters run a forward."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from .cache import RowCache

# attention that honours an explicit 4-D mask; the others ignore it or would need their own
MASKED_ATTENTION = ("sdpa", "eager")
# longest run of tokens in one forward: bounds the mask of a prefill
PREFILL_CHUNK = 2048
LAYER_TYPES = ("full_attention", "sliding_attention")


def text_config(model):
    return model.config.get_text_config(decoder=True)


def vocab_size(model) -> int:
    """How many logits the model gives."""
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    return text_config(model).vocab_size if weight is None else weight.shape[0]


def check_model(model, role: str = "model") -> None:
    """Raise ``ValueError``, naming what is in the way, unless a row cache can serve this model."""
    config = text_config(model)
    kind = type(model).__name__

    def refuse(why: str) -> None:
        raise ValueError(f"{role}: {kind} is not supported: {why}")

    if getattr(model.config, "is_encoder_decoder", False):
        refuse("encoder-decoder; only decoder-only causal LMs")
    if getattr(model, "_is_stateful", False):
        refuse("its recurrent state cannot be rolled back")
    layer_types = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "attention_chunk_size", None) and not layer_types:
        refuse("chunked attention")
    if getattr(config, "use_bidirectional_attention", False):
        refuse("bidirectional attention")
    unknown = sorted(layer_types - set(LAYER_TYPES))
    if unknown:
        refuse(f"layers of type {', '.join(unknown)}; a row cache has {', '.join(LAYER_TYPES)}")
    if model.get_input_embeddings().weight.is_meta:
        refuse("its embeddings are offloaded, on the meta device between forwards")
    parameters = inspect.signature(model.forward).parameters
    if not {"cache", "past_key_values"} & set(parameters):
        refuse("its forward takes no key-value cache; recurrent state cannot be rolled back")
    if "position_ids" not in parameters:
        refuse("its forward takes no position_ids")
    if getattr(config, "alibi", False):
        refuse("ALiBi positions are built from a 2-D mask")
    attention = getattr(config, "_attn_implementation", "eager")
    if attention not in MASKED_ATTENTION:
        refuse(
            f"attention implementation {attention!r} does not take an explicit mask; "
            f"use model.set_attn_implementation with one of {MASKED_ATTENTION}"
        )
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        refuse("no language-model head")


def check_length(model, prompt_lengths: Sequence[int], total: int, role: str = "model") -> None:
    """Refuse lengths at which the rotary frequencies change while tokens are generated.

    They follow the longest row of a forward then, and keys already cached keep the old ones.
    """
    config = text_config(model)
    rope = getattr(config, "rope_parameters", None) or {}
    for part in [rope, *(v for v in rope.values() if isinstance(v, dict))]:
        kind = part.get("rope_type")
        limit = (
            part.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or config.max_position_embeddings
        )
        crosses = total > limit and (kind == "dynamic" or min(prompt_lengths) <= limit)
        if kind in ("dynamic", "longrope") and crosses:
            raise ValueError(
                f"{role}: rope_type {kind!r} changes its frequencies beyond {limit} positions, and "
                f"this call may reach {total}; stay below, or use another rope_type"
            )


class ForwardCost:
    """What a forward costs, in multiplications: its weights once per token, and attention."""

    def __init__(self, model, config):
        self._per_token = sum(p.numel() for p in model.parameters())
        head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        self._per_pair = 2 * config.num_hidden_layers * config.num_attention_heads * head_dim

    def __call__(self, num_tokens: int, num_pairs: int) -> int:
        return num_tokens * self._per_token + num_pairs * self._per_pair


@dataclass(frozen=True)
class RowLogits:
    """Logits of each row's last token and drafts, padded or packed.

    Attributes:
        values: [B, W, V], or packed [T, V].
        starts: packed: where each row's part begins, and the end, [B + 1].
    """

    values: torch.Tensor
    starts: list[int] | None

    def row(self, b: int) -> torch.Tensor:
        """[W, V]: what row b has."""
        if self.starts is None:
            return self.values[b]
        return self.values[self.starts[b] : self.starts[b + 1]]


class CachedModel:
    """``model`` and the cache of one call. Rows may differ in length.

    Args:
        model: a decoder-only causal LM that ``check_model`` accepts.
        batch, capacity: how many rows, and the most positions a row will hold.
        token_type_ids: [B, L] of the prompts, without padding on the left; the last goes on.
        forward_kwargs: passed to every forward as they are.
    """

    def __init__(
        self,
        model,
        batch: int,
        capacity: int,
        *,
        token_type_ids: torch.Tensor | None = None,
        forward_kwargs: dict | None = None,
    ):
        self.model = model
        self.config = text_config(model)
        self.device = model.get_input_embeddings().weight.device
        self.lengths = [0] * batch  # positions of each row that are in the cache and right
        self.widths: list[int] = []  # of every forward
        self.seconds = 0.0  # inside the model's forwards
        self._cache = RowCache(batch, capacity, self.config.num_hidden_layers)
        self._token_types = token_type_ids
        self._kwargs = dict(forward_kwargs or {})
        parameters = inspect.signature(model.forward).parameters
        # transformers 5.24 renamed past_key_values
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._keeps_logits = "logits_to_keep" in parameters
        self._window = getattr(self.config, "sliding_window", None)

    def extend(
        self,
        tokens: list[list[int]],
        drafts: torch.Tensor | None = None,
        num_drafts: Sequence[int] | None = None,
    ) -> RowLogits:
        """Run each row's next ``tokens``, then its drafts. Advances ``lengths`` over all of it.

        Returns the logits after the last token and after each draft, in the model's dtype.

        Args:
            tokens: one list per row (an empty one: the row has drafts only, or sits this out).
            drafts: [B, K] int64; ids outside the vocabulary are padding.
            num_drafts: how many of each row are real; default all.
        """
        while max(map(len, tokens)) > PREFILL_CHUNK:
            # the masks of a long prompt would take more memory than the model
            chunk = [row[: min(PREFILL_CHUNK, len(row) - 1)] for row in tokens]
            tokens = [row[len(head) :] for row, head in zip(tokens, chunk, strict=True)]
            self.extend(chunk)
        counts = [len(row) for row in tokens]
        pending = max(counts)
        padded = [[0] * (pending - len(row)) + row for row in tokens]
        columns = torch.tensor(padded, dtype=torch.int64, device=self.device)
        first = [pending - count for count in counts]
        K = 0
        if drafts is not None and drafts.shape[1]:
            K = drafts.shape[1]
            columns = torch.cat([columns, drafts.to(self.device).clamp(min=0)], dim=1)
            counts = [c + n for c, n in zip(counts, num_drafts or [K] * len(counts), strict=True)]
        if pending == 1 and min(counts) > 0 and self._packs(counts, pending + K):
            logits = self._forward_packed(columns, counts)
        else:
            values = self._forward(columns, first, counts, min(K + 1, columns.shape[1]))
            logits = RowLogits(values, None)
        self.lengths = [s + c for s, c in zip(self.lengths, counts, strict=True)]
        return logits

    @functools.cached_property
    def _cost(self) -> ForwardCost:
        return ForwardCost(self.model, self.config)

    def _visible(self, counts: list[int]) -> int:
        """Slots in use once each row has ``counts`` more tokens."""
        return max(1, max(s + c for s, c in zip(self.lengths, counts, strict=True)))

    def _packs(self, counts: list[int], width: int) -> bool:
        """Whether one row of all tokens is cheaper than a row each, padded to ``width``.

        Packed, the padding is not computed, but every token meets the slots of every row.
        """
        if self.device.type != "cpu" or len(counts) == 1:
            return False  # a GPU wants the same few shapes again and again
        padded, packed = len(counts) * width, sum(counts)
        visible, cost = self._visible(counts), self._cost
        return cost(packed, packed * len(counts) * visible) < cost(padded, padded * visible)

    def _forward_packed(self, columns: torch.Tensor, counts: list[int]) -> RowLogits:
        """One forward of all rows' tokens as one row: columns 0 .. counts[b] - 1 of each."""
        inside = torch.arange(columns.shape[1]) < torch.tensor(counts)[:, None]
        row, column = inside.nonzero(as_tuple=True)
        positions = torch.tensor(self.lengths)[row] + column
        visible = self._visible(counts)
        self._cache.set_slots(row.to(self.device), positions.to(self.device), visible, packed=True)
        # slots of all rows, row by row within a slot
        slot = torch.arange(visible).repeat_interleave(len(counts))
        owner = torch.arange(len(counts)).repeat(visible)
        logits = self._run(
            columns[inside.to(self.device)][None],
            positions[None].to(self.device),
            slot.to(self.device),
            (owner != row[:, None])[None].to(self.device),
            row,
            len(row),
        )
        return RowLogits(logits[0], [0, *itertools.accumulate(counts)])

    def _forward(
        self, input_ids: torch.Tensor, first: list[int], counts: list[int], num_logits: int
    ) -> torch.Tensor:
        """One forward. Row b's tokens are columns first[b] .. first[b] + counts[b]; the columns on
        either side are padding and go to the cache's bin."""
        B, W = input_ids.shape
        visible = self._visible(counts)
        if all(count == W for count in counts) and len(set(self.lengths)) == 1:
            start = self.lengths[0]
            positions = torch.arange(start, start + W, device=self.device).expand(B, W)
            self._cache.set_slots(positions, positions, visible, uniform_start=start)
        else:
            column = torch.arange(W)
            begin, count, offset = torch.tensor(
                [first, counts, [s - f for s, f in zip(self.lengths, first, strict=True)]]
            )[..., None]
            inside = (column >= begin) & (column < begin + count)
            positions = torch.where(inside, column + offset, 0).to(self.device)
            slots = torch.where(inside, column + offset, self._cache.bin).to(self.device)
            rows = torch.arange(B, device=self.device)[:, None]
            self._cache.set_slots(rows, slots, visible)
        slot = torch.arange(visible, device=self.device)
        return self._run(input_ids, positions, slot, None, None, num_logits)

    def _run(self, input_ids, positions, slot, foreign, row, num_logits: int) -> torch.Tensor:
        """The model's forward. ``slot``: the position each visible slot holds; ``foreign``
        [1, W, slots] and ``row`` [W]: which slots belong to other rows, and whose the tokens are,
        when packed."""
        kwargs = {self._cache_name: self._cache, **self._kwargs}
        if self._keeps_logits:
            kwargs["logits_to_keep"] = num_logits
        if self._token_types is not None:
            index = positions.clamp(max=self._token_types.shape[1] - 1)
            types = self._token_types if row is None else self._token_types[row]
            kwargs["token_type_ids"] = types.gather(1, index if row is None else index.T).view_as(
                input_ids
            )
        masks = self._masks(positions, slot, foreign)
        began = perf_counter()
        out = self.model(
            input_ids=input_ids,
            position_ids=positions,
            attention_mask=masks,
            use_cache=True,
            return_dict=True,
            **kwargs,
        )
        self.seconds += perf_counter() - began
        self.widths.append(input_ids.shape[1])
        return out.logits[:, -num_logits:]

    def _masks(self, positions: torch.Tensor, slot: torch.Tensor, foreign: torch.Tensor | None):
        """Additive masks [B, 1, W, slots]: position p sees slots <= p, and > p - window.

        Additive because eager attention adds what it is given. A column without a token has
        position 0 and sees slot 0: nobody reads it, but a row that sees nothing would be nan.
        """
        query = positions[:, :, None]
        hidden = slot > query
        if foreign is not None:
            hidden = hidden | foreign

        def additive(hidden: torch.Tensor) -> torch.Tensor:
            mask = torch.zeros(hidden.shape, dtype=self.model.dtype, device=self.device)
            return mask.masked_fill_(hidden, -torch.inf)[:, None]

        full = additive(hidden)
        windowed = full
        if self._window is not None:
            windowed = additive(hidden | (slot <= query - self._window))
        # transformers' rule: a config with layer_types takes one mask per type, others one for all
        if getattr(self.config, "layer_types", None) is not None:
            return {"full_attention": full, "sliding_attention": windowed}
        return windowed

    def rollback(self, lengths: list[int]) -> None:
        """Forget what lies at and beyond these positions: later tokens overwrite it."""
        self.lengths = lengths

    def keep(self, rows: list[int]) -> None:
        """Drop all rows but these."""
        self._cache.keep(rows)
        self.lengths = [self.lengths[b] for b in rows]
        if self._token_types is not None:
            self._token_types = self._token_types[rows]
