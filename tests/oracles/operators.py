"""Vectors of the pure functions: fla-core's naive references and transformers' torch gated delta rule."""

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from tests.oracles.precision import double_precision, generator, relative_rms, short

BATCH, LENGTH, HEADS, KEY_SIZE, VALUE_SIZE = 2, 100, 3, 8, 12
LENGTHS = (1, 7, 64, 100)
# "zero" starts from no state, "given" from `initial_state`.
STARTS = ("zero", "given")
GRADIENT_CASES = (("zero", 1), ("zero", 7), ("given", 7), ("given", 100))
# Not K^-1/2, and exact in float32.
SCALE = 0.3125
AGREEMENT = 1e-11

Arrays = dict[str, np.ndarray]
Tensors = dict[str, torch.Tensor | None]
Rule = Callable[[Tensors], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Reference:
    """A reference, another form of it that must agree, and what both take.

    Attributes:
        rule: the recurrent form; gives output [B, T, H, E] and final state [B, H, D, E].
        inputs: names of the arrays that it reads, without the initial state.
        check: the chunked form, run where `checks` says it can.
        checks: (start, length) of every case that the chunked form supports.
    """

    rule: Rule
    inputs: tuple[str, ...]
    check: Rule
    checks: tuple[tuple[str, int], ...]


@functools.cache
def naive(op: str) -> ModuleType:
    """`fla/ops/<op>/naive.py` of the installed fla-core, loaded by path: importing the package needs triton."""
    path = importlib.metadata.distribution("fla-core").locate_file(f"fla/ops/{op}/naive.py")
    spec = importlib.util.spec_from_file_location(f"fla_naive_{op}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """[B, T, H, ...] as [B, H, T, ...], and back."""
    return x.transpose(1, 2)


def draw_inputs() -> Arrays:
    """Float32 inputs of every case. |k| is near 1 but not 1, and the heads forget slowly, moderately and fast."""
    rng = generator("inputs")
    tokens = (BATCH, LENGTH, HEADS)
    state = (BATCH, HEADS, KEY_SIZE, VALUE_SIZE)
    softplus = np.log1p(np.exp(rng.standard_normal(tokens)))
    arrays = {
        "q": rng.standard_normal((*tokens, KEY_SIZE)),
        "k": rng.standard_normal((*tokens, KEY_SIZE)) / np.sqrt(KEY_SIZE),
        "v": rng.standard_normal((*tokens, VALUE_SIZE)),
        "log_decay": -softplus * np.array([0.03, 0.3, 3.0]),
        "beta": 1 / (1 + np.exp(-rng.standard_normal(tokens))),
        "initial_state": rng.standard_normal(state),
        "w": rng.standard_normal((*tokens, VALUE_SIZE)),
        "ws": rng.standard_normal(state),
        "scale": np.array(SCALE),
    }
    return {name: short(array) for name, array in arrays.items()}


def gated_delta_rule(x: Tensors, form: str = "recurrent") -> tuple[torch.Tensor, torch.Tensor]:
    rule = getattr(naive("gated_delta_rule"), f"naive_{form}_gated_delta_rule")
    return rule(
        q=x["q"],
        k=x["k"],
        v=x["v"],
        g=x["log_decay"],
        beta=x["beta"],
        scale=SCALE,
        initial_state=x["initial_state"],
        output_final_state=True,
    )


def delta_rule(x: Tensors, form: str = "recurrent") -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, beta = (heads_first(x[name]) for name in ("q", "k", "v", "beta"))
    if form == "chunk":
        out, state = naive("delta_rule").delta_rule_chunkwise(q, k, v, beta)
    else:
        out, state = naive("delta_rule").delta_rule_recurrence(q, k, v, beta, initial_state=x["initial_state"])
    return heads_first(out), state


def simple_gla(x: Tensors, form: str = "recurrent") -> tuple[torch.Tensor, torch.Tensor]:
    rule = getattr(naive("simple_gla"), f"naive_{form}_simple_gla")
    options = {"scale": SCALE, "initial_state": x["initial_state"], "output_final_state": True}
    return rule(x["q"], x["k"], x["v"], x["log_decay"], **options)


def linear_attention(x: Tensors, form: str = "recurrent") -> tuple[torch.Tensor, torch.Tensor | None]:
    if form == "chunk":
        return naive("linear_attn").naive_chunk_linear_attn(x["q"], x["k"], x["v"], scale=SCALE), None
    return naive("linear_attn").naive_recurrent_linear_attn(
        x["q"], x["k"], x["v"], scale=SCALE, initial_state=x["initial_state"], output_final_state=True
    )


def transformers_gated_delta(x: Tensors, form: str = "recurrent", l2norm: bool = False):
    rule = {"recurrent": torch_recurrent_gated_delta_rule, "chunk": torch_chunk_gated_delta_rule}[form]
    return rule(
        x["q"],
        x["k"],
        x["v"],
        g=x["log_decay"],
        beta=x["beta"],
        initial_state=x["initial_state"],
        output_final_state=True,
        use_qk_l2norm_in_kernel=l2norm,
    )


def reference(rule: Rule, inputs: str, checks=tuple((start, length) for start in STARTS for length in LENGTHS)):
    return Reference(rule, tuple(inputs.split()), functools.partial(rule, form="chunk"), checks)


REFERENCES = {
    "fla_gated_delta_rule": reference(gated_delta_rule, "q k v log_decay beta"),
    "fla_delta_rule": reference(delta_rule, "q k v beta", checks=(("zero", 64),)),
    "fla_simple_gla": reference(simple_gla, "q k v log_decay"),
    "fla_linear_attn": reference(linear_attention, "q k v", checks=(("zero", 64),)),
    "transformers_gated_delta_rule": reference(transformers_gated_delta, "q k v log_decay beta"),
    "transformers_gated_delta_rule_l2norm": reference(
        functools.partial(transformers_gated_delta, l2norm=True), "q k v log_decay beta"
    ),
}
WITH_GRADIENTS = ("fla_gated_delta_rule", "fla_delta_rule", "fla_simple_gla")


def evaluate(rule: Rule, inputs: tuple[str, ...], arrays: Arrays, start: str, length: int, dtype, grad: bool) -> Arrays:
    """Output and final state of one case, and the gradients of sum(out * w) + sum(final_state * ws) if `grad`."""
    arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    x = {name: torch.tensor(arrays[name][:, :length], requires_grad=grad) for name in inputs}
    x["initial_state"] = torch.tensor(arrays["initial_state"], requires_grad=grad) if start == "given" else None
    out, state = rule(x)
    values = {"out": out} if state is None else {"out": out, "final_state": state}
    if grad:
        w, ws = torch.tensor(arrays["w"][:, :length]), torch.tensor(arrays["ws"])
        loss = (out * w).sum() + (state * ws).sum()
        names = [name for name, value in x.items() if value is not None]
        gradients = torch.autograd.grad(loss, [x[name] for name in names])
        values |= {f"grad.{name}": value for name, value in zip(names, gradients, strict=True)}
    return {name: value.detach().numpy() for name, value in values.items()}


def require_agreement(what: str, value: np.ndarray, expected: np.ndarray) -> None:
    """Raises ValueError where two float64 results that must be equal are not."""
    difference = relative_rms(value, expected)
    if not difference < AGREEMENT:
        raise ValueError(f"{what}: two forms differ by {difference:.1e} (relative RMS), allowed is {AGREEMENT:.0e}")


def operator_vectors(name: str, arrays: Arrays) -> tuple[Arrays, float]:
    """All cases of one reference in float64, and how far a float32 run of it is from them.

    `<start>.out` is the output at the full length; a shorter case gives its first tokens, which is checked here.
    """
    ref, stored, float32_difference = REFERENCES[name], {}, 0.0
    for start in STARTS:
        whole = None
        for length in reversed(LENGTHS):
            case = f"{start}.T{length}"
            grad = name in WITH_GRADIENTS and (start, length) in GRADIENT_CASES
            run = functools.partial(evaluate, arrays=arrays, start=start, length=length)
            with double_precision():
                values = run(ref.rule, ref.inputs, dtype=np.float64, grad=grad)
                if (start, length) in ref.checks:
                    other = run(ref.check, ref.inputs, dtype=np.float64, grad=False)
                    for key, value in other.items():
                        require_agreement(f"{name} {case} {key}", value, values[key])
            single = run(ref.rule, ref.inputs, dtype=np.float32, grad=grad)
            differences = [relative_rms(single[key], value) for key, value in values.items() if value.any()]
            float32_difference = max(float32_difference, *differences)
            out = values.pop("out")
            if whole is None:
                whole = stored[f"{start}.out"] = out
            require_agreement(f"{name} {case} out", out, whole[:, :length])
            stored |= {f"{case}.{key}": value for key, value in values.items()}
    return stored, float32_difference


def require_same_rule(fla: Arrays, transformers: Arrays) -> None:
    """The two libraries' gated delta rules agree, up to transformers' fixed scale of K^-1/2."""
    ratio = SCALE * np.sqrt(KEY_SIZE)
    for key, value in transformers.items():
        require_agreement(f"gated delta rule {key}", value * (ratio if key.endswith(".out") else 1), fla[key])
