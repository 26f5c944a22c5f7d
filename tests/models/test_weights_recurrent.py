"""Published checkpoints with recurrent layers, against what transformers computes with them."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxmix.models import Decoder, DecoderConfig
from jaxmix.models.weights import load_decoder, save_decoder
from jaxmix.models.weights.mamba2 import layer_entries as mamba2_entries
from jaxmix.models.weights.qwen3_next import mixer_entries as qwen3_next_entries
from jaxmix.nn import GatedDeltaNetConfig, HLAConfig, Mamba2Config, SoftmaxAttentionConfig
from tests.tolerances import STORED_MODELS, rms_ratio

ORACLES = Path(__file__).parents[1] / "oracles"
every_model = pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])


@every_model
def test_logits_are_those_of_transformers(name):
    source = ORACLES / "checkpoints" / name
    stored = np.load(source / "logits.npz")
    model = load_decoder(source)
    logits = jax.jit(lambda model, tokens: model(tokens)[0])(model, jnp.asarray(stored["tokens"]))
    assert rms_ratio(logits, stored["logits"]) <= STORED_MODELS


@every_model
def test_export_gives_back_what_was_imported(name, tmp_path):
    source = ORACLES / "checkpoints" / name
    model = load_decoder(source)
    save_decoder(model, tmp_path / "again")
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    assert before.keys() == after.keys()
    for tensor, values in before.items():
        # 1 + weight loses the last bit of a weight.
        np.testing.assert_allclose(after[tensor], values, rtol=0, atol=6e-8 if "norm" in tensor else 0, err_msg=tensor)
    assert load_decoder(tmp_path / "again").config == model.config


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mamba2", {"use_bias": True}, "use_bias = True"),
        ("mamba2", {"use_conv_bias": False}, "use_conv_bias = False"),
        ("mamba2", {"time_step_limit": [0.001, 0.1]}, r"time_step_limit = \[0.001, 0.1\]"),
        ("mamba2", {"expand": 3}, "expand = 3"),
        ("qwen3_next", {"num_experts": 8, "mlp_only_layers": []}, "num_experts = 8 needs a mixture of experts"),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]}, "sliding_attention"),
        ("qwen3_next", {"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05"),
        ("qwen3_next", {"attention_bias": True}, "attention_bias = True"),
    ],
)
def test_what_the_decoder_has_not_is_refused(name, change, message, tmp_path):
    shutil.copytree(ORACLES / "checkpoints" / name, tmp_path / "source")
    file = tmp_path / "source" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(NotImplementedError, match=message):
        load_decoder(tmp_path / "source")


MAMBA2 = Mamba2Config(heads=4, key_size=8)
DELTA, SOFTMAX = GatedDeltaNetConfig(heads=2), SoftmaxAttentionConfig(heads=2)
GATED = dataclasses.replace(SOFTMAX, qk_norm="rms", gate=True, gate_activation="sigmoid", rope_fraction=0.5)


@pytest.mark.parametrize(
    ("layers", "hidden", "message"),
    [
        ((MAMBA2, MAMBA2), 8, "Mamba2ForCausalLM has no layers with hidden = 8"),
        ((dataclasses.replace(MAMBA2, gate=False),), 0, "gate = False"),
        ((dataclasses.replace(MAMBA2, rope=True),), 0, "rope = True"),
        ((MAMBA2, dataclasses.replace(MAMBA2, key_size=4)), 0, r"equal layers, here \[1\] differ"),
        ((DELTA, DELTA), 8, "this model gated_delta_net"),
        ((DELTA, SOFTMAX), 8, "qk_norm = None, gate = False"),
        ((dataclasses.replace(DELTA, negative_eigenvalues=True), GATED), 8, "negative_eigenvalues = True"),
        ((DELTA, GATED), 0, "hidden = False"),
        ((HLAConfig(heads=2),), 8, "this model hla"),
    ],
)
def test_what_no_architecture_has_is_not_exported(layers, hidden, message, tmp_path):
    config = DecoderConfig(vocab_size=16, d_model=16, layers=layers, hidden=hidden)
    with pytest.raises(NotImplementedError, match=message):
        save_decoder(Decoder(config, rngs=nnx.Rngs(0)), tmp_path / "target")


LAYERS = {
    "mamba2_mixer_groups1": Mamba2Config(heads=4, key_size=8, norm_eps=1e-5, chunk_size=16),
    "mamba2_mixer_groups2": Mamba2Config(heads=4, key_size=8, key_heads=2, norm_eps=1e-5, chunk_size=16),
    "qwen3_next_gated_delta_net": GatedDeltaNetConfig(heads=4, key_heads=2, key_size=8, value_size=12, chunk_size=16),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_whole_layer_gives_what_the_layer_of_transformers_gives(name):
    stored = np.load(ORACLES / "vectors" / f"{name}.npz")
    config, width = LAYERS[name], stored["input"].shape[-1]
    layer = config.build(width, rngs=nnx.Rngs(0))
    entries = mamba2_entries if name.startswith("mamba2") else qwen3_next_entries
    parameters = {}
    for entry in entries(config, width):
        theirs = ["weights." + tensor.partition(".")[2] for tensor in entry.theirs]
        if all(tensor in stored for tensor in theirs):
            arrays = entry.to_ours(*(stored[tensor] for tensor in theirs))
            parameters |= {
                tensor.removeprefix("mixer."): array for tensor, array in zip(entry.ours, arrays, strict=True)
            }
    state = nnx.state(layer, nnx.Param)
    paths = nnx.traversals.flatten_mapping(nnx.to_pure_dict(state))
    assert {".".join(map(str, path)) for path in paths} == parameters.keys()
    filled = {path: jnp.asarray(parameters[".".join(map(str, path))]) for path in paths}
    nnx.update(layer, nnx.traversals.unflatten_mapping(filled))
    for form in ("scan", "serial"):
        layer.config = dataclasses.replace(config, implementation=form)
        assert rms_ratio(layer(jnp.asarray(stored["input"]))[0], stored["output"]) <= STORED_MODELS
