import json
from types import SimpleNamespace

import pytest

import jaxmix.cli.verify
from jaxmix.cli import main
from jaxmix.cli.info import implementation
from jaxmix.models import PRESETS, get_preset, parameter_count, state_bytes
from jaxmix.nn import GatedDeltaNetConfig, HLAConfig, SoftmaxAttentionConfig


def test_info_gives_the_sizes_of_a_preset(capsys):
    assert main(["info", "hla2-125m", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    config = get_preset("hla2-125m")
    assert facts["parameters"] == parameter_count(config) == sum(facts["parameter_groups"].values())
    assert facts["state_bytes_per_sequence"] == state_bytes(config)
    assert facts["layers"][0]["layers"] == 12
    assert {"jax", "flax", "python"} <= set(facts["versions"])
    assert facts["devices"]


def test_info_prints_a_table(capsys):
    assert main(["info", "hybrid-tiny"]) == 0
    out = capsys.readouterr().out
    assert f"{parameter_count(get_preset('hybrid-tiny')):,}" in out
    assert "served by scan" in out
    assert "dot_product_attention" in out


def test_info_without_a_model_lists_the_presets(capsys):
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["presets"] == {n: parameter_count(c) for n, c in PRESETS.items()}


def test_info_knows_the_model_of_the_quickstart(capsys):
    assert main(["info", "quickstart", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"][0]["mixer"] == "hla"


@pytest.mark.parametrize("name", ["absent", "absent.json"])
def test_info_names_a_model_that_is_not_there(capsys, name):
    assert main(["info", name]) == 2
    assert f"'{name}'" in capsys.readouterr().err


def test_the_implementation_is_explained():
    assert implementation(HLAConfig(heads=1)) == {
        "implementation": "scan",
        "why": "the Pallas kernels need a Hopper GPU or a TPU",
    }
    asked = implementation(HLAConfig(heads=1, implementation="serial"))
    assert asked == {"implementation": "serial", "why": "it is asked for"}
    assert "need a Hopper GPU or a TPU" in implementation(HLAConfig(heads=1, implementation="pallas"))["why"]
    printed = HLAConfig(heads=1, decay_form="printed", implementation="pallas")
    for config in (printed, GatedDeltaNetConfig(heads=1, implementation="pallas")):
        assert "no Pallas kernel exists" in implementation(config)["why"]
    assert implementation(SoftmaxAttentionConfig(heads=1))["implementation"] == "jax.nn.dot_product_attention"


@pytest.mark.parametrize(("ok", "status"), [(True, 0), (False, 1)])
def test_verify_hands_its_options_on_and_its_verdict_back(monkeypatch, capsys, ok, status):
    seen = []

    def verify(options, *, progress):
        seen.append(options)
        progress("hla2")
        return SimpleNamespace(ok=ok, to_json=lambda: json.dumps({"ok": ok}))

    monkeypatch.setattr(jaxmix.cli.verify, "verify", verify)
    assert main(["verify", "--json", "--length", "9", "--mixers", "hla2"]) == status
    assert json.loads(capsys.readouterr().out) == {"ok": ok}
    assert (seen[0].length, seen[0].mixers) == (9, ("hla2",))
