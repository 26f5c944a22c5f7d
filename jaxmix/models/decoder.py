"""A Llama-style decoder whose token mixers are chosen layer by layer."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmix.arrays import Array, check_array, compute_dtype, fail
from jaxmix.mixers.segments import check_segment_ids
from jaxmix.models.config import DecoderConfig, group_layers
from jaxmix.nn.config import MixerConfig
from jaxmix.nn.layer import LayerState, check_like
from jaxmix.nn.mlp import SwiGLU
from jaxmix.nn.norms import RMSNorm
from jaxmix.nn.parameters import partitioned, projection


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecoderState:
    """What a decoder remembers of a stream.

    Attributes:
        groups: for every group of equal units of layers, the `LayerState` of each layer of the unit, with a leading
            axis over the units: arrays [units, B, ...].
    """

    groups: tuple[tuple[LayerState, ...], ...]

    def reset(self, where: Array) -> "DecoderState":
        """The state with the streams selected by `where` (bool, [B]) started anew."""
        return DecoderState(
            tuple(tuple(jax.vmap(lambda unit: unit.reset(where))(layer) for layer in group) for group in self.groups)
        )


class Block(nnx.Module):
    """x + mixer(RMSNorm(x)), then x + SwiGLU(RMSNorm(x)) unless its hidden size is 0."""

    def __init__(self, mixer: MixerConfig, config: DecoderConfig, *, rngs: nnx.Rngs):
        dtypes: dict[str, Any] = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        init: dict[str, Any] = {
            "init_std": config.init_std,
            "out_init_std": config.init_std / (2 * len(config.layers)) ** 0.5,
        }
        norm = {"eps": config.norm_eps, "axis": "embed", **dtypes}
        self.mixer_norm = RMSNorm(config.d_model, **norm)
        self.mixer = mixer.build(config.d_model, rngs=rngs, **init, **dtypes)
        self.mlp_norm = RMSNorm(config.d_model, **norm) if config.hidden else None
        self.mlp = SwiGLU(config.d_model, config.hidden, rngs=rngs, **init, **dtypes) if config.hidden else None

    def __call__(
        self, x: Array, segment_ids: Array | None, positions: Array | None, state: LayerState | None
    ) -> tuple[Array, LayerState]:
        """Maps x [B, T, d]; see `MixerLayer` for the arguments."""
        y, state = self.mixer(self.mixer_norm(x), segment_ids=segment_ids, positions=positions, state=state)
        x = x + y
        if self.mlp_norm is None or self.mlp is None:
            return x, state
        return x + self.mlp(self.mlp_norm(x)), state


class Unit(nnx.Module):
    """Consecutive blocks, the body of one step of the scan over layers."""

    def __init__(self, mixers: tuple[MixerConfig, ...], config: DecoderConfig, *, rngs: nnx.Rngs):
        self.blocks = nnx.List(Block(mixer, config, rngs=rngs) for mixer in mixers)

    def __call__(
        self, x: Array, segment_ids: Array | None, positions: Array | None, states: tuple[LayerState, ...] | None
    ) -> tuple[Array, tuple[LayerState, ...]]:
        """Maps x [B, T, d] through the blocks."""
        new = []
        for i, block in enumerate(self.blocks):
            x, state = block(x, segment_ids, positions, None if states is None else states[i])
            new.append(state)
        return x, tuple(new)


class Decoder(nnx.Module):
    """Token ids to next-token logits: embedding, pre-norm blocks, final RMSNorm, output map.

    Equal units of layers share one compiled body: their parameters are stacked along a leading axis, and
    `jax.lax.scan` runs over it. The module holds no state of any stream.

    Args:
        config: sizes, mixers and dtypes.
        rngs: source of the initial values.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        if not isinstance(config, DecoderConfig):
            fail("config", "a DecoderConfig", type(config).__name__)
        self.config = config
        dtypes: dict[str, Any] = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        embedding_init = jax.nn.initializers.normal(config.init_std)
        table = embedding_init(rngs.params(), (config.vocab_size, config.d_model), jnp.dtype(config.param_dtype))
        self.embedding = nnx.Param(table, **partitioned("vocab", "embed"))
        self.groups = nnx.List(
            _stack_units(unit, config, repeats, rngs) for unit, repeats in group_layers(config.layers)
        )
        self.norm = RMSNorm(config.d_model, eps=config.norm_eps, axis="embed", **dtypes)
        head = {"std": config.init_std, "axes": ("embed", "vocab"), "rngs": rngs, **dtypes}
        self.head = None if config.tie_embeddings else projection(config.d_model, config.vocab_size, **head)

    def __call__(
        self,
        tokens: Array,
        *,
        segment_ids: Array | None = None,
        positions: Array | None = None,
        state: DecoderState | None = None,
    ) -> tuple[Array, DecoderState]:
        """Logits of the token after each token.

        Args:
            tokens: token ids, int32 [B, T].
            segment_ids: int32 [B, T], 0 = padding, which changes nothing; a new id starts a new document.
            positions: int32 [B, T]; by default places in the document, counted on from `state`.
            state: state that the first document continues; that of new streams by default.

        Returns:
            Logits [B, T, V] float32 (float64 for a float64 model), zeros at padding, and the state after the last
            token.

        Raises:
            ValueError: for arrays of a wrong shape or dtype, or a state of another model.
        """
        check_array("tokens", tokens, "[B, T]", (None, None), ("int32",))
        if state is not None:
            check_like("state", state, jax.eval_shape(lambda: self.init_state(tokens.shape[0])))
        # An id outside the vocabulary gives NaN instead of some other token's row.
        x = self.embedding[...].at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        x = x.astype(self.config.dtype)
        if segment_ids is not None:
            check_segment_ids(segment_ids, *tokens.shape)
            x = jnp.where((segment_ids != 0)[..., None], x, 0)
        states = []
        for i, group in enumerate(self.groups):
            x, new = self._run_group(group, x, segment_ids, positions, None if state is None else state.groups[i])
            states.append(new)
        return self._logits(self.norm(x)), DecoderState(tuple(states))

    def init_state(self, batch_size: int) -> DecoderState:
        """The state of `batch_size` streams that have seen nothing."""
        states = []
        for group, (_, repeats) in zip(self.groups, group_layers(self.config.layers), strict=True):
            unit = tuple(block.mixer.init_state(batch_size) for block in group.blocks)
            states.append(jax.tree.map(functools.partial(_repeat, times=repeats), unit))
        return DecoderState(tuple(states))

    def _run_group(
        self, group: Unit, x: Array, segment_ids: Array | None, positions: Array | None, states: Any
    ) -> tuple[Array, tuple[LayerState, ...]]:
        """All units of one group, by a scan over their stacked parameters and states."""
        definition, parameters = nnx.split(group)

        def run_unit(x: Array, inputs: Any) -> tuple[Array, tuple[LayerState, ...]]:
            parameters, states = inputs
            return nnx.merge(definition, parameters)(x, segment_ids, positions, states)

        if self.config.remat != "none":
            policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if self.config.remat == "dots" else None
            run_unit = jax.checkpoint(run_unit, policy=policy, prevent_cse=False)
        return jax.lax.scan(run_unit, x, (parameters, states))

    def _logits(self, x: Array) -> Array:
        kernel = self.embedding[...].T if self.head is None else self.head.kernel[...]
        return jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=compute_dtype(x))


def _repeat(x: Array, *, times: int) -> Array:
    return jnp.broadcast_to(x, (times, *x.shape))


def _stack_units(unit: tuple[MixerConfig, ...], config: DecoderConfig, repeats: int, rngs: nnx.Rngs) -> Unit:
    """`repeats` units with parameters of their own, stacked along a new first axis named "layers"."""

    @functools.partial(nnx.vmap, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def make(key: Array) -> Unit:
        return Unit(unit, config, rngs=nnx.Rngs(key))

    return make(jax.random.split(rngs.params(), repeats))
