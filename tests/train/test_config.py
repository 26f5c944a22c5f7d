import json

import pytest

from jaxmix.models import DecoderConfig
from jaxmix.models.presets import get_preset
from jaxmix.nn import HLAConfig
from jaxmix.train import TRAIN_PRESETS, DataConfig, OptimizerConfig, TrainConfig, get_train_preset
from jaxmix.train.config import differences, merge, read_json

DECODER = DecoderConfig(vocab_size=10, d_model=8, layers=(HLAConfig(heads=2), HLAConfig(heads=1)), hidden=8)


@pytest.mark.parametrize(
    "config", [*TRAIN_PRESETS.values(), TrainConfig(model="hla2-tiny"), TrainConfig(model=DECODER)]
)
def test_a_configuration_survives_json(config, tmp_path):
    config.save(tmp_path / "config.json")
    assert TrainConfig.load(tmp_path / "config.json") == config


def test_what_is_left_out_keeps_its_default():
    config = TrainConfig.from_dict({"model": "hla2-tiny", "data": {"length": 32}})
    assert config == TrainConfig(model="hla2-tiny", data=DataConfig(length=32))


def test_resolving_spells_the_model_out_for_the_vocabulary():
    model = TrainConfig(model="hla2-tiny").resolve(777).model
    assert model.vocab_size == 777
    assert model.layers == get_preset("hla2-tiny").layers


def test_merging_goes_part_by_part_and_replaces_a_model_whole():
    base = {"model": {"d_model": 1, "hidden": 2}, "steps": 3, "data": {"length": 4, "batch_size": 5}}
    override = {"model": {"d_model": 6}, "data": {"length": 7}}
    assert merge(base, override) == {"model": {"d_model": 6}, "steps": 3, "data": {"length": 7, "batch_size": 5}}
    assert base["data"]["length"] == 4


def test_differences_name_the_fields():
    left, right = {"a": 1, "b": {"c": 2, "d": [1]}, "e": 0}, {"a": 1, "b": {"c": 3, "d": [1]}, "f": 4}
    assert differences(left, right) == ["b.c: 2 -> 3", "e: 0 -> None", "f: None -> 4"]
    assert differences(left, left) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "model: expected a preset's name or a decoder's fields, got None"),
        ({"model": "hla2-tiny", "stpes": 5}, r"config: expected the fields .* got also \['stpes'\]"),
        ({"model": "hla2-tiny", "data": {"lenght": 5}}, r"data: expected the fields .* got also \['lenght'\]"),
        ({"model": "hla2-tiny", "optimizer": 5}, "optimizer: expected an object with fields, got 5"),
        ({"model": "hla2-tiny", "steps": 0}, "steps: expected a finite number of at least 1, got 0"),
        ({"model": "hla2-tiny", "data": {"batch_size": 0}}, "batch_size: expected a finite number of at least 1"),
        ({"model": "hla2-tiny", "data": {"newest": 0}}, "newest: expected a finite number of at least 1"),
        ({"model": "hla2-tiny", "data": {"validation_fraction": 1}}, r"validation_fraction: expected a number in"),
        ({"model": "hla2-tiny", "optimizer": {"beta2": 1.0}}, r"beta2: expected a number in \[0, 1\), got 1.0"),
        ({"model": "hla2-tiny", "optimizer": {"clip_norm": 0}}, "clip_norm: expected a finite number above 0"),
        ({"model": "hla2-tiny", "optimizer": {"learning_rate": float("nan")}}, "learning_rate: expected a finite"),
    ],
)
def test_wrong_values_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig.from_dict(fields)


def test_an_unknown_preset_lists_those_there_are():
    with pytest.raises(ValueError, match=r"preset: expected one of \['quickstart'\], got 'fast'"):
        get_train_preset("fast")


@pytest.mark.parametrize(("content", "message"), [(None, "does not exist"), ("{", "expected JSON"), ("[]", "got list")])
def test_a_file_without_a_configuration_is_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "c.json").write_text(content, "utf-8")
    with pytest.raises(ValueError, match=message):
        read_json(tmp_path / "c.json")


def test_a_file_is_plain_json(tmp_path):
    TrainConfig(model=DECODER, optimizer=OptimizerConfig(learning_rate=0.5)).save(tmp_path / "c.json")
    assert json.loads((tmp_path / "c.json").read_text("utf-8"))["optimizer"]["learning_rate"] == 0.5
