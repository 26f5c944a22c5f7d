"""What every mixer layer does around its streams: checks, padding, positions, states, norm, gate and output."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmix.arrays import INPUT_DTYPES, Array, Dtype, check_array, check_count, fail
from jaxmix.mixers.positions import find_places
from jaxmix.mixers.segments import Segments, check_segment_ids, find_segments, where_valid
from jaxmix.mixers.state import State
from jaxmix.nn.config import MixerConfig
from jaxmix.nn.norms import RMSNorm
from jaxmix.nn.parameters import projection


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerState(State):
    """Everything a mixer layer remembers of a stream.

    Attributes:
        mixer: state of the mixer function.
        convolutions: for every stream that has a short convolution, its last W - 1 inputs, [B, W-1, channels].
        position: position of the next token in its segment, int32 [B].
    """

    mixer: Any
    convolutions: tuple[Array, ...]
    position: Array


class MixerLayer(nnx.Module):
    """Base of the mixer layers: x -> streams -> mixer -> y.

        y = (SiLU(x Wg) * RMSNorm(mixer(streams of x))) Wo         gate and norm where configured

    A subclass sets `config_class` and defines `project`, `mix` and `init_mixer`. Layers hold parameters and nothing
    that changes: what a stream remembers goes in and comes out as a `LayerState`.

    Args:
        d_model: width d of input and output.
        config: the layer's configuration; or give its fields as keywords, as in `HLA(256, heads=4, order=2, ...)`.
        rngs: source of the initial values.
        dtype: compute dtype and dtype of the output; `param_dtype` by default. States and gates are float32 or better.
        param_dtype: dtype of the parameters; gate parameters are float32 or better.
        init_std: standard deviation of the initial projections.
        out_init_std: that of the output projection; `init_std` by default.
        **options: fields of the configuration, when `config` is not given.

    Raises:
        ValueError: for options that are wrong by themselves, together, or for this `d_model`.
    """

    config_class: ClassVar[type[MixerConfig]]
    convolutions: nnx.List

    def __init__(
        self,
        d_model: int,
        config: Any = None,
        *,
        rngs: nnx.Rngs,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        init_std: float = 0.02,
        out_init_std: float | None = None,
        **options: Any,
    ):
        check_count("d_model", d_model)
        config = self._checked_config(config, options)
        self.config = config
        self.d_model = d_model
        self.dtype = jnp.dtype(param_dtype if dtype is None else dtype)
        self.key_size, self.value_size = config.head_sizes(d_model)
        shared = {"dtype": self.dtype, "param_dtype": param_dtype, "rngs": rngs}
        outputs = config.heads * self.output_size
        self.gate = projection(d_model, outputs, std=init_std, **shared) if config.gate else None
        out_init_std = init_std if out_init_std is None else out_init_std
        self.out = projection(outputs, d_model, std=out_init_std, axes=("heads", "embed"), **shared)
        norm = {"eps": config.norm_eps, "dtype": self.dtype, "param_dtype": param_dtype}
        self.out_norm = self.make_norm(norm) if config.output_norm else None

    @property
    def output_size(self) -> int:
        """Channels that the mixer gives per head."""
        return self.value_size

    def make_norm(self, options: dict[str, Any]) -> Any:
        """The norm of the heads' outputs."""
        return RMSNorm(self.output_size, **options)

    def _checked_config(self, config: Any, options: dict[str, Any]) -> Any:
        if config is None:
            return self.config_class.from_fields(options)
        if options:
            fail("options", "either a config or its fields", f"both, with {', '.join(options)}")
        if type(config) is not self.config_class:
            fail("config", f"a {self.config_class.__name__}", type(config).__name__)
        return config

    @property
    def state_dtype(self) -> Dtype:
        """The dtype of states and gates: float32, or float64 where the layer computes in float64."""
        return jnp.promote_types(self.dtype, jnp.float32)

    def project(
        self, x: Array, segments: Segments | None, tails: tuple[Array, ...], positions: Array
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """The mixer's inputs by head, [B, T, heads, size], and the convolutions' new states."""
        raise NotImplementedError

    def mix(self, streams: tuple[Array, ...], x: Array, segment_ids: Array | None, state: Any) -> tuple[Array, Any]:
        """Calls the mixer function; `x` [B, T, d] is the layer's input, cleared at padding, for gates."""
        raise NotImplementedError

    def init_mixer(self, batch_size: int) -> State:
        """The mixer's state of streams that have seen nothing."""
        raise NotImplementedError

    def init_state(self, batch_size: int) -> LayerState:
        """The state of `batch_size` streams that have seen nothing."""
        check_count("batch_size", batch_size)
        return LayerState(
            mixer=self.init_mixer(batch_size),
            convolutions=tuple(conv.init_state(batch_size, self.state_dtype) for conv in self.convolutions),
            position=jnp.zeros((batch_size,), jnp.int32),
        )

    def __call__(
        self,
        x: Array,
        *,
        segment_ids: Array | None = None,
        positions: Array | None = None,
        state: LayerState | None = None,
    ) -> tuple[Array, LayerState]:
        """Mixes the tokens of every segment.

        Args:
            x: [B, T, d].
            segment_ids: int32 [B, T], 0 = padding, which changes nothing; a new id starts a new segment.
            positions: int32 [B, T] for the rotary embedding; by default the place in the segment, counted on from
                `state`.
            state: state that the first segment continues; that of a new stream by default.

        Returns:
            y [B, T, d] in the layer's dtype, zeros at padding, and the state after the last token.

        Raises:
            ValueError: for arrays of a wrong shape or dtype, or a state of another layer.
        """
        check_array("x", x, "[B, T, d]", (None, None, self.d_model), INPUT_DTYPES)
        batch, length, _ = x.shape
        segments = None
        if segment_ids is not None:
            check_segment_ids(segment_ids, batch, length)
            segments = find_segments(segment_ids)
        if state is not None:
            check_like("state", state, jax.eval_shape(lambda: self.init_state(batch)))
        x = where_valid(segments, jnp.asarray(x)).astype(self.dtype)
        before = self.init_state(batch) if state is None else state
        if positions is not None:
            check_array("positions", positions, "[B, T]", (batch, length), ("int32",))
        positions, position = _find_positions(segments, positions, before.position, length)
        streams, tails = self.project(x, segments, before.convolutions, positions)
        out, mixer = self.mix(streams, x, segment_ids, None if state is None else state.mixer)
        return self.finish(out, x), LayerState(mixer, tails, position)

    def gates(self, x: Array) -> Array:
        """What a gate's projection becomes."""
        return jax.nn.sigmoid(x) if self.config.gate_activation == "sigmoid" else jax.nn.silu(x)

    def finish(self, out: Array, x: Array) -> Array:
        """Normalises and gates the heads' outputs [B, T, H, E] and maps them to the model's width."""
        if self.out_norm is not None:
            out = self.out_norm(out)
        out = out.reshape(*out.shape[:2], -1)
        if self.gate is not None:
            out = out * self.gates(self.gate(x))
        return self.out(out)


def _find_positions(
    segments: Segments | None, positions: Array | None, start: Array, length: int
) -> tuple[Array, Array]:
    """The position of every token [B, T], and that of the next token [B]."""
    if segments is None:
        positions = start[:, None] + jnp.arange(length, dtype=jnp.int32) if positions is None else positions
        return positions, positions[:, -1] + 1
    positions = find_places(segments, start) if positions is None else positions
    last = jnp.max(jnp.where(segments.valid, jnp.arange(length), -1), axis=1)
    after = jnp.take_along_axis(positions, jnp.maximum(last, 0)[:, None], axis=1)[:, 0] + 1
    return positions, jnp.where(last < 0, start, after)


def check_like(argument: str, got: Any, expected: Any) -> None:
    """Check that a state has the types, shapes and dtypes of `expected`, a state of `jax.ShapeDtypeStruct`s.

    Raises:
        ValueError: when it is the state of another layer or model, batch, size or dtype.
    """
    leaves, structure = jax.tree.flatten_with_path(got)
    wanted, wanted_structure = jax.tree.flatten(expected)
    if structure != wanted_structure:
        fail(argument, f"the structure that init_state gives, {wanted_structure}", structure)
    for (path, leaf), want in zip(leaves, wanted, strict=True):
        if jnp.shape(leaf) != want.shape or jnp.result_type(leaf) != want.dtype:
            came = f"{jnp.result_type(leaf)} {list(jnp.shape(leaf))}"
            fail(f"{argument}{jax.tree_util.keystr(path)}", f"{want.dtype} {list(want.shape)}", came)
