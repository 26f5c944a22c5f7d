"""The recurrent mixers of jaxmix with all their options, ready to be verified."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from jaxmix import operators
from jaxmix.mixers import (
    ahla,
    delta_rule,
    gated_delta_rule,
    hla2,
    hla3,
    interdomain_attention,
    interdomain_ideal,
    linear_attention,
    s4d,
    ssd,
)
from jaxmix.verify import explicit, inputs, summaries
from jaxmix.verify.inputs import Gate
from jaxmix.verify.mixer import SCAN, SERIAL, InputMaker, MixerUnderTest, key_value_operator

GATES: tuple[Gate, ...] = ("none", "per head", "per token")
NO_GATE: tuple[Gate, ...] = ("none",)
RIDGE = 0.3
SCALE = 0.7
IDEAL_MODES = 4
WINDOW = 6.5
BRIEF = ("forms", "operator")
"""The quick checks of an entry that shares most of its code with another of the same mixer."""

Settings = Mapping[str, Mapping[str, Any]]


def catalogue() -> tuple[MixerUnderTest, ...]:
    """One entry for every mixer and recurrence; options that only change the read-out share an entry and its state."""
    return (*_hla(), *_delta(), *_state_spaces(), *_interdomain(), *_linear())


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


def _hla() -> tuple[MixerUnderTest, ...]:
    second: Settings = {
        "masked": {},
        "unmasked": {"masked": False},
        "ridge": {"ridge": RIDGE},
        "normalised": {"normalize": True},
    }
    printed: Settings = {"printed decay": {"decay_form": "printed"}}
    third: Settings = {"exact mask": {}, "normalised": {"normalize": True}}
    return (
        _gated(hla2, explicit.hla2, operators.HLA2Summary, second),
        _gated(hla2, explicit.hla2, operators.HLA2PrintedSummary, printed, quick_checks=BRIEF),
        _gated(hla3, explicit.hla3, operators.HLA3Summary, third),
        _gated(
            hla3,
            explicit.hla3,
            operators.HLA3PrintedSummary,
            {"printed mask": {"mask": "printed"}},
            gates=NO_GATE,
            quick_checks=BRIEF,
        ),
        _gated(ahla, explicit.ahla, operators.AHLASummary, {"plain": {}, "normalised": {"normalize": True}}),
    )


def _linear() -> tuple[MixerUnderTest, ...]:
    settings: Settings = {"plain": {}, "normalised": {"normalize": True}}
    return (_gated(linear_attention, explicit.linear_attention, operators.LinearSummary, settings),)


def _delta() -> tuple[MixerUnderTest, ...]:
    settings: Settings = {"plain": {}, "scale": {"scale": SCALE}}
    return (
        _entry(
            "gated_delta_rule",
            functools.partial(gated_delta_rule, log_decay=None),
            functools.partial(explicit.gated_delta_rule, log_decay=None),
            settings,
            make_inputs=_by_gate(inputs.delta_inputs, GATES),
            float32_arguments=("log_decay", "beta"),
            operator=summaries.delta_operator(),
        ),
        _entry(
            "delta_rule",
            delta_rule,
            explicit.delta_rule,
            settings,
            make_inputs=_by_gate(inputs.delta_inputs, NO_GATE),
            float32_arguments=("beta",),
            operator=summaries.delta_operator(),
        ),
    )


def _state_spaces() -> tuple[MixerUnderTest, ...]:
    modal = functools.partial(
        _entry,
        "s4d",
        s4d,
        explicit.s4d,
        make_inputs=_with_and_without_direct_path(inputs.s4d_inputs),
        float32_arguments=("A", "delta", "C", "D"),
        implementations=(SERIAL, SCAN, "fft"),
    )
    return (
        _entry(
            "ssd",
            ssd,
            explicit.ssd,
            {"plain": {}},
            make_inputs=_with_and_without_direct_path(inputs.ssd_inputs),
            float32_arguments=("dt", "A", "D"),
            operator=summaries.ssd_operator(),
        ),
        modal({"zoh": {}}, operator=summaries.s4d_operator("zoh")),
        modal(
            {"bilinear": {"discretization": "bilinear"}},
            operator=summaries.s4d_operator("bilinear"),
            quick_checks=BRIEF,
        ),
    )


def _interdomain() -> tuple[MixerUnderTest, ...]:
    full = {"full C": inputs.interdomain_inputs}
    diagonal = {"diagonal C, shared modes": functools.partial(inputs.interdomain_inputs, diagonal=True)}
    modal = functools.partial(
        _entry,
        "interdomain_attention",
        interdomain_attention,
        explicit.interdomain_attention,
        float32_arguments=("A", "delta", "C"),
    )
    bilinear = {"discretization": "bilinear"}
    return (
        modal({"zoh": {}}, make_inputs=diagonal | full, operator=summaries.interdomain_operator("zoh")),
        modal(
            {"bilinear, conjugate": bilinear | {"conjugate": True}, "normalised": bilinear | {"normalize": True}},
            make_inputs=full | diagonal,
            operator=summaries.interdomain_operator("bilinear"),
            quick_checks=BRIEF,
        ),
        _ideal("legs", "bilinear"),
        _ideal("legs", "zoh", quick_checks=BRIEF),
        _ideal("legt", "bilinear", window=WINDOW, quick_checks=BRIEF),
        _ideal("legt", "zoh", window=WINDOW, quick_checks=BRIEF),
    )


def _ideal(
    basis: str, discretization: str, *, window: float | None = None, quick_checks: tuple[str, ...] = ()
) -> MixerUnderTest:
    chosen = {"modes": IDEAL_MODES, "basis": basis, "window": window, "discretization": discretization}
    return _entry(
        "interdomain_ideal",
        interdomain_ideal,
        explicit.interdomain_ideal,
        {f"{basis}, {discretization}": chosen},
        make_inputs=inputs.feature_inputs,
        operator=summaries.ideal_operator(**chosen),
        quick_checks=quick_checks,
    )


def _gated(
    function: Callable[..., tuple[Any, Any]],
    brute_force: Callable[..., Any],
    summary: type,
    settings: Settings,
    *,
    gates: tuple[Gate, ...] = GATES,
    quick_checks: tuple[str, ...] = (),
) -> MixerUnderTest:
    """An entry for a mixer of q, k, v and an optional log_decay."""
    return _entry(
        function.__name__,
        function,
        brute_force,
        settings,
        make_inputs=_by_gate(inputs.mixer_inputs, gates),
        operator=key_value_operator(summary),
        quick_checks=quick_checks,
    )


def _entry(
    name: str,
    function: Callable[..., tuple[Any, Any]],
    brute_force: Callable[..., Any],
    settings: Settings,
    **described: Any,
) -> MixerUnderTest:
    """An entry that reads one state in several ways; the state is that of the first."""

    def mixed(**arguments: Any) -> tuple[tuple[Any, ...], Any]:
        results = [function(**arguments, **chosen) for chosen in settings.values()]
        return tuple(out for out, _ in results), results[0][1]

    def summed(**arguments: Any) -> tuple[Any, ...]:
        return tuple(brute_force(**arguments, **chosen) for chosen in settings.values())

    return MixerUnderTest(name=name, read_outs=tuple(settings), function=mixed, brute_force=summed, **described)


def _by_gate(maker: Callable[..., Any], gates: tuple[Gate, ...]) -> dict[str, InputMaker]:
    return {"no decay" if gate == "none" else f"decay {gate}": functools.partial(maker, gate=gate) for gate in gates}


def _with_and_without_direct_path(maker: Callable[..., Any]) -> dict[str, InputMaker]:
    return {"no direct path": functools.partial(maker, direct=False), "direct path": maker}
