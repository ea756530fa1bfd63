"""Tiny models for tests: random ones of each family, and ones whose law is known."""

from __future__ import annotations

import copy
import math

import torch

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
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {"sliding_window": 8}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
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
    return _without_eos(model)


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


def noisy_copy(model, scale: float = 0.05, seed: int = 1):
    """A copy with noise on its weights: mixed acceptance."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * scale)
    return other


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
