"""`jaxmix info`: sizes of a model, which implementation serves each mixer, versions and devices."""

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from jaxmix.arrays import check_count
from jaxmix.bench.environment import devices, versions
from jaxmix.mixers.dispatch import Operands, choose
from jaxmix.models import PRESETS, DecoderConfig, flops_per_token, get_preset, parameter_groups, state_bytes
from jaxmix.nn import MixerConfig, SoftmaxAttentionConfig


@dataclass(frozen=True, kw_only=True)
class InfoArguments:
    """Arguments of `jaxmix info`.

    Attributes:
        model: a model preset, the directory of a training run, or a JSON file with a decoder's fields; nothing lists
            the presets.
        length: tokens of the sequence that operations are counted for.
        json: print JSON.
    """

    model: Annotated[str | None, tyro.conf.Positional] = None
    length: int = 4096
    json: bool = False


def run(arguments: Sequence[str]) -> int:
    """Prints what there is to know; nothing is allocated."""
    chosen = tyro.cli(InfoArguments, prog="jaxmix info", args=arguments, description=__doc__)
    check_count("length", chosen.length)
    facts: dict[str, Any] = {"versions": versions(), "devices": devices()}
    if chosen.model is None:
        facts["presets"] = {name: sum(parameter_groups(config).values()) for name, config in PRESETS.items()}
    else:
        facts = {"model": chosen.model, **describe(find_model(chosen.model), chosen.length), **facts}
    if chosen.json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts, Console())
    return 0


def find_model(name: str) -> DecoderConfig:
    """The model of a preset, of a run's directory, or in a file.

    Raises:
        ValueError: if it is none of them; the message lists the presets.
    """
    path = Path(name).expanduser()
    if path.is_dir() or name.endswith(".json"):
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"model: expected a training run with a config.json, or a JSON file, got {name!r}")
        fields = json.loads(file.read_text("utf-8"))
        model = fields.get("model", fields)
        return get_preset(model) if isinstance(model, str) else DecoderConfig.from_dict(model)
    if name == "quickstart":
        from jaxmix.train.presets import QUICKSTART

        return QUICKSTART.decoder
    return get_preset(name)


def describe(config: DecoderConfig, length: int) -> dict[str, Any]:
    """Sizes of a model and how its layers are computed, as plain values."""
    groups = parameter_groups(config)
    layers = [
        {
            "mixer": layer.name,
            "layers": count,
            **implementation(layer, Operands(config.dtype, length, *layer.head_sizes(config.d_model))),
            "config": layer.to_dict(),
        }
        for layer, count in Counter(config.layers).items()
    ]
    return {
        "parameters": sum(groups.values()),
        "parameter_groups": groups,
        "state_bytes_per_sequence": state_bytes(config),
        "flops_per_token": flops_per_token(config, length) | {"length": length},
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "layers": layers,
        "dtype": config.dtype,
    }


def implementation(layer: MixerConfig, operands: Operands | None = None) -> dict[str, str]:
    """The implementation that serves a layer on this machine with these operands, and why, or that none does."""
    if isinstance(layer, SoftmaxAttentionConfig):
        return {"implementation": "jax.nn.dot_product_attention", "why": "softmax attention has no other"}
    try:
        chunk_size = getattr(layer, "chunk_size", 64)
        implementations = type(layer).implementations
        choice = choose(
            layer.mixer_name, layer.implementation, chunk_size, None, implementations=implementations, operands=operands
        )
    except NotImplementedError as error:
        return {"implementation": "none", "why": str(error)}
    return {"implementation": choice.form, "why": choice.why}


def _print(facts: dict[str, Any], console: Console) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    if "model" in facts:
        table.add_row("model", facts["model"])
        table.add_row("parameters", f"{facts['parameters']:,}")
        table.add_row("", ", ".join(f"{name} {size:,}" for name, size in facts["parameter_groups"].items() if size))
        table.add_row("state", f"{facts['state_bytes_per_sequence']:,} bytes per sequence, at every length")
        flops = facts["flops_per_token"]
        counted = ", ".join(f"{name} {flops[name] / 1e6:,.1f} MFLOP" for name in ("forward", "backward"))
        table.add_row("work", f"{counted} per token at {flops['length']:,} tokens")
        table.add_row("width", f"{facts['d_model']}, vocabulary {facts['vocab_size']:,}, {facts['dtype']}")
        for layer in facts["layers"]:
            options = ", ".join(f"{k}={v}" for k, v in _changed(layer["config"]).items())
            table.add_row(f"{layer['layers']} layers", f"{layer['mixer']} ({options})")
            table.add_row("", f"served by {layer['implementation']}: {layer['why']}")
    for name, size in facts.get("presets", {}).items():
        table.add_row(name, f"{size:,} parameters")
    table.add_row("versions", ", ".join(f"{name} {version}" for name, version in facts["versions"].items()))
    table.add_row("devices", ", ".join(facts["devices"]))
    console.print(table, highlight=False)


def _changed(fields: dict[str, Any]) -> dict[str, Any]:
    """The options of a layer that differ from the defaults of its kind."""
    from jaxmix.nn.registry import MIXER_CONFIGS

    defaults = {f.name: f.default for f in dataclasses.fields(MIXER_CONFIGS[fields["mixer"]])}
    return {name: value for name, value in fields.items() if name != "mixer" and value != defaults[name]}
