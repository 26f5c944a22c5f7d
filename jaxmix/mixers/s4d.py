"""S4D: a diagonal state-space recurrence, the same for all channels of a head."""

import dataclasses
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxmix.arrays import (
    GATE_DTYPES,
    INPUT_DTYPES,
    Array,
    Dtype,
    check_array,
    check_choice,
    check_count,
    check_sizes,
    compute_dtype,
    einsum,
    fail,
    from_numpy,
)
from jaxmix.mixers import pairs
from jaxmix.mixers.diagonal import DiagonalChunks, DiagonalSummary
from jaxmix.mixers.dispatch import IMPLEMENTATIONS, choose
from jaxmix.mixers.inputs import Inputs, Sizes
from jaxmix.mixers.modes import Discretization, Modes, check_modes, discretize
from jaxmix.mixers.recurrence import Recurrence, run_checked
from jaxmix.mixers.s4d_fft import s4d_fft
from jaxmix.mixers.segments import check_segment_ids
from jaxmix.mixers.state import RecurrentState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class S4DState(RecurrentState):
    """X [B, H, 2, M, E]: for each of M modes the decayed and rotated sum of all inputs, real and imaginary parts."""

    axes = ("2ME",)
    X: Array

    @classmethod
    def init(cls, batch: int, heads: int, modes: int, value_size: int, *, dtype: Dtype = jnp.float32) -> Self:
        """The state of streams that have seen nothing."""
        return cls.zeros(batch, heads, None, {"M": modes, "E": value_size}, dtype)


@dataclasses.dataclass(frozen=True)
class _S4D(Recurrence):
    name = "s4d"
    state = S4DState
    summary = DiagonalSummary
    normalizes = False
    time_invariant = True
    modes: int
    discretization: Discretization
    system: Any = None
    """The `Modes`."""
    readout: Any = None
    """C [G, 2, M] with the imaginary part negative, so that Re(C X) is a sum of products."""

    def bind(self, parameters: Any) -> Self:
        A, delta, C = parameters
        return dataclasses.replace(self, system=discretize(A, delta, self.discretization), readout=pairs.conjugate(C))

    def zero_state(self, sizes: Sizes) -> S4DState:
        return S4DState.init(sizes.batch, sizes.heads, self.modes, sizes.value_size, dtype=sizes.dtype)

    def step(self, state: Any, q: Any, k: Any, v: Array, a: Array) -> tuple[Any, Any]:
        old, lam = state.X[:, :, 0], self.system.powers(jnp.asarray(1))
        new = pairs.scale_rows(lam, old) + self.system.gain[..., None] * v[:, :, None, None, :]
        return S4DState(new[:, :, None]), (einsum("gpm,bgpme->bge", self.readout, new)[:, :, None], None)

    def cut(self, inputs: Inputs, size: int, sequence_axis: str | None) -> DiagonalChunks:
        return DiagonalChunks.cut(self.system, inputs.segments, inputs.v.shape[1], size, sequence_axis)

    def chunked(self, chunks: DiagonalChunks, q: Any, k: Any, v: Array, state: Any) -> tuple[Array, Any]:
        v = chunks.pack(v)
        kernel = einsum("gpm,gcpm->gc", self.readout, chunks.responses)
        weights = chunks.toeplitz(kernel)
        before, final = chunks.carry(chunks.outer(v), state.X[:, :, 0])
        reach = pairs.conjugate(pairs.multiply(pairs.conjugate(self.readout)[:, None], chunks.reach))
        carried = chunks.from_start(einsum("gcpm,bngpme->bngce", reach, before))
        if chunks.run is None:
            out = einsum("gts,bngse->bngte", weights, v) + carried
        else:
            weights = chunks.causal(jnp.broadcast_to(weights, (*v.shape[:3], *weights.shape[1:])))
            out = einsum("bngts,bngse->bngte", weights, v) + carried
        return chunks.unpack(out)[:, :, :, None], S4DState(final[:, :, None])

    def summarize(self, inputs: Inputs) -> DiagonalSummary:
        return summarize_tokens(self.system, inputs.v, inputs)

    def begin(self, state: Any, inputs: Inputs) -> DiagonalSummary:
        return begin_summary(state.X)

    def end(self, total: DiagonalSummary, inputs: Inputs) -> S4DState:
        return S4DState(total.X[:, 0])

    def read(self, state: DiagonalSummary, q: Any) -> Any:
        return einsum("gpm,btgrpme->btgre", self.readout, state.X), None


def summarize_tokens(system: Modes, z: Array, inputs: Inputs) -> DiagonalSummary:
    """The summaries of tokens z [B, T, G, F], [B, T, G, 1, ...], those of padding the identity."""
    lam = system.powers(jnp.asarray(1))[:, None]
    summaries = DiagonalSummary.token_summary(z[:, :, :, None], lam, system.gain[:, None])
    if inputs.segments is None:
        return summaries
    nothing = DiagonalSummary.identity((*z.shape[:3], 1), lam.shape[-1], z.shape[-1], z.dtype)
    valid = inputs.segments.valid
    return jax.tree.map(
        lambda x, none: jnp.where(valid.reshape(*valid.shape, *(1,) * (x.ndim - 2)), x, none), summaries, nothing
    )


def begin_summary(x: Array) -> DiagonalSummary:
    """The summary of all that came before a state x [B, G, 1, 2, M, F]."""
    batch, groups, repeats, _, modes, size = x.shape
    nothing = DiagonalSummary.identity((batch, 1, groups, repeats), modes, size, x.dtype)
    return dataclasses.replace(nothing, X=x[:, None])


def s4d(
    x: Array,
    A: Array,
    delta: Array,
    C: Array,
    D: Array | None = None,
    *,
    discretization: Discretization = "zoh",
    segment_ids: Array | None = None,
    initial_state: S4DState | None = None,
    implementation: Literal["serial", "scan", "fft", "pallas"] | None = None,
    chunk_size: int = 64,
    sequence_axis: str | None = None,
) -> tuple[Array, S4DState]:
    """Diagonal state-space model: y_t = Re(sum_m C_m X_t[m]) + D x_t with X_t = Lam X_{t-1} + Bbar x_t.

    All E channels of a head see the same kernel y_t = sum_{j<=t} Re(sum_m C_m Bbar_m Lam_m^(t-j)) x_j. There is no free
    B: C carries it. A model that keeps one pole of each conjugate pair has its factor 2 in C, too.

    Args:
        x: inputs, [B, T, H, E], bfloat16, float32 or float64. One channel a head (E = 1) is the classic S4D.
        A: continuous poles, [H, 2, M], real parts (below 0) and imaginary parts in radians per unit of time, float32.
        delta: step size of a token in units of time, above 0, float32, [H].
        C: readout, [H, 2, M], real and imaginary parts, float32.
        D: factor of the direct path, float32, [H]; None for none.
        discretization: "zoh" (inputs constant on a step) or "bilinear".
        segment_ids: int32 [B, T]; 0 is padding (output 0, no effect, and no time passes), a new id resets the state.
        initial_state: state of the tokens before the first; belongs to the first segment. None: nothing seen.
        implementation: "serial", "scan", "fft" (one long convolution; no segments, as the kernel must be the same
            everywhere), "pallas", or None for the fastest available.
        chunk_size: tokens per chunk of the scan form; 1 is the associative scan over single tokens.
        sequence_axis: shard_map axis over which T is split ("scan" only).

    Returns:
        y [B, T, H, E] in the dtype of x, and the final state.

    Raises:
        ValueError: for wrong shapes, dtypes, states or options.
        NotImplementedError: when `implementation` cannot serve the call.

    Source: Gu et al., "On the Parameterization and Initialization of Diagonal State Space Models", arXiv 2206.11893.
    """
    x, A, delta, C, D, segment_ids = map(from_numpy, (x, A, delta, C, D, segment_ids))
    form = choose("s4d", implementation, chunk_size, sequence_axis, implementations=(*IMPLEMENTATIONS, "fft")).form
    check_array("x", x, "[B, T, H, E]", (None,) * 4, INPUT_DTYPES)
    batch, length, heads, size = x.shape
    check_sizes("x", x, "BTHE")
    if segment_ids is not None:
        check_segment_ids(segment_ids, batch, length)
    _, modes = check_modes(A, delta, discretization)
    if A.shape[0] != heads:
        fail("A", f"{heads} heads (those of x)", f"shape {list(A.shape)}")
    check_array("C", C, "[H, 2, M]", (heads, 2, modes), GATE_DTYPES)
    if D is not None:
        check_array("D", D, "[H]", (heads,), GATE_DTYPES)
    sizes = Sizes(batch, length, heads, heads, 1, size, compute_dtype(x, A, delta, C, D))
    mixer = _S4D(modes, discretization)
    parameters = tuple(p.astype(sizes.dtype) for p in (A, delta, C))
    if form == "fft":
        if segment_ids is not None or sequence_axis is not None:
            which = "segment_ids" if segment_ids is not None else f"sequence_axis={sequence_axis!r}"
            raise NotImplementedError(f"s4d: the fft form cannot serve {which}; use implementation='scan'")
        y, state = s4d_fft(mixer, sizes, x, parameters, initial_state)
    else:
        arrays = (None, None, x, None, segment_ids, initial_state, parameters)
        y, state = run_checked(mixer, sizes, form, arrays, None, chunk_size, sequence_axis)
    if D is not None:
        # Cleared before the product: the gradient of D would be 0 times NaN.
        real = x if segment_ids is None else jnp.where((segment_ids != 0)[..., None, None], x, 0)
        y = y + (D.astype(sizes.dtype)[:, None] * real.astype(sizes.dtype)).astype(y.dtype)
    return y, state


def s4d_poles(modes: int, kind: Literal["inv", "lin", "legs"] = "inv") -> np.ndarray:
    """Initial poles A of one head, [2, M] float64: real parts -1/2, and imaginary parts by `kind`.

    "inv": (M / pi) (M / (2n + 1) - 1). "lin": pi n. "legs": those of the normal part of HiPPO-LegS with 2 M states,
    the positive ones, in ascending order. n = 0 ... M - 1.

    Raises:
        ValueError: for another kind, or no modes.

    Source: Gu et al., arXiv 2206.11893, section 4.
    """
    check_count("modes", modes)
    check_choice("kind", kind, ("inv", "lin", "legs"))
    n = np.arange(modes)
    if kind == "inv":
        imaginary = modes / np.pi * (modes / (2 * n + 1) - 1)
    elif kind == "lin":
        imaginary = np.pi * n
    else:
        root = np.sqrt(2 * np.arange(2 * modes) + 1)
        below = np.tril(root[:, None] * root[None, :], -1) / 2
        imaginary = np.sort(np.linalg.eigvalsh(1j * (below - below.T)))[modes:]
    return np.stack([np.full(modes, -0.5), imaginary])
