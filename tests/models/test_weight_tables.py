"""Name tables: parameters by layer, tensors that are split or changed, and tables that do not fit."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxmix.models import DecoderConfig, parameter_count
from jaxmix.models.weights import FAMILIES, Entry, load_decoder, same, save_decoder
from jaxmix.models.weights.llama import Llama
from jaxmix.models.weights.names import find_places
from jaxmix.nn import HLAConfig, SoftmaxAttentionConfig
from tests.models.llama import LLAMA, llama_tensors, params, write
from tests.tolerances import assert_same_bits

SMALL = DecoderConfig(vocab_size=8, d_model=8, layers=(SoftmaxAttentionConfig(heads=2),) * 2, hidden=8)


def test_places_name_every_parameter_of_every_layer():
    hla = HLAConfig(heads=2)
    config = dataclasses.replace(SMALL, layers=(hla, SMALL.layers[0]) * 2 + (hla,))
    places = find_places(config)
    assert sum(np.prod(place.shape, dtype=int) for place in places.values()) == parameter_count(config)
    with_query = {name for name in places if name.endswith("mixer.query.kernel")}
    assert with_query == {f"layers.{layer}.mixer.query.kernel" for layer in range(5)}
    assert {layer for layer in range(5) if f"layers.{layer}.mixer.gate.kernel" in places} == {0, 2, 4}
    assert places["layers.3.mixer.query.kernel"].unit == 1


class Fused(Llama):
    """A family with queries, keys and values in one tensor, and norms that are stored less one."""

    architecture = "FusedForCausalLM"
    streams = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    fused = "self_attn.qkv_proj.weight"

    def entries(self, config):
        attention = config.layers[0]
        queries, keys = attention.heads * attention.key_size, attention.groups * attention.key_size
        entries = []
        for entry in super().entries(config):
            name, stream, _ = entry.theirs[0].partition("self_attn.q_proj")
            if stream:
                ours = tuple(entry.ours[0].replace("query", part) for part in ("query", "key", "value"))
                entries.append(
                    Entry(
                        (name + self.fused,),
                        ours,
                        lambda x: tuple(np.split(x.T, [queries, queries + keys], axis=1)),
                        lambda *parts: (np.concatenate(parts, axis=1).T,),
                    )
                )
            elif entry.ours == ("norm.scale",):
                entries.append(Entry(entry.theirs, entry.ours, lambda x: (x + 1,), lambda x: (x - 1,)))
            elif not any(stream in entry.theirs[0] for stream in self.streams):
                entries.append(entry)
        return entries


def test_a_line_may_split_a_tensor_and_change_its_values(monkeypatch, tmp_path):
    plain = llama_tensors()
    fused = {name: x for name, x in plain.items() if not any(stream in name for stream in Fused.streams)}
    for layer in range(3):
        parts = [plain[f"model.layers.{layer}.{stream}.weight"] for stream in Fused.streams]
        fused[f"model.layers.{layer}.{Fused.fused}"] = np.concatenate(parts)
    stored = fused | {"model.norm.weight": np.round(fused["model.norm.weight"] * 64) / 64}
    monkeypatch.setitem(FAMILIES, Fused.architecture, Fused())
    model = load_decoder(write(tmp_path / "in", LLAMA | {"architectures": [Fused.architecture]}, stored))
    expected = plain | {"model.norm.weight": stored["model.norm.weight"] + 1}
    assert_same_bits(params(model), params(load_decoder(write(tmp_path / "plain", LLAMA, expected))))
    monkeypatch.delitem(FAMILIES, Llama.architecture)
    save_decoder(model, tmp_path / "out")
    assert_same_bits(load_file(tmp_path / "out/model.safetensors"), stored)
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == [Fused.architecture]


def test_a_table_that_leaves_a_parameter_out_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(Llama, "entries", lambda self, config: [same("model.norm.weight", "norm.scale")])
    with pytest.raises(
        NotImplementedError, match=r"the names of LlamaForCausalLM do not fit this decoder at embedding,"
    ):
        load_decoder(write(tmp_path / "in", LLAMA, llama_tensors()))
