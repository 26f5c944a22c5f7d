"""The mixers of jaxmix with all their options, ready to be verified."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from jaxmix import operators
from jaxmix.mixers import ahla, hla2, hla3, linear_attention
from jaxmix.verify import explicit
from jaxmix.verify.mixer import InputMaker, MixerUnderTest
from jaxmix.verify.options import VerifyOptions

Gate = Literal["none", "per head", "per token"]
GATES: tuple[Gate, ...] = ("none", "per head", "per token")
NO_GATE: tuple[Gate, ...] = ("none",)
RIDGE = 0.3


def catalogue() -> tuple[MixerUnderTest, ...]:
    """One entry for every mixer and recurrence; options that only change the read-out share an entry and its state."""
    return (
        _entry(
            hla2,
            explicit.hla2,
            operators.HLA2Summary,
            {
                "masked": {},
                "unmasked": {"masked": False},
                "ridge": {"ridge": RIDGE},
                "normalised": {"normalize": True},
            },
        ),
        _entry(hla2, explicit.hla2, operators.HLA2PrintedSummary, {"printed decay": {"decay_form": "printed"}}),
        _entry(
            hla3,
            explicit.hla3,
            operators.HLA3Summary,
            {"exact mask": {}, "normalised": {"normalize": True}},
        ),
        _entry(hla3, explicit.hla3, operators.HLA3PrintedSummary, {"printed mask": {"mask": "printed"}}, gates=NO_GATE),
        _entry(ahla, explicit.ahla, operators.AHLASummary, {"plain": {}, "normalised": {"normalize": True}}),
        _entry(
            linear_attention,
            explicit.linear_attention,
            operators.LinearSummary,
            {"plain": {}, "normalised": {"normalize": True}},
        ),
    )


def select(names: tuple[str, ...]) -> tuple[MixerUnderTest, ...]:
    """The entries of the named mixers, all for no name.

    Raises:
        ValueError: when a name is not a mixer.
    """
    entries = catalogue()
    known = tuple(dict.fromkeys(entry.name for entry in entries))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"mixers: expected names among {', '.join(known)}, got {', '.join(unknown)}")
    return tuple(entry for entry in entries if not names or entry.name in names)


def mixer_inputs(
    rng: np.random.Generator, options: VerifyOptions, *, gate: Gate = "per token"
) -> dict[str, np.ndarray]:
    """Random q [B, T, H, D], k [B, T, G, D], v [B, T, G, E] and log_decay as `gate` says.

    q and k have mean 1 and standard deviation 1/2, so that the denominators of normalised mixers stay away from 0.

    Args:
        rng: Source of the numbers.
        options: Shapes.
        gate: No log_decay, [H] or [B, T, H]; values in [-1, -0.02]. With a token axis and B > 1, the last row also has
            one step of -80 and one of 0.
    """
    stream, size = (options.batch, options.length), options.key_size
    q = 1.0 + 0.5 * rng.standard_normal((*stream, options.heads, size))
    k = 1.0 + 0.5 * rng.standard_normal((*stream, options.kv_heads, size))
    v = rng.standard_normal((*stream, options.kv_heads, options.value_size))
    inputs = {"q": q, "k": k, "v": v}
    if gate == "per head":
        inputs["log_decay"] = -rng.uniform(0.02, 1.0, options.heads)
    elif gate != "none":
        log_decay = -rng.uniform(0.02, 1.0, (*stream, options.heads))
        if options.batch > 1:
            log_decay[-1, options.length // 2] = -80.0
            log_decay[-1, options.length // 3] = 0.0
        inputs["log_decay"] = log_decay
    return inputs


def _entry(
    function: Callable[..., tuple[Any, Any]],
    brute_force: Callable[..., Any],
    operator: type,
    settings: Mapping[str, Mapping[str, Any]],
    *,
    gates: tuple[Gate, ...] = GATES,
) -> MixerUnderTest:
    """An entry that reads one state in several ways; the state is that of the first."""

    def mixed(**arguments: Any) -> tuple[tuple[Any, ...], Any]:
        results = [function(**arguments, **chosen) for chosen in settings.values()]
        return tuple(out for out, _ in results), results[0][1]

    def summed(**inputs: Any) -> tuple[Any, ...]:
        return tuple(brute_force(**inputs, **chosen) for chosen in settings.values())

    makers: dict[str, InputMaker] = {
        "no decay" if gate == "none" else f"decay {gate}": functools.partial(mixer_inputs, gate=gate) for gate in gates
    }
    return MixerUnderTest(
        name=function.__name__,
        read_outs=tuple(settings),
        function=mixed,
        make_inputs=makers,
        brute_force=summed,
        operator=operator,
    )
