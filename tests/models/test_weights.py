"""Published checkpoints into the decoder and back: values, configurations, and what is refused."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxmix.models import Decoder, DecoderConfig
from jaxmix.models.weights import load_decoder, save_decoder
from jaxmix.nn import HLAConfig, SoftmaxAttentionConfig
from tests.models.llama import LLAMA, llama_forward, llama_tensors, params, write
from tests.tolerances import assert_close, assert_same_bits, rms_ratio

STORED = Path(__file__).parents[1] / "oracles" / "checkpoints"
TOKENS = np.random.default_rng(1).integers(0, 40, (2, 11)).astype(np.int32)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write(tmp_path_factory.mktemp("llama") / "source", LLAMA, llama_tensors())


def logits(model, tokens):
    return jax.jit(lambda model, tokens: model(tokens)[0])(model, jnp.asarray(tokens))


def test_logits_are_those_of_llama_in_numpy(source):
    expected = llama_forward(LLAMA, llama_tensors(), TOKENS)
    assert_close(logits(load_decoder(source), TOKENS), expected, 1e-5)


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_logits_are_those_that_transformers_gave(name):
    stored = np.load(STORED / name / "logits.npz")
    actual = logits(load_decoder(STORED / name), stored["tokens"].astype(np.int32))
    assert np.max(np.abs(actual - stored["logits"])) <= 1e-4 * np.max(np.abs(stored["logits"]))
    assert rms_ratio(actual, stored["logits"]) <= 1e-5


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_tensors_and_configuration_of_transformers_come_back(tmp_path, name):
    save_decoder(load_decoder(STORED / name), tmp_path / "out")
    before, after = (json.loads((at / "config.json").read_text()) for at in (STORED / name, tmp_path / "out"))
    assert_same_bits(load_file(tmp_path / "out/model.safetensors"), load_file(STORED / name / "model.safetensors"))
    meaningless = {"transformers_version", "use_cache", "pretraining_tp", "attention_dropout"}
    told = {key: value for key, value in before.items() if value is not None and key not in meaningless}
    assert {key: after[key] for key in told} == told


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_every_bit_and_option_comes_back(tmp_path, tie, dtype):
    fields = LLAMA | {"tie_word_embeddings": tie, "torch_dtype": np.dtype(dtype).name}
    tensors = llama_tensors(fields, dtype)
    model = load_decoder(write(tmp_path / "in", fields, tensors))
    assert model.config.param_dtype == model.config.dtype == np.dtype(dtype).name
    save_decoder(model, tmp_path / "out")
    assert_same_bits(load_file(tmp_path / "out/model.safetensors"), tensors)
    after = json.loads((tmp_path / "out/config.json").read_text())
    assert {key: after[key] for key in fields if key != "rope_scaling"} == {
        key: value for key, value in fields.items() if key != "rope_scaling"
    }
    again = load_decoder(tmp_path / "out")
    assert again.config == model.config
    assert_same_bits(params(again), params(model))


def test_configuration_says_what_config_json_says(source):
    config = load_decoder(source).config
    layer = SoftmaxAttentionConfig(heads=4, kv_heads=2, key_size=6, value_size=6, rope_base=50.0, capacity=32)
    assert config == DecoderConfig(vocab_size=40, d_model=16, layers=(layer,) * 3, hidden=20, norm_eps=0.03)


def test_what_config_json_leaves_out_has_the_defaults_of_llama(tmp_path):
    optional = ("head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "hidden_act")
    fields = LLAMA | {"head_dim": 4, "num_key_value_heads": 4, "hidden_act": None}
    tensors = llama_tensors(fields)
    for key in optional:
        del fields[key]
    config = load_decoder(write(tmp_path / "in", fields, tensors)).config
    assert (config.norm_eps, config.tie_embeddings) == (1e-6, False)
    assert config.layers[0] == SoftmaxAttentionConfig(heads=4, kv_heads=4, key_size=4, value_size=4, capacity=32)


@pytest.mark.parametrize(
    "rope",
    [{"rope_theta": 50}, {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}],
    ids=["before transformers 5", "transformers 5"],
)
def test_both_forms_of_the_rope_base_are_read(tmp_path, rope):
    fields = {key: value for key, value in LLAMA.items() if not key.startswith("rope")} | rope
    assert load_decoder(write(tmp_path / "in", fields, llama_tensors())).config.layers[0].rope_base == 50.0


def test_dtypes_and_capacity_can_be_chosen(source, tmp_path):
    model = load_decoder(source, param_dtype="bfloat16", dtype="float32", capacity=8)
    assert (model.config.param_dtype, model.config.dtype, model.config.layers[0].capacity) == ("bfloat16", "float32", 8)
    save_decoder(model, tmp_path / "out", dtype="float32", extra={"eos_token_id": 3})
    rounded = {name: x.astype(ml_dtypes.bfloat16).astype(np.float32) for name, x in llama_tensors().items()}
    assert_same_bits(load_file(tmp_path / "out/model.safetensors"), rounded)
    fields = json.loads((tmp_path / "out/config.json").read_text())
    assert (fields["dtype"], fields["max_position_embeddings"], fields["eos_token_id"]) == ("float32", 8, 3)


def test_half_precision_is_read_into_float32(tmp_path):
    half = llama_tensors(dtype=np.float16)
    model = load_decoder(write(tmp_path / "in", LLAMA, half))
    assert model.config.param_dtype == "float32"
    save_decoder(model, tmp_path / "out")
    assert_same_bits(load_file(tmp_path / "out/model.safetensors"), {k: v.astype(np.float32) for k, v in half.items()})


def split(source, directory):
    """The checkpoint in two files with an index."""
    directory.mkdir()
    (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-1-of-2.safetensors": names[:13], "model-2-of-2.safetensors": names[13:]}
    for file, chosen in parts.items():
        save_file({name: tensors[name] for name in chosen}, directory / file)
    index = {"weight_map": {name: file for file, chosen in parts.items() for name in chosen}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def test_parts_are_put_together(source, tmp_path):
    assert_same_bits(params(load_decoder(split(source, tmp_path / "parts"))), params(load_decoder(source)))


def test_a_missing_part_is_named(source, tmp_path):
    directory = split(source, tmp_path / "parts")
    (directory / "model-2-of-2.safetensors").unlink()
    with pytest.raises(ValueError, match=r"source: expected the file model-2-of-2\.safetensors, as .*index\.json says"):
        load_decoder(directory)


def test_a_part_without_its_tensor_is_named(source, tmp_path):
    directory = split(source, tmp_path / "parts")
    save_file({"other": np.zeros(1)}, directory / "model-2-of-2.safetensors")
    with pytest.raises(
        ValueError, match=r"source: expected the tensor model\.layers\.\S+ in model-2-of-2\.safetensors"
    ):
        load_decoder(directory)


def test_frequencies_and_a_repeated_tied_embedding_are_no_surprise(tmp_path):
    fields = LLAMA | {"tie_word_embeddings": True}
    tensors = llama_tensors(fields)
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)}
    more["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model = load_decoder(write(tmp_path / "in", fields, tensors | more))
    save_decoder(model, tmp_path / "out")
    assert_same_bits(load_file(tmp_path / "out/model.safetensors"), tensors)
    more["lm_head.weight"] = more["lm_head.weight"] + 1
    with pytest.raises(ValueError, match=r"tensor lm_head\.weight: expected the values of model\.embed_tokens\.weight"):
        load_decoder(write(tmp_path / "in", fields, tensors | more))


def test_all_faults_of_the_tensors_are_named_at_once(tmp_path):
    tensors = llama_tensors()
    del tensors["model.norm.weight"], tensors["model.layers.2.mlp.up_proj.weight"]
    tensors["model.layers.1.self_attn.q_proj.bias"] = np.zeros(24, np.float32)
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((24, 16), np.float32)
    with pytest.raises(ValueError, match="source: expected the tensors of LlamaForCausalLM") as caught:
        load_decoder(write(tmp_path / "in", LLAMA, tensors))
    assert str(caught.value).endswith(
        "got missing: model.layers.2.mlp.up_proj.weight, model.norm.weight; "
        "unexpected: model.layers.1.self_attn.q_proj.bias; "
        "of a wrong shape: model.layers.0.self_attn.k_proj.weight [24, 16] instead of [12, 16]"
    )


def test_tensors_of_integers_are_refused(tmp_path):
    tensors = llama_tensors() | {"model.norm.weight": np.ones(16, np.int8)}
    with pytest.raises(ValueError, match=r"tensor model\.norm\.weight: expected one of the dtypes .*, got I8"):
        load_decoder(write(tmp_path / "in", LLAMA, tensors))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"architectures: expected one of LlamaForCausalLM.*'GPT2LMHeadModel'"),
        ({"hidden_act": "gelu"}, r"hidden_act = 'gelu' needs another activation in the SwiGLU"),
        ({"attention_bias": True}, r"attention_bias = True needs biases"),
        ({"mlp_bias": True}, r"mlp_bias = True needs biases"),
        ({"attention_dropout": 0.1}, r"attention_dropout = 0\.1 needs dropout"),
        ({"sliding_window": 128}, r"sliding_window = 128 needs attention to a window"),
        ({"rope_scaling": {"rope_type": "llama3"}}, r"rope_scaling = \{'rope_type': 'llama3'\} needs scaled rotary"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2}}, r"rope_parameters = .*'yarn'.* needs scaled rotary"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor"),
        (
            {"quantization_config": {"bits": 4}, "logit_scale": 2},
            r"what logit_scale = 2, quantization_config = \{'bits'",
        ),
    ],
)
def test_what_the_decoder_has_not_is_refused(tmp_path, change, message):
    with pytest.raises(NotImplementedError, match=r"config\.json: .*" + message):
        load_decoder(write(tmp_path / "in", LLAMA | change, {}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": None}, r"config\.json: architectures: expected a list of one class, got None"),
        ({"hidden_size": None}, r"config\.json: hidden_size: expected int, got null"),
        ({"num_hidden_layers": "3"}, r"config\.json: num_hidden_layers: expected int, got '3'"),
        ({"num_key_value_heads": 3}, r"kv_heads: expected a divisor of heads=4, got 3"),
        ({"tie_word_embeddings": 0}, r"config\.json: tie_word_embeddings: expected bool, got 0"),
    ],
)
def test_a_bad_value_is_named(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        load_decoder(write(tmp_path / "in", LLAMA | change, {}))


def test_files_that_are_not_there_or_broken_are_named(source, tmp_path):
    with pytest.raises(ValueError, match=r"source: expected a directory with config\.json"):
        load_decoder(tmp_path)
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"expected a directory with model\.safetensors or model\.safetensors\.index"):
        load_decoder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"source: expected a safetensors file in .*, got: "):
        load_decoder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"source: expected a JSON object in .*config\.json, got list"):
        load_decoder(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, r"capacity: expected an int of at least 1, got 0"),
        ({"param_dtype": "float16"}, r"param_dtype: expected one of bfloat16, float32, float64, got 'float16'"),
        ({"param_dtype": "float64"}, r"param_dtype: expected float32 or bfloat16 unless jax_enable_x64 is on"),
    ],
)
def test_a_wrong_argument_is_named(source, arguments, message):
    with pytest.raises(ValueError, match=message):
        load_decoder(source, **arguments)


def test_nothing_is_written_over(source, tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"target: expected a path where nothing is yet, or an empty directory, got "):
        save_decoder(load_decoder(source), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["note.txt"]


SMALL = DecoderConfig(vocab_size=8, d_model=8, layers=(SoftmaxAttentionConfig(heads=2),) * 2, hidden=8)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((HLAConfig(heads=2),), r"has softmax attention only, this model hla"),
        ((SMALL.layers[0], SoftmaxAttentionConfig(heads=4)), r"equal layers, here \[1\] differ from the first"),
        (
            (SoftmaxAttentionConfig(heads=2, rope=False, qk_norm="l2"),),
            r"no attention with rope = False, qk_norm = 'l2'",
        ),
        ((SoftmaxAttentionConfig(heads=2, scale=1.0),), r"no attention with scale = 1\.0"),
        ((SoftmaxAttentionConfig(heads=2, value_size=6),), r"no attention with values of size 6 and keys of size 4"),
    ],
)
def test_a_model_that_no_architecture_holds_is_refused(tmp_path, layers, message):
    model = Decoder(dataclasses.replace(SMALL, layers=layers), rngs=nnx.Rngs(0))
    with pytest.raises(NotImplementedError, match=r"no published architecture holds this model: .*" + message):
        save_decoder(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
