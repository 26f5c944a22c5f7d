"""PyTorch's attention and fla's kernels as rows beside jaxmix, timed with CUDA events."""

import importlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmix.bench.costs import cost
from jaxmix.bench.gate import Work, check
from jaxmix.bench.jax_cases import Case, Measurement
from jaxmix.bench.loop import LoopOptions, TooLong, count_sets, to_timing
from jaxmix.bench.operands import MIXERS

Function = Callable[..., Any]
Call = Callable[[], dict[str, Any]]


def torch_cases(mixer: str, suite: str) -> Mapping[str, Case]:
    """Rows of other libraries for a mixer, by title. What is not installed fails when it is run and says so."""
    decoding = suite == "streams"
    if mixer == "softmax_attention":
        return {"torch SDPA, full cache": torch_case(sdpa_decode)} if decoding else {"torch SDPA": torch_case(sdpa)}
    if mixer == "linear_attention":
        name = "fused_recurrent_simple_gla" if decoding else "chunk_simple_gla"
        return {f"fla {name}": torch_case(lambda: fla("simple_gla", name, scale=1.0))}
    if mixer == "gated_delta_rule":
        name = "fused_recurrent_gated_delta_rule" if decoding else "chunk_gated_delta_rule"
        return {f"fla {name}": torch_case(lambda: fla("gated_delta_rule", name))}
    return {}


def torch_case(make: Callable[[], Function], *, device: str = "cuda") -> Case:
    """A row of `make()`, a function (*tensors, state=None) -> (output, new state), made when the row is run."""

    def measure(work: Work, options: LoopOptions) -> Measurement:
        torch = importlib.import_module("torch")
        if device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("torch finds no CUDA device")
        return measure_torch(torch, work, options, make(), device)

    return measure


def sdpa() -> Function:
    """Causal `scaled_dot_product_attention` on [B, T, H, D]."""
    attend = importlib.import_module("torch").nn.functional.scaled_dot_product_attention

    def call(q: Any, k: Any, v: Any, *, state: Any = None) -> tuple[Any, Any]:
        shared = {"enable_gqa": True} if k.shape[2] != q.shape[2] else {}
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return attend(*heads_first, is_causal=True, **shared).transpose(1, 2), None

    return call


def sdpa_decode() -> Function:
    """`scaled_dot_product_attention` of one query over a cache that already has the token."""
    attend = importlib.import_module("torch").nn.functional.scaled_dot_product_attention

    def call(q: Any, k: Any, v: Any, *, state: Any) -> tuple[Any, Any]:
        shared = {"enable_gqa": True} if k.shape[2] != q.shape[2] else {}
        heads_first = (x.transpose(1, 2) for x in (q, *state))
        return attend(*heads_first, **shared).transpose(1, 2), state

    return call


def fla(package: str, name: str, **keywords: Any) -> Function:
    """A function of `fla.ops`, which takes log decays as g."""
    function = getattr(importlib.import_module(f"fla.ops.{package}"), name)

    def call(q: Any, k: Any, v: Any, g: Any, *beta: Any, state: Any = None) -> tuple[Any, Any]:
        given = {"q": q, "k": k, "v": v, "g": g} | keywords
        if beta:
            given["beta"] = beta[0]
        if state is not None:
            given |= {"initial_state": state[0], "output_final_state": True}
        out, after = function(**given)
        return out, [after]

    return call


def measure_torch(torch: Any, work: Work, options: LoopOptions, function: Function, device: str) -> Measurement:
    """Checks and times a function of torch on the arguments that jaxmix gets."""
    cuda = device == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    sets = [_pass(torch, work, function, _tensors(torch, work, 0, device))]
    results = sets[0]()
    peak = torch.cuda.max_memory_allocated() if cuda else None
    error = check(work, {name: _numpy(x) for name, x in results.items()})
    del results
    single = min(_run(torch, sets, 1, cuda) for _ in range(3))
    if single > options.longest:
        raise TooLong(f"one call takes {single:.2g} s, more than {options.longest:g} s")
    for seed in range(1, count_sets(cost(work.mixer, work.shape, work.part).nbytes)):
        sets.append(_pass(torch, work, function, _tensors(torch, work, seed, device)))
    calls = int(min(max(options.seconds / single, len(sets)), options.most_calls))
    _run(torch, sets, calls, cuda)
    seconds = [_run(torch, sets, calls, cuda) for _ in range(options.runs)]
    return Measurement(to_timing(seconds), error, peak, calls, ("CUDA events",) if cuda else ())


def _pass(
    torch: Any, work: Work, function: Function, given: tuple[Any, list[Any], Any]
) -> Callable[[], dict[str, Any]]:
    """One call of the pass, with its own arguments."""
    state, arrays, cotangent = given
    names = MIXERS[work.mixer].arguments
    if work.part in ("forward", "decode"):
        carried = {"state": state}

        def forward() -> dict[str, Any]:
            with torch.no_grad():
                out, carried["state"] = function(*arrays, state=carried["state"])
            return {"out": out}

        return forward
    arrays = [x.requires_grad_() for x in arrays]

    def both() -> dict[str, Any]:
        out, _ = function(*arrays)
        return {"out": out.detach()} | dict(zip(names, torch.autograd.grad(out, arrays, cotangent), strict=True))

    if work.part == "forward+backward":
        return both
    kept, _ = function(*arrays)

    def backward() -> dict[str, Any]:
        return dict(zip(names, torch.autograd.grad(kept, arrays, cotangent, retain_graph=True), strict=True))

    return backward


def _tensors(torch: Any, work: Work, seed: int, device: str) -> tuple[Any, list[Any], Any]:
    """State, arguments and gradient of the output as tensors of their own, the same numbers as jaxmix gets."""

    def move(x: Any) -> Any:
        wide = torch.from_numpy(np.array(x.astype(jnp.float32)))
        return wide.to(device=device, dtype=torch.bfloat16 if x.dtype == jnp.bfloat16 else torch.float32)

    arrays = work.arrays(seed)
    if work.part != "decode":
        needed = work.part != "forward"
        return None, [move(x) for x in arrays], move(work.cotangent(seed)) if needed else None
    state = work.state(seed)
    if work.mixer == "softmax_attention":
        _, k, v = arrays
        return [move(state.k.at[:, -1].set(k[:, 0])), move(state.v.at[:, -1].set(v[:, 0]))], [*map(move, arrays)], None
    matrix = state.S if work.mixer == "gated_delta_rule" else state.P
    return [move(matrix)], [*map(move, arrays)], None


def _numpy(x: Any) -> np.ndarray:
    """The last sequence or stream, which is compared, as float32."""
    return x[-1:].detach().float().cpu().numpy()


def _run(torch: Any, sets: list[Callable[[], Any]], calls: int, cuda: bool) -> float:
    """Seconds of one call, of `calls` in a row."""
    if not cuda:
        start = time.perf_counter()
        for i in range(calls):
            sets[i % len(sets)]()
        return (time.perf_counter() - start) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for i in range(calls):
        sets[i % len(sets)]()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls
