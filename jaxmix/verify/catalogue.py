"""The mixers of jaxmix with all their options, ready to be verified."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from jaxmix import operators
from jaxmix.mixers import ahla, hla2, hla3, linear_attention
from jaxmix.verify import explicit
from jaxmix.verify.options import VerifyOptions
from jaxmix.verify.subject import InputMaker, MixerUnderTest

Gate = Literal["none", "per head", "per token", "per key/value head"]

GATES: Mapping[str, Gate] = {
    "no decay": "none",
    "decay per head": "per head",
    "decay per key/value head": "per key/value head",
    "decay per token": "per token",
}
READ_OUT_GATES: Mapping[str, Gate] = {label: GATES[label] for label in ("no decay", "decay per head", "decay per token")}
NO_GATE: Mapping[str, Gate] = {"no decay": "none"}
RIDGE = 0.3


def catalogue() -> tuple[MixerUnderTest, ...]:
    """One entry for every mixer and option, grouped by mixer."""
    first = functools.partial(_entry, linear_attention, explicit.linear_attention)
    symmetric = functools.partial(_entry, hla2, explicit.hla2)
    asymmetric = functools.partial(_entry, ahla, explicit.ahla)
    third = functools.partial(_entry, hla3, explicit.hla3)
    return (
        first("plain", operator=operators.LinearSummary),
        first("normalised", read_out_only=True, normalize=True),
        symmetric("masked", operator=operators.HLA2Summary),
        symmetric("unmasked", read_out_only=True, masked=False),
        symmetric("printed decay", operator=operators.HLA2PrintedSummary, decay_form="printed"),
        symmetric("ridge", read_out_only=True, ridge=RIDGE),
        symmetric("normalised", read_out_only=True, normalize=True),
        asymmetric("plain", operator=operators.AHLASummary),
        asymmetric("normalised", read_out_only=True, normalize=True),
        third("exact mask", operator=operators.HLA3Summary),
        third("printed mask", operator=operators.HLA3PrintedSummary, gates=NO_GATE, mask="printed"),
        third("normalised", read_out_only=True, normalize=True),
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
    rng: np.random.Generator, options: VerifyOptions, *, gate: Gate = "per token", positive: bool = False
) -> dict[str, np.ndarray]:
    """Random q [B, T, H, D], k [B, T, G, D], v [B, T, G, E] and log_decay as `gate` says.

    Args:
        rng: Source of the numbers.
        options: Shapes.
        gate: No log_decay, [H], [B, T, H] or [B, T, G]; values in [-1, -0.02]. With a token axis and B > 1, the last row
            also has one step of -80 and one of 0.
        positive: Make q and k positive, so that the denominator of a normalised mixer stays away from 0.
    """
    stream, size = (options.batch, options.length), options.key_size
    q = rng.standard_normal((*stream, options.heads, size))
    k = rng.standard_normal((*stream, options.kv_heads, size))
    v = rng.standard_normal((*stream, options.kv_heads, options.value_size))
    if positive:
        q, k = np.abs(q) + 0.1, np.abs(k) + 0.1
    inputs = {"q": q, "k": k, "v": v}
    heads = options.kv_heads if gate == "per key/value head" else options.heads
    if gate == "per head":
        inputs["log_decay"] = -rng.uniform(0.02, 1.0, heads)
    elif gate != "none":
        log_decay = -rng.uniform(0.02, 1.0, (*stream, heads))
        if options.batch > 1:
            log_decay[-1, options.length // 2] = -80.0
            log_decay[-1, options.length // 3] = 0.0
        inputs["log_decay"] = log_decay
    return inputs


def _entry(
    function: Callable[..., Any],
    brute_force: Callable[..., Any],
    option: str,
    *,
    operator: type | None = None,
    gates: Mapping[str, Gate] | None = None,
    read_out_only: bool = False,
    normalize: bool = False,
    **settings: Any,
) -> MixerUnderTest:
    if gates is None:
        gates = READ_OUT_GATES if read_out_only else GATES
    if normalize:
        settings["normalize"] = True
    makers: dict[str, InputMaker] = {
        label: functools.partial(mixer_inputs, gate=gate, positive=normalize) for label, gate in gates.items()
    }
    return MixerUnderTest(
        name=function.__name__,
        option=option,
        function=functools.partial(function, **settings),
        make_inputs=makers,
        brute_force=functools.partial(brute_force, **settings),
        operator=operator,
        read_out_only=read_out_only,
    )
