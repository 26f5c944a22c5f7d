"""Model configurations: groups of equal layers, presets, sizes, plain form, and what is refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxmix.models import (
    PRESETS,
    Decoder,
    DecoderConfig,
    flops_per_token,
    get_preset,
    parameter_count,
    parameter_groups,
    state_bytes,
)
from jaxmix.models.config import group_layers
from jaxmix.nn import HLAConfig, LinearAttentionConfig, SoftmaxAttentionConfig

H, L, S = HLAConfig(heads=2), LinearAttentionConfig(heads=2), SoftmaxAttentionConfig(heads=2)
SMALL = {"vocab_size": 50, "d_model": 16, "hidden": 32, "layers": (H, S)}


@pytest.mark.parametrize(
    ("layers", "groups"),
    [
        ((H,), [((H,), 1)]),
        ((H,) * 12, [((H,), 12)]),
        ((L, L, L, S) * 3, [((L, L, L, S), 3)]),
        ((L, L, S, S, S), [((L,), 2), ((S,), 3)]),
        ((L, L, L, S) * 5 + (S,), [((L, L, L, S), 5), ((S,), 1)]),
        ((H, L, L, S), [((H,), 1), ((L,), 2), ((S,), 1)]),
        ((H, HLAConfig(heads=2, order=3)), [((H,), 1), ((HLAConfig(heads=2, order=3),), 1)]),
    ],
)
def test_layers_are_grouped_by_what_repeats(layers, groups):
    assert list(group_layers(layers)) == groups
    assert sum((unit * repeats for unit, repeats in groups), ()) == layers


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_comes_back_from_json(name):
    config = get_preset(name)
    assert DecoderConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"preset: expected one of hla2-tiny, .*softmax-125m.*, got 'gpt'"):
        get_preset("gpt")


def test_presets_have_the_published_numbers_of_parameters():
    """Those that arXiv 2605.24330 prints, and what its ablations come to."""
    totals = {
        "softmax": (134105856, 373867520, 777856512, 1345423360),
        "interdomain": (135416208, 377360768, 781498752, 1352406784),
        "s4d": (135425424, 377385344, 781523328, 1352455936),
    }
    for name, numbers in totals.items():
        for scale, number in zip(("125m", "350m", "760m", "1.3b"), numbers, strict=True):
            assert parameter_count(get_preset(f"{name}-{scale}")) == number, f"{name}-{scale}"
    assert parameter_count(get_preset("interdomain-single-125m")) == 135462288
    assert parameter_count(get_preset("s4d-keys-values-125m")) == 135379344
    assert parameter_count(get_preset("interdomain-no-rope-125m")) == totals["interdomain"][0]
    assert parameter_count(get_preset("s4d-rope-125m")) == totals["s4d"][0]


def test_peers_have_the_numbers_of_parameters_that_their_shapes_give():
    """Counted by hand; those of Gated DeltaNet are within 0.1 % of the 380M and 793M of arXiv 2602.03681."""
    for scale, width, heads, keys, values, hidden in (
        ("380m", 1024, 6, 128, 256, 2816),
        ("800m", 1536, 6, 192, 384, 4096),
    ):
        embeddings = 2 * 32000 * width + width
        swiglu, norms = 3 * width * hidden, 2 * width
        queries, channels = heads * keys, heads * values
        # Projections of q, k, v, gate and output; convolutions; beta and decay; A_log and dt_bias; output norm.
        delta = width * (2 * queries + 3 * channels) + 4 * (2 * queries + channels) + 2 * width * heads + 2 * heads
        delta += values
        assert parameter_count(get_preset(f"gdn-{scale}")) == embeddings + 21 * (delta + swiglu + norms)
        softmax = 4 * width**2
        hybrid = embeddings + 16 * delta + 5 * softmax + 21 * (swiglu + norms)
        for name in ("gdn-hybrid", "gdn-hybrid-no-rope"):
            assert parameter_count(get_preset(f"{name}-{scale}")) == hybrid
        assert parameter_count(get_preset(f"transformer-{scale}")) == embeddings + 24 * (softmax + swiglu + norms)
        inner, state, mamba_heads = 2 * width, 128, 2 * width // 64
        mamba = width * (3 * inner + 2 * state + mamba_heads) + 5 * (inner + 2 * state) + 3 * mamba_heads + inner
        assert parameter_count(get_preset(f"mamba2-{scale}")) == embeddings + 48 * (mamba + width)
        # A routed layer has a router, weights of the branches, and norms of keys, queries and two outputs.
        routed = 2 * width * heads + queries * 2 * heads * (keys // 64) + 2 * 64 + 2 * 128 - values
        assert parameter_count(get_preset(f"natsl-{scale}")) == embeddings + 21 * (delta + swiglu + norms) + 6 * routed
        pure = embeddings + 21 * (delta + swiglu + norms + routed)
        assert parameter_count(get_preset(f"natsl-pure-{scale}")) == pure
    # Those of arXiv 2602.03681: 380.1M and 793.1M.
    assert parameter_count(get_preset("natsl-380m")) == 380073212
    assert parameter_count(get_preset("natsl-800m")) == 793144956
    assert parameter_count(get_preset("gdn-380m")) == 379888124
    assert parameter_count(get_preset("gdn-800m")) == 792785532
    assert parameter_count(get_preset("mamba2-380m")) == 382387712
    assert parameter_count(get_preset("transformer-380m")) == 373867520


def test_operations_are_counted_by_hand():
    softmax, interdomain = get_preset("softmax-125m"), get_preset("interdomain-125m")
    matrices = 134105856 - 32000 * 768
    attention = 12 * 768 * 2 * 4097 // 2
    assert flops_per_token(softmax, 4096) == {
        "forward": 2 * (matrices + attention),
        "backward": 4 * (matrices + attention),
    }
    # Per head and token, chunks of 64, D = E = 64, 128 reals: q.k, r, w and values inside; state in and out; mixing.
    inside, state, mixing = 64 * (64 + 2 * 128 + 64), 2 * 128 * 128, 128 * 128
    expected = 2 * (135416208 - 32000 * 768 + 12 * 12 * (inside + state + mixing))
    assert flops_per_token(interdomain, 4096)["forward"] == flops_per_token(interdomain, 16)["forward"] == expected


@pytest.mark.parametrize("name", ["hla2", "ahla", "hla3", "linear"])
def test_recurrent_presets_differ_from_it_only_in_their_mixers(name):
    base, own = (parameter_groups(get_preset(f"{mixer}-125m")) for mixer in ("softmax", name))
    gate, convolutions, norm, decay = 768 * 768, 3 * 4 * 768, 64, 12
    assert own.pop("mixer") == base.pop("mixer") + 12 * (gate + convolutions + norm + decay)
    assert own == base


@pytest.mark.parametrize("tie", [True, False])
def test_counted_sizes_are_those_of_the_model(tie):
    config = DecoderConfig(**SMALL, tie_embeddings=tie)
    model = Decoder(config, rngs=nnx.Rngs(0))
    assert parameter_count(config) == sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    groups = parameter_groups(config)
    assert groups["embedding"] == 50 * 16
    assert groups["head"] == (0 if tie else 50 * 16)
    assert groups["mlp"] == 2 * 3 * 16 * 32
    assert groups["norm"] == 5 * 16
    assert state_bytes(config) == sum(x.nbytes for x in jax.tree.leaves(model.init_state(1)))


def test_dtypes_are_kept_as_names():
    config = DecoderConfig(**SMALL, dtype=jnp.bfloat16, param_dtype="float32")
    assert (config.dtype, config.param_dtype) == ("bfloat16", "float32")
    assert hash(config) == hash(dataclasses.replace(config, dtype="bfloat16"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 0}, r"vocab_size: expected an int of at least 1, got 0"),
        ({"d_model": 16.0}, r"d_model: expected an int"),
        ({"layers": ()}, r"layers: expected at least one mixer configuration in a tuple, got \(\)"),
        ({"layers": H}, r"layers: expected at least one mixer configuration in a tuple"),
        ({"layers": (H, "hla")}, r"layers\[1\]: expected a mixer configuration such as .*, got 'hla'"),
        ({"d_model": 15}, r"heads: expected a divisor of d_model=15"),
        ({"tie_embeddings": None}, r"tie_embeddings: expected True or False, got None"),
        ({"dtype": "float16"}, r"dtype: expected one of bfloat16, float32, float64, got 'float16'"),
        ({"param_dtype": "half-precision"}, r"param_dtype: expected one of"),
        ({"remat": True}, r"remat: expected one of 'none', 'dots', 'full', got True"),
        ({"init_std": 0.0}, r"init_std: expected a positive number, got 0\.0"),
    ],
)
def test_a_wrong_option_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**SMALL | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_mode": 3}, r"DecoderConfig fields: expected only .*, got also d_mode"),
        ({"layers": [{"mixer": "hla", "heads": 2, "colour": 1}]}, r"HLAConfig fields: .*got also colour"),
        ({"layers": [H]}, r"mixer: expected a dict, got HLAConfig"),
        ({"layers": "hla"}, r"config: expected a dict with a list of layers"),
    ],
)
def test_a_wrong_dict_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig.from_dict(DecoderConfig(**SMALL).to_dict() | change)


def test_a_missing_field_is_named():
    fields = DecoderConfig(**SMALL).to_dict()
    del fields["hidden"]
    with pytest.raises(ValueError, match=r"DecoderConfig fields: expected also hidden"):
        DecoderConfig.from_dict(fields)
