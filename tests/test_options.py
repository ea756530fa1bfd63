"""Every option of ``generate`` means what it means in transformers, for every drafter."""

import copy

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import logits_process as hf

import specdec
from specdec.testing import count_model, left_pad, make_drafter, tiny_model
from specdec_kernels import sample

KINDS = ["none", "ngram", "self", "wrong", "noisy"]
NUM_DRAFTS = [1, 3, 8]
PROMPTS = [[5, 17, 9], [18, 73, 9, 33, 16, 64, 18, 73, 9], [60]]
# the longest prompt alone, and all of them, which need padding on the left
BATCHES = {"alone": PROMPTS[1:2], "padded": PROMPTS}
NEW = 14


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def path(model):
    """What the model says by itself to the prompt that is never padded."""
    return plain(model, *left_pad(BATCHES["alone"]))[0, len(PROMPTS[1]) :].tolist()


def plain(model, ids, mask, **options):
    options.setdefault("max_new_tokens", NEW)
    return model.generate(ids, attention_mask=mask, do_sample=False, **options)


def drafters(model, num_drafts=NUM_DRAFTS):
    yield "none", None
    for kind in KINDS[1:]:
        for K in num_drafts:
            yield f"{kind}, K={K}", make_drafter(kind, model, K)


def allow_by_row(row: int, ids: torch.Tensor) -> list[int]:
    return [(int(ids[-1]) * 5 + row + step) % 97 for step in range(10)]


class BanSuccessor(hf.LogitsProcessor):
    def __call__(self, input_ids, scores):
        banned = (input_ids[:, -1:] + 1) % scores.shape[1]
        return scores.scatter(1, banned, -torch.inf)


# name -> the option, given the path that the model would take without it
OPTIONS = {
    "max_length": lambda path: {"max_length": 15, "max_new_tokens": None},
    "eos": lambda path: {"eos_token_id": path[5]},
    "many eos": lambda path: {"eos_token_id": [path[8], 96, path[4]]},
    "eos first": lambda path: {"eos_token_id": path[0]},
    "pad": lambda path: {"eos_token_id": path[5], "pad_token_id": 7},
    "repetition_penalty": lambda path: {"repetition_penalty": 1.3},
    "repetition_reward": lambda path: {"repetition_penalty": 0.6},
    "no_repeat_ngram_size": lambda path: {"no_repeat_ngram_size": 2},
    "bad_words_ids": lambda path: {"bad_words_ids": [[path[0]], path[2:4]]},
    "suppress_tokens": lambda path: {"suppress_tokens": path[1:3]},
    "begin_suppress_tokens": lambda path: {"begin_suppress_tokens": path[:1]},
    "min_new_tokens": lambda path: {"eos_token_id": path[2], "min_new_tokens": 9},
    "min_length": lambda path: {"eos_token_id": path[2], "min_length": 16},
    "sequence_bias": lambda path: {"sequence_bias": {(path[0],): -20.0, (path[1], 8): 50.0}},
    "forced_eos_token_id": lambda path: {"eos_token_id": 3, "forced_eos_token_id": 3},
    "exponential_decay_length_penalty": lambda path: {
        "eos_token_id": 96,
        "exponential_decay_length_penalty": (3, 1.6),
    },
    "renormalize_logits": lambda path: {"renormalize_logits": True, "repetition_penalty": 1.3},
    "remove_invalid_values": lambda path: {
        "remove_invalid_values": True,
        "bad_words_ids": [path[:1]],
    },
    "prefix_allowed_tokens_fn": lambda path: {"prefix_allowed_tokens_fn": allow_by_row},
    "logits_processor": lambda path: {"logits_processor": [BanSuccessor()], "num_beams": 1},
    "several": lambda path: {
        "eos_token_id": path[1],
        "min_new_tokens": 4,
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "logits_processor": [BanSuccessor()],
        "sequence_bias": {(path[3],): 3.0},
    },
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    "batch, num_drafts",
    [
        ("alone", [8]),
        pytest.param("alone", [1, 3], marks=pytest.mark.slow),
        ("padded", NUM_DRAFTS),
    ],
)
def test_greedy_equals_transformers(model, path, option, batch, num_drafts):
    options = OPTIONS[option](path)
    ids, mask = left_pad(BATCHES[batch])
    expected = plain(model, ids, mask, **options)
    for name, drafter in drafters(model, num_drafts):
        out = specdec.generate(
            model, ids, mask, drafter=drafter, **({"max_new_tokens": NEW} | options)
        )
        assert torch.equal(out.sequences, expected), f"{option}: {name}"


@pytest.mark.parametrize("option", sorted(OPTIONS.keys() - {"logits_processor"}))
def test_options_change_something(model, path, option):
    """Without this, an option that nothing reads would pass the test above."""
    ids, mask = left_pad(PROMPTS)
    options = OPTIONS[option](path)
    assert not torch.equal(plain(model, ids, mask, **options), plain(model, ids, mask))


def test_forced_bos(model):
    """Applies at length 1 only."""
    ids, mask = left_pad([[60]])
    expected = plain(model, ids, mask, forced_bos_token_id=11)
    for name, drafter in drafters(model):
        out = specdec.generate(
            model, ids, mask, drafter=drafter, max_new_tokens=NEW, forced_bos_token_id=11
        )
        assert torch.equal(out.sequences, expected), name
    assert expected[0, 1] == 11


def test_encoder_options_with_one_row(model):
    """They hold the prompts, so a batch cannot be split by row: refused by name."""
    options = {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2}
    ids, mask = left_pad(PROMPTS[1:2])
    expected = plain(model, ids, mask, **options)
    out = specdec.generate(
        model, ids, mask, drafter=specdec.NGram(3), max_new_tokens=NEW, **options
    )
    assert torch.equal(out.sequences, expected)
    ids, mask = left_pad(PROMPTS)
    for name, value in options.items():
        with pytest.raises(ValueError, match="Encoder.*not supported with more than one row"):
            specdec.generate(model, ids, mask, max_new_tokens=NEW, **{name: value})


@pytest.mark.parametrize("where", ["argument", "model"])
def test_generation_config(model, path, where):
    """Given with the call or lying on the model, every entry of it applies."""
    config = GenerationConfig(
        max_new_tokens=11,
        eos_token_id=[path[7], 96],
        pad_token_id=7,
        repetition_penalty=1.1,
        suppress_tokens=path[1:2],
    )
    model = copy.deepcopy(model)
    options = {"generation_config": config} if where == "argument" else {}
    if where == "model":
        model.generation_config = config
    ids, mask = left_pad(PROMPTS)
    expected = model.generate(ids, attention_mask=mask, **options)
    assert not torch.equal(expected, plain(tiny_model(), ids, mask, max_new_tokens=11))
    for name, drafter in drafters(model):
        out = specdec.generate(model, ids, mask, drafter=drafter, **options)
        assert torch.equal(out.sequences, expected), name


def test_arguments_beat_the_generation_config(model):
    config = GenerationConfig(max_new_tokens=3, do_sample=True, temperature=9.0)
    ids, mask = left_pad(PROMPTS)
    out = specdec.generate(
        model, ids, mask, generation_config=config, max_new_tokens=5, do_sample=False
    )
    assert torch.equal(out.sequences, plain(model, ids, mask, max_new_tokens=5))


def test_default_length(model):
    """128 new tokens unless something sets a length; transformers' 20 does not apply."""
    ids, mask = left_pad([[5, 17, 9]])
    assert specdec.generate(count_model(), ids, mask).sequences.shape == (1, 131)
    model = copy.deepcopy(model)
    model.generation_config.max_length = 9
    assert specdec.generate(model, ids, mask).sequences.shape == (1, 9)


def test_sampling_entries_of_the_models_config(model):
    """Many published models set temperature, top_k and top_p there: they hold."""
    sampling = {"do_sample": True, "temperature": 0.6, "top_k": 5, "top_p": 0.9}
    ids, mask = left_pad(PROMPTS)
    expected = specdec.generate(model, ids, mask, max_new_tokens=NEW, seed=4, **sampling)
    model = copy.deepcopy(model)
    model.generation_config.update(**sampling)
    got = specdec.generate(model, ids, mask, max_new_tokens=NEW, seed=4)
    assert torch.equal(got.sequences, expected.sequences)
    other = specdec.generate(model, ids, mask, max_new_tokens=NEW, seed=4, top_k=50)
    assert not torch.equal(got.sequences, other.sequences)


def test_temperature_zero_is_greedy(model):
    """Also where the model's own config samples; a temperature without do_sample does nothing."""
    ids, mask = left_pad(PROMPTS)
    expected = plain(model, ids, mask)
    for options in (
        {"temperature": 0},
        {"temperature": 0.0, "do_sample": True},
        {"temperature": 0.7},
        {"do_sample": False, "temperature": 2.0},
        {"do_sample": True, "temperature": 1e-6},
    ):
        out = specdec.generate(
            model, ids, mask, drafter=specdec.NGram(3), max_new_tokens=NEW, seed=1, **options
        )
        assert torch.equal(out.sequences, expected), options


def test_padding_from_eos(model, path):
    """Without a padding id transformers pads with the first end-of-sequence id as given."""
    model = copy.deepcopy(model)
    model.generation_config.pad_token_id = None
    ids, mask = left_pad(PROMPTS)
    eos = [path[6], path[3]]
    expected = plain(model, ids, mask, eos_token_id=eos)
    out = specdec.generate(model, ids, mask, max_new_tokens=NEW, eos_token_id=eos)
    assert torch.equal(out.sequences, expected)
    assert eos[0] > eos[1]
    assert (out.sequences[1] == eos[0]).sum() > 1
    with pytest.raises(ValueError, match="pad_token_id: needed"):
        specdec.generate(
            model, ids, mask, max_new_tokens=NEW, stopping_criteria=[lambda ids, scores: True]
        )


def test_padding_changes_nothing(model):
    """E1: every row as if alone, five more columns of padding or not; learned positions too."""
    for target in (model, tiny_model("gpt2")):
        ids, mask = left_pad(PROMPTS)
        wide = torch.nn.functional.pad(ids, (5, 0), value=31), torch.nn.functional.pad(mask, (5, 0))
        for name, drafter in drafters(target, [3]):
            out = specdec.generate(target, ids, mask, drafter=drafter, max_new_tokens=NEW)
            again = specdec.generate(target, *wide, drafter=drafter, max_new_tokens=NEW)
            assert torch.equal(again.sequences[:, 5:], out.sequences), name
            assert torch.equal(again.sequences[:, :5], wide[0][:, :5])
            for row, prompt in enumerate(PROMPTS):
                alone = specdec.generate(
                    target, torch.tensor([prompt]), drafter=drafter, max_new_tokens=NEW
                )
                got = out.sequences[row, ids.shape[1] :]
                assert torch.equal(got, alone.sequences[0, len(prompt) :]), (name, row)


def test_mask_is_inferred_as_in_transformers(model):
    """Padding that is no end of sequence is told from the ids."""
    ids, mask = left_pad(PROMPTS)
    out = specdec.generate(model, ids, drafter=specdec.NGram(3), max_new_tokens=NEW)
    assert torch.equal(out.sequences, plain(model, ids, mask))


SAMPLING = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.9, "top_p": 0.7, "repetition_penalty": 1.4, "renormalize_logits": True},
]


def warpers(options: dict) -> hf.LogitsProcessorList:
    """transformers' own, in its order."""
    kinds = {
        "repetition_penalty": hf.RepetitionPenaltyLogitsProcessor,
        "temperature": hf.TemperatureLogitsWarper,
        "top_k": hf.TopKLogitsWarper,
        "top_p": hf.TopPLogitsWarper,
        "min_p": hf.MinPLogitsWarper,
    }
    return hf.LogitsProcessorList(kinds[k](options[k]) for k in kinds if k in options)


@pytest.mark.parametrize("options", SAMPLING, ids=lambda o: ",".join(o) or "none")
def test_sampling_equals_transformers_filters(model, options):
    """match: each token is the op's own draw from logits that transformers' warpers filtered."""
    process = warpers(options)
    ids, mask = left_pad(PROMPTS[1:2])
    expected = ids
    for _ in range(NEW):
        with torch.no_grad():
            logits = model(expected).logits[:, -1]
        drawn = sample(process(expected, logits), seed=11, position=expected.shape[1])
        expected = torch.cat([expected, drawn.tokens[:, None]], dim=1)
    for name, drafter in drafters(model):
        out = specdec.generate(
            model,
            ids,
            mask,
            drafter=drafter,
            method="match",
            seed=11,
            do_sample=True,
            max_new_tokens=NEW,
            **options,
        )
        assert torch.equal(out.sequences, expected), name


@pytest.mark.parametrize("method", ["match", "token", "block"])
def test_sampling_options_act_once(model, method):
    """Applied to the draft twice the law stays right, but a draft like the target's would fail."""
    ids, mask = left_pad(PROMPTS)
    out = specdec.generate(
        model,
        ids,
        mask,
        drafter=make_drafter("self", model, 5),
        method=method,
        seed=3,
        do_sample=True,
        temperature=0.5,
        top_k=10,
        top_p=0.9,
        max_new_tokens=20,
    )
    assert out.stats.accepted == out.stats.drafted > 0


@pytest.mark.parametrize(
    "kind, method",
    [
        *[(kind, method) for kind in KINDS for method in ("auto", "match")],
        # rules for drafts that were sampled
        *[(kind, method) for kind in KINDS[2:] for method in ("token", "block")],
    ],
)
def test_min_p_one_is_greedy(model, kind, method):
    """A8 (i)."""
    ids, mask = left_pad(PROMPTS)
    out = specdec.generate(
        model,
        ids,
        mask,
        drafter=make_drafter(kind, model, 3),
        method=method,
        do_sample=True,
        min_p=1.0,
        max_new_tokens=NEW,
    )
    assert torch.equal(out.sequences, plain(model, ids, mask))


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "seed": 6}], ids=["greedy", "T=1"])
@pytest.mark.parametrize("kind", KINDS)
def test_banned_and_biased_tokens(model, path, kind, sampling):
    """A8 (ii), (iii): at drafted positions too."""
    ids, mask = left_pad(PROMPTS)
    banned = max(set(path), key=path.count)
    for method in ("auto", "match"):
        if method == "match" and not sampling:
            continue
        call = {"drafter": make_drafter(kind, model, 4), "method": method, "max_new_tokens": NEW}
        call |= sampling
        for option in ({"bad_words_ids": [[banned]]}, {"suppress_tokens": [banned]}):
            out = specdec.generate(model, ids, mask, **call, **option)
            assert banned not in out.sequences[:, ids.shape[1] :], (method, option)
        out = specdec.generate(model, ids, mask, **call, sequence_bias={(banned,): 100.0})
        assert (out.sequences[:, ids.shape[1] :] == banned).all()


def sampled(model, **options):
    ids, mask = left_pad(PROMPTS)
    out = specdec.generate(model, ids, mask, do_sample=True, max_new_tokens=NEW, **options)
    return out.sequences[:, ids.shape[1] :]


def test_one_seed_for_all_rows_or_one_each(model):
    out = sampled(model, seed=5)
    assert torch.equal(out, sampled(model, seed=[5, 5, 5]))
    assert torch.equal(out, sampled(model, seed=torch.tensor([5, 5, 5])))
    assert torch.equal(out, sampled(model, seed=torch.tensor(5)))
    mixed = sampled(model, seed=(5, 6, 5))
    assert torch.equal(out[0], mixed[0])
    assert torch.equal(out[2], mixed[2])
    assert not torch.equal(out[1], mixed[1])


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64 - 1, -(2**63)])
def test_seeds_of_64_bits(model, seed):
    out = sampled(model, seed=seed, drafter=make_drafter("noisy", model, 3), method="match")
    assert torch.equal(out, sampled(model, seed=[seed] * 3))
    assert torch.equal(out, sampled(model, seed=seed % 2**64))
    assert not torch.equal(out, sampled(model, seed=0))


@pytest.mark.parametrize("seed", [[1, 2], [1, 2, 3, 4], [], 1.5, [1, 2, 3.5]])
def test_wrong_seeds(model, seed):
    with pytest.raises(ValueError, match=r"seed: expected one int or one per row \(3\)"):
        sampled(model, seed=seed)


def test_seed_none_uses_the_global_generator(model):
    torch.manual_seed(8)
    first, second = sampled(model), sampled(model)
    assert not torch.equal(first, second)
    torch.manual_seed(8)
    assert torch.equal(first, sampled(model))
    # rows with equal prompts must not be copies of each other
    twice = specdec.generate(
        model, torch.tensor([[5, 17]] * 2), do_sample=True, max_new_tokens=NEW
    ).sequences
    assert not torch.equal(twice[0], twice[1])


def test_a_seed_leaves_the_global_generator_alone(model):
    state = torch.get_rng_state()
    sampled(model, seed=5, drafter=make_drafter("noisy", model, 3))
    ids, mask = left_pad(PROMPTS)
    specdec.generate(model, ids, mask, max_new_tokens=NEW)
    assert torch.equal(torch.get_rng_state(), state)


def snapshot(model) -> dict:
    """Everything of a model that a call might leave changed."""
    return {
        "config": model.config.to_dict(),
        "generation_config": model.generation_config.to_dict(),
        "attention": model.config._attn_implementation,
        "training": [m.training for m in model.modules()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "grad": [p.grad for p in model.parameters()],
        "parameters": [p.detach().clone() for p in model.parameters()],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for m in model.modules()
        ],
        "attributes": sorted(vars(model)),
    }


class Failing(hf.LogitsProcessor):
    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > 12:
            raise RuntimeError("processor failed")
        return scores


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_models_are_left_as_they_were(model, fails):
    """M1: target and draft, after success and after an exception."""
    target = copy.deepcopy(model)
    draft = copy.deepcopy(model)
    draft.model.layers[0].train()
    draft.lm_head.requires_grad_(False)
    draft.model.layers[1].register_forward_hook(lambda *_: None)
    before = snapshot(target), snapshot(draft)
    options = {"logits_processor": [Failing()]} if fails else {"repetition_penalty": 1.2}
    ids, mask = left_pad(PROMPTS)
    config = GenerationConfig(max_new_tokens=NEW, eos_token_id=[5, 6], pad_token_id=0)
    given = config.to_dict()

    def run():
        specdec.generate(
            target,
            ids,
            mask,
            drafter=specdec.DraftModel(draft, 3),
            generation_config=config,
            **options,
        )

    if fails:
        with pytest.raises(RuntimeError, match="processor failed"):
            run()
    else:
        run()
    for was, now in zip(before, (snapshot(target), snapshot(draft)), strict=True):
        for key in was:
            if key == "parameters":
                assert all(map(torch.equal, was[key], now[key]))
            else:
                assert was[key] == now[key], key
    assert config.to_dict() == given
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_off(kind):
    """A model in train mode gives the text of eval mode, and is in train mode afterwards."""
    model = tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    ids, mask = left_pad(PROMPTS)
    expected = plain(model, ids, mask)
    drafter = make_drafter(kind, model, 3)
    model.train()
    if isinstance(drafter, specdec.DraftModel):
        drafter.model.train()
    out = specdec.generate(model, ids, mask, drafter=drafter, max_new_tokens=NEW)
    assert torch.equal(out.sequences, expected)
    assert all(m.training for m in model.modules())
    if kind == "self":
        assert out.stats.acceptance_rate == 1


@pytest.mark.parametrize("kind", KINDS)
def test_token_type_ids_reach_the_target(kind):
    model = tiny_model("gpt2")
    ids, mask = left_pad(PROMPTS)
    types = torch.where(mask == 1, ids % 7 + 20, 0)
    types[:, -1] = torch.tensor([31, 32, 33])
    expected = plain(model, ids, mask, token_type_ids=types)
    assert not torch.equal(expected, plain(model, ids, mask))
    for K in NUM_DRAFTS:
        out = specdec.generate(
            model,
            ids,
            mask,
            drafter=make_drafter(kind, model, K),
            token_type_ids=types,
            max_new_tokens=NEW,
        )
        assert torch.equal(out.sequences, expected), K


def test_token_types_follow_the_rows_that_go_on(path):
    """The first row ends early; the others keep their own types."""
    model = tiny_model("gpt2")
    ids, mask = left_pad(PROMPTS)
    types = torch.tensor([[21] * 9, [22] * 9, [23] * 9])
    free = plain(model, ids, mask, token_type_ids=types)
    options = {"token_type_ids": types, "eos_token_id": int(free[0, 11])}
    expected = plain(model, ids, mask, **options)
    out = specdec.generate(
        model, ids, mask, drafter=specdec.NGram(3), max_new_tokens=NEW, **options
    )
    assert torch.equal(out.sequences, expected)
    assert out.finish_reasons[0] == "eos"
