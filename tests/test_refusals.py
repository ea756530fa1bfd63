"""What cannot be honoured raises, naming itself, before the first token; nothing is ignored."""

import copy
import warnings

import pytest
import torch
import transformers
from transformers import DynamicCache, GenerationConfig

import specdec
from specdec.testing import count_model, left_pad, make_drafter, tiny_model

IDS = torch.tensor([[0, 1]])


@pytest.fixture(scope="module")
def model():
    return count_model()


def from_generate(model, ids=IDS, **options):
    return specdec.generate(model, ids, drafter=specdec.NGram(), **options)


def from_transformers(model, ids=IDS, **options):
    return model.generate(
        ids, custom_generate=specdec.custom_generate, drafter=specdec.NGram(), **options
    )


def from_config(model, ids=IDS, **options):
    config = GenerationConfig(**options)
    return specdec.generate(model, ids, drafter=specdec.NGram(), generation_config=config)


def from_models_config(model, ids=IDS, **options):
    model = copy.deepcopy(model)
    for name, value in options.items():
        setattr(model.generation_config, name, value)
    return specdec.generate(model, ids, drafter=specdec.NGram())


OPTIONS = {
    "num_beams": 2,
    "num_return_sequences": 2,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "constraints": [object()],
    "force_words_ids": [[3]],
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "guidance_scale": 1.5,
    "watermarking_config": transformers.WatermarkingConfig(),
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 1,
    "use_mtp": True,
    "token_healing": True,
    "top_h": 0.5,
    "typical_p": 0.9,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "output_attentions": True,
    "output_hidden_states": True,
    "use_cache": False,
    "cache_implementation": "offloaded",
}


@pytest.mark.parametrize("call", [from_generate, from_transformers, from_config])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_unsupported_option(model, name, call, do_sample):
    before = model.generation_config.to_dict()
    # token healing asks for the tokenizer first, which transformers does not hand on
    message = "token_healing|token healing" if name == "token_healing" else name
    with pytest.raises(ValueError, match=message):
        call(model, do_sample=do_sample, **{name: OPTIONS[name]})
    assert model.generation_config.to_dict() == before


@pytest.mark.parametrize("name", ["num_beams", "penalty_alpha", "typical_p", "use_cache"])
def test_unsupported_option_on_the_model(model, name):
    with pytest.raises(ValueError, match=name):
        from_models_config(model, **{name: OPTIONS[name]})


def test_an_argument_may_switch_it_off(model):
    model = copy.deepcopy(model)
    model.generation_config.num_beams = 4
    assert from_generate(model, num_beams=1, max_new_tokens=2).sequences.tolist() == [[0, 1, 2, 3]]


HARMLESS = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "guidance_scale": 1.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "use_cache": True,
    "output_attentions": False,
    "length_penalty": 1.0,
}


@pytest.mark.parametrize("call", [from_generate, from_transformers])
def test_harmless_values_pass(model, call):
    out = call(model, max_new_tokens=4, return_dict_in_generate=True, **HARMLESS)
    assert out.sequences.tolist() == [[0, 1, 2, 3, 4, 5]]


def filled_cache(model) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    return cache


ARGUMENTS = {
    "assistant_model": lambda model: model,
    "assistant_tokenizer": lambda model: object(),
    "custom_generate": lambda model: specdec.custom_generate,
    "inputs_embeds": lambda model: torch.zeros(1, 2, 32),
    "negative_prompt_ids": lambda model: IDS,
    "negative_prompt_attention_mask": lambda model: IDS,
    "past_key_values": filled_cache,
    "synced_gpus": lambda model: True,
    "num_assistant_tokens": lambda model: 3,
    "assistant_confidence_threshold": lambda model: 0.5,
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_unsupported_argument(model, name):
    with pytest.raises(ValueError, match=name):
        from_generate(model, **{name: ARGUMENTS[name](model)})
    if name != "past_key_values":
        with pytest.raises(ValueError, match="no_such_option"):
            from_generate(model, no_such_option=ARGUMENTS[name](model))


@pytest.mark.parametrize("name", ["inputs_embeds", "past_key_values"])
def test_unsupported_argument_from_transformers(model, name):
    """The others it keeps to itself; a function it calls cannot see them."""
    with pytest.raises(ValueError, match=name):
        from_transformers(model, **{name: ARGUMENTS[name](model)})


def test_embeddings_alone(model):
    with pytest.raises(ValueError, match="inputs_embeds"):
        model.generate(inputs_embeds=torch.zeros(1, 2, 32), custom_generate=specdec.custom_generate)


@pytest.mark.parametrize(
    "name, value",
    [
        ("position_ids", torch.tensor([[3, 4]])),
        ("position_ids", torch.tensor([[1, 0]])),
        ("pixel_values", torch.zeros(1, 3)),
        ("nonsense", 1),
    ],
)
@pytest.mark.parametrize("call", [from_generate, from_transformers])
def test_what_the_forward_would_be_given(model, call, name, value):
    with pytest.raises(ValueError, match=name):
        call(model, **{name: value})


def test_ordinary_positions_pass():
    model = tiny_model("gpt2")
    ids, mask = left_pad([[5, 17, 9], [3]])
    positions = torch.tensor([[0, 1, 2], [7, 7, 0]])
    out = specdec.generate(model, ids, mask, position_ids=positions, max_new_tokens=5)
    assert torch.equal(
        out.sequences, specdec.generate(model, ids, mask, max_new_tokens=5).sequences
    )


# C3: caches


@pytest.mark.parametrize("call", [from_generate, from_transformers, from_config])
@pytest.mark.parametrize("kind", ["dynamic", "static", "hybrid"])
def test_harmless_caches(kind, call):
    """The cache is ours, whatever was asked for; the tokens are the same."""
    model = tiny_model("mistral")
    ids = torch.tensor([[3, 41, 5, 3, 41]])
    expected = model.generate(ids, max_new_tokens=20)
    out = call(model, ids, cache_implementation=kind, max_new_tokens=20)
    assert torch.equal(getattr(out, "sequences", out), expected)


@pytest.mark.parametrize("call", [from_generate, from_config])
@pytest.mark.parametrize(
    "kind", ["quantized", "offloaded", "offloaded_static", "sliding_window", "paged"]
)
def test_other_caches(model, kind, call):
    with pytest.raises(ValueError, match=f"cache_implementation='{kind}'"):
        call(model, cache_implementation=kind)


# C2 (iii): models


SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "Mamba": ({"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2}, "recurrent state"),
    "Mamba2": (
        {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8}
        | {"head_dim": 8, "n_groups": 1, "state_size": 4},
        "recurrent state",
    ),
    "Jamba": (
        SIZES | {"use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1},
        "recurrent state",
    ),
    "Bamba": (
        SIZES | {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]},
        "recurrent state",
    ),
    "Qwen3Next": (
        SIZES
        | {"head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
        | {"linear_value_head_dim": 8, "shared_expert_intermediate_size": 16}
        | {"layer_types": ["linear_attention", "full_attention"]},
        "recurrent state|linear_attention",
    ),
    "Lfm2": (SIZES | {"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
    "Rwkv": ({"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2}, "recurrent state"),
    "Bloom": ({"vocab_size": 32, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "position_ids"),
    "T5": (
        {"vocab_size": 32, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 0},
        "encoder-decoder",
    ),
    "Bart": (
        {"vocab_size": 32, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
        | {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
        "encoder-decoder",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_model_without_a_row_cache(name):
    """As target from either side, and as draft; no forward is run."""
    sizes, why = MODELS[name]
    config = getattr(transformers, f"{name}Config")(**sizes)
    kind = "ForConditionalGeneration" if name in ("T5", "Bart") else "ForCausalLM"
    model = getattr(transformers, name + kind)(config).eval()
    model.generation_config.pad_token_id = 0
    message = rf"model: {name}{kind} is not supported: .*({why})"

    ran = []
    model.get_output_embeddings().register_forward_hook(lambda *_: ran.append(True))
    for call in (from_generate, from_transformers):
        with pytest.raises(ValueError, match=message):
            call(model, torch.tensor([[5, 3, 1]]), max_new_tokens=4)
    with pytest.raises(ValueError, match=f"draft {message}"):
        specdec.DraftModel(model)
    assert not ran


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention", "flash_attention_3"])
def test_attention_that_ignores_a_mask(attention):
    """I2: refused by name, also where it was chosen after loading."""
    model = tiny_model()
    model.config._attn_implementation_internal = attention
    assert model.config._attn_implementation == attention
    for call in (from_generate, from_transformers):
        with pytest.raises(ValueError, match=f"attention implementation '{attention}'"):
            call(model)
    with pytest.raises(ValueError, match=f"draft model: .*'{attention}'"):
        specdec.DraftModel(model)


def rope(kind: str) -> dict:
    if kind == "dynamic":
        return {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "factor": 4.0,
        "original_max_position_embeddings": 24,
    }


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_changes_on_the_way(kind):
    """Refused where the call would cross its limit; below it, identical to transformers."""
    model = tiny_model(max_position_embeddings=24, rope_parameters=rope(kind))
    ids = torch.tensor([[3, 41, 5, 3, 41]])
    expected = model.generate(ids, max_new_tokens=19)
    for drafter in ("ngram", "noisy"):
        out = specdec.generate(model, ids, max_new_tokens=19, drafter=make_drafter(drafter, model))
        assert torch.equal(out.sequences, expected)
    for call in (from_generate, from_transformers):
        with pytest.raises(ValueError, match=f"model: rope_type '{kind}' .* beyond 24 positions"):
            call(model, ids, max_new_tokens=20)
    with pytest.raises(ValueError, match="draft model: rope_type"):
        specdec.generate(tiny_model(), ids, max_new_tokens=20, drafter=specdec.DraftModel(model))


def test_models_without_a_head():
    config = transformers.LlamaConfig(**SIZES)
    with pytest.raises(ValueError, match="LlamaModel is not supported: no language-model head"):
        from_generate(transformers.LlamaModel(config).eval())


# E1: padding


@pytest.mark.parametrize("call", [from_generate, from_transformers])
@pytest.mark.parametrize(
    "mask, message",
    [
        ([[1, 1, 0], [1, 1, 1]], "attention_mask: right padding"),
        ([[1, 0, 1], [1, 1, 1]], "attention_mask: gaps"),
        ([[0, 0, 0], [1, 1, 1]], "attention_mask"),
        ([[0, 1], [1, 1]], "attention_mask"),
    ],
)
def test_masks(model, call, mask, message):
    ids = torch.tensor([[0, 1, 2], [3, 4, 5]])
    with pytest.raises((ValueError, RuntimeError), match=message):
        call(model, ids, attention_mask=torch.tensor(mask), max_new_tokens=2)


def test_padding_that_cannot_be_told(model):
    """Pad id equal to an end-of-sequence id and no mask: a warning, as the ids are ambiguous."""
    ids, mask = left_pad([[0, 1, 2], [3]], pad=9)
    options = {"pad_token_id": 9, "eos_token_id": [8, 9], "max_new_tokens": 2}
    with pytest.warns(UserWarning, match="attention_mask: not given"):
        specdec.generate(model, ids, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        specdec.generate(model, ids, mask, **options)
        specdec.generate(model, ids[:1], **options)


@pytest.mark.parametrize("ids", [torch.zeros(2, 0, dtype=torch.int64), torch.tensor([1, 2])])
def test_prompts_must_have_tokens(model, ids):
    with pytest.raises(ValueError, match=r"input_ids|streamer"):
        from_generate(model, ids)


# NaN


def nan_instead_of(model, token: int):
    """A copy whose logits are NaN wherever the model would say ``token``."""
    model = copy.deepcopy(model)
    model.lm_head.register_forward_hook(
        lambda *call: call[-1].masked_fill(call[-1].argmax(-1, keepdim=True) == token, torch.nan)
    )
    return model


@pytest.mark.parametrize("kind", ["none", "ngram", "self", "wrong"])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "seed": 1}], ids=["greedy", "T=1"])
@pytest.mark.parametrize("processing", [{}, {"repetition_penalty": 1.1}], ids=["", "processed"])
def test_nan_logits(model, kind, sampling, processing):
    """An error that names the row and the position, not a token; the stream is ended."""
    target = nan_instead_of(model, 7)
    options = {"drafter": make_drafter(kind, model, 3), "max_new_tokens": 8}
    options |= sampling | processing
    with pytest.raises(ValueError, match="row 1: the logits of position 3 are NaN"):
        specdec.generate(target, torch.tensor([[10, 11], [4, 5]]), **options)
    ends = []

    class Streamer:
        def put(self, value):
            pass

        def end(self):
            ends.append(True)

    with pytest.raises(ValueError, match="row 0: the logits of position 7 are NaN"):
        specdec.generate(target, IDS, streamer=Streamer(), **options)
    assert ends == [True]


def test_nan_behind_a_rejected_draft(model):
    """The first round drafts 3, 5, 7: the logits behind 7 are NaN, but nobody gets there."""
    drafter = make_drafter("wrong", model, 4)
    for sampling in ({}, {"do_sample": True, "seed": 1}):
        out = specdec.generate(
            nan_instead_of(model, 8),
            IDS,
            drafter=drafter,
            max_new_tokens=9,
            eos_token_id=6,
            **sampling,
        )
        assert out.sequences.tolist() == [[0, 1, 2, 3, 4, 5, 6]]
        assert out.stats.drafted > out.stats.accepted == 0


def test_nan_beside_a_processor(model):
    """A processor cannot hide it, unless it is asked to."""
    target = nan_instead_of(model, 4)
    with pytest.raises(ValueError, match="row 0"):
        from_generate(target, logits_processor=[lambda ids, scores: scores], max_new_tokens=5)
    options = {"remove_invalid_values": True, "max_new_tokens": 5}
    expected = target.generate(IDS, **options)
    assert torch.equal(from_generate(target, **options).sequences, expected)
