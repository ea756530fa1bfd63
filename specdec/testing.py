"""Tiny models for tests: random ones of each family, and ones whose law is known."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .drafters import Draft, DraftContext, Drafter, DraftSession

# family -> (model class, config class, what differs from the shared sizes)
FAMILIES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "qwen2": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 8}),
    # with tied embeddings a random Gemma repeats its last token for ever
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {"sliding_window": 8, "tie_word_embeddings": False},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
        },
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {"sliding_window": 8}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {}),
}


def tiny_model(family: str = "llama", *, seed: int = 0, vocab_size: int = 97, **overrides):
    """A random two-layer model in float32 whose logits are decisive; pad id 0, no EOS."""
    import transformers

    model_name, config_name, extra = FAMILIES[family]
    if family == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    else:
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 256,
        }
    config = getattr(transformers, config_name)(
        vocab_size=vocab_size,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        **{**sizes, **extra, **overrides},
    )
    torch.manual_seed(seed)
    model = getattr(transformers, model_name)(config).eval()
    return _without_eos(model, pad=0)


def _without_eos(model, pad: int):
    model.generation_config.pad_token_id = pad
    model.generation_config.eos_token_id = None
    return model


def wrong_copy(model):
    """A copy whose argmax is never the model's: the head's rows are rolled by one."""
    other = copy.deepcopy(model)
    head = other.get_output_embeddings()
    # untied: the embedding must stay
    head.weight = torch.nn.Parameter(head.weight.detach().roll(1, dims=0))
    return other


def noisy_copy(model, scale: float = 0.02, seed: int = 1):
    """A copy with noise on its weights: mixed acceptance."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * scale)
    return other


def make_drafter(kind: str, model, num_draft_tokens: int = 5, **options):
    """``none``, ``ngram``, or a draft model: a copy of the target, ``wrong`` or ``noisy``."""
    from . import DraftModel, NGram

    if kind == "none":
        return None
    if kind == "ngram":
        return NGram(num_draft_tokens, **options)
    copies = {"self": copy.deepcopy, "wrong": wrong_copy, "noisy": noisy_copy}
    return DraftModel(copies[kind](model), num_draft_tokens, **options)


def left_pad(
    prompts: Sequence[list[int]], pad: int = 0, *, extra: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of any lengths as ``input_ids`` and ``attention_mask``, [B, longest + extra]."""
    width = max(map(len, prompts)) + extra
    ids = [[pad] * (width - len(p)) + p for p in prompts]
    mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def byte_tokenizer(alphabet: bytes):
    """A tokenizer without files: id i is the byte ``alphabet[i]``. No special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    names = bytes_to_unicode()
    tokenizer = Tokenizer(models.BPE({names[b]: i for i, b in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _lookup_model(head: torch.Tensor):
    """A Llama whose logits are ``head[:, last]``: attention and MLP add nothing to the one-hot
    embedding, yet a real cache and the real forward path are used. ``head`` is [V, V]."""
    import transformers

    size = head.shape[0]
    config = transformers.LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        # RMSNorm takes a one-hot row to sqrt(size) times it
        model.lm_head.weight.copy_(head / math.sqrt(size))
    # transformers takes leading padding ids for padding, so it must not be an id in use
    return _without_eos(model, pad=size - 1)


def count_model(size: int = 32):
    """The next token is always (last + 1) mod size."""
    return _lookup_model(30 * torch.eye(size).roll(1, dims=0))


def markov_model(transition: torch.Tensor, size: int = 32):
    """The next token's law is ``transition[last]``, exactly: [n, n] or [n] (every row), n <= size.

    Ids from n on have no probability; after one of them, id 0's row holds.
    """
    if transition.ndim == 1:
        transition = transition.expand(len(transition), -1)
    n = transition.shape[0]
    head = torch.full((size, size), -1e4)
    head[:n, :n] = transition.log().clamp(min=-1e4).T
    head[:n, n:] = transition[0].log().clamp(min=-1e4)[:, None]
    return _lookup_model(head)


# ---- prompts, and what transformers makes of them ----


def random_prompts(*lengths: int, vocab_size: int = 97, seed: int = 0) -> list[list[int]]:
    """Ids from 2 on: neither padding nor a beginning of sequence."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, vocab_size, (n,), generator=generator).tolist() for n in lengths]


@dataclass(frozen=True)
class GreedyPath:
    """The new tokens of ``model.generate(do_sample=False)``, each row by itself."""

    tokens: list[list[int]]
    gaps: list[list[float]]  # between the two largest logits

    def check(self, out, min_gap: float = 1e-3) -> None:
        """Raise unless ``out``, of ``specdec.generate``, begins with the same tokens.

        Also unless every gap is wide: else rounding could explain a difference, and nothing is
        tested.
        """
        assert min(map(min, self.gaps)) > min_gap, "choose another seed: top-2 logits too close"
        for b, (expected, accepted) in enumerate(zip(self.tokens, out.accepted_mask, strict=True)):
            num = len(accepted)
            width = out.sequences.shape[1] - max(map(len, out.accepted_mask))
            got = out.sequences[b, width : width + num].tolist()
            if got == expected[:num]:
                continue
            i = next((i for i, (x, y) in enumerate(zip(got, expected, strict=False)) if x != y), 0)
            raise AssertionError(
                f"row {b}, round {accepted[:i].count(False)}, new token {i} (top-2 gap "
                f"{self.gaps[b][i]:.2g}): got {got[i]} instead of {expected[i]}\n{got}\n{expected}"
            )


def greedy_path(model, prompts: Sequence[list[int]], num_tokens: int) -> GreedyPath:
    tokens, gaps = [], []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens.append(out.sequences[0, len(prompt) :].tolist())
        top = torch.stack(out.logits, dim=1)[0].float().topk(2).values
        gaps.append((top[:, 0] - top[:, 1]).tolist())
    return GreedyPath(tokens, gaps)


# ---- drafters that watch or steer another ----


@dataclass(frozen=True)
class Spy(Drafter):
    """Drafts as ``inner`` does, and keeps what it was asked and answered.

    Args:
        inner: the drafter at work.
        schedule: most tokens to draft in each round, repeated; default no limit.
        calls: (rows, limits, draft or None) of each round.
        contexts: of each call of ``generate``.
    """

    inner: Drafter
    schedule: tuple[int, ...] = ()
    calls: list[tuple[list[list[int]], list[int], Draft | None]] = field(default_factory=list)
    contexts: list[DraftContext] = field(default_factory=list)

    def start(self, context: DraftContext) -> DraftSession:
        self.contexts.append(context)
        return _SpySession(self, self.inner.start(context))


class _SpySession(DraftSession):
    def __init__(self, spy: Spy, inner: DraftSession):
        self._spy, self._inner, self._round = spy, inner, 0
        self.has_probs = inner.has_probs

    @property
    def num_forwards(self) -> int:
        return self._inner.num_forwards

    def propose(self, rows: Sequence[list[int]], limits: list[int]) -> Draft | None:
        if self._spy.schedule:
            most = self._spy.schedule[self._round % len(self._spy.schedule)]
            limits = [min(limit, most) for limit in limits]
        self._round += 1
        draft = self._inner.propose(rows, limits)
        self._spy.calls.append(([list(row) for row in rows], list(limits), draft))
        return draft

    def observe(self, num_accepted: list[int]) -> None:
        self._inner.observe(num_accepted)

    def keep(self, rows: list[int]) -> None:
        self._inner.keep(rows)


@dataclass(frozen=True)
class Oracle(Drafter):
    """Knows how rows go on, and drafts a random number of right tokens, then of wrong ones.

    Args:
        texts: prompts with their continuations.
        num_draft_tokens: most tokens of a draft; the next one after a right run is wrong.
        seed: of the random numbers.
    """

    texts: list[list[int]]
    num_draft_tokens: int = 5
    seed: int = 0

    def start(self, context: DraftContext) -> DraftSession:
        return _OracleSession(self, context.vocab_size)


class _OracleSession(DraftSession):
    def __init__(self, oracle: Oracle, vocab_size: int):
        self._oracle, self._vocab = oracle, vocab_size
        self._random = random.Random(oracle.seed)

    def propose(self, rows: Sequence[list[int]], limits: list[int]) -> Draft | None:
        return Draft([self._guess(row, limit) for row, limit in zip(rows, limits, strict=True)])

    def _guess(self, row: list[int], limit: int) -> list[int]:
        text = next(t for t in self._oracle.texts if t[: len(row)] == row)
        num = self._random.randint(0, min(limit, self._oracle.num_draft_tokens))
        right = self._random.choice([0, num, self._random.randint(0, num)])
        draft = text[len(row) : len(row) + num]
        return [x if i < right else (x + 1) % self._vocab for i, x in enumerate(draft)]
