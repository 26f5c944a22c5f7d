"""NAtS-L as a layer: a router sends every chunk, head by head, to softmax attention or to a linear state."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmix.arrays import Array, Dtype, check_choice, check_count, check_flag, expand_to, fail
from jaxmix.mixers.natsl import ChunkLayout, NAtSLState, count_chunks, natsl_attention
from jaxmix.mixers.segments import Segments, find_segments
from jaxmix.mixers.state import State
from jaxmix.nn.base import TokenMixer
from jaxmix.nn.config import QueryKeyConfig
from jaxmix.nn.convolution import convolve_streams
from jaxmix.nn.decay import StepSize
from jaxmix.nn.delta import delta_products
from jaxmix.nn.norms import RMSNorm, l2_normalize
from jaxmix.nn.parameters import projection
from jaxmix.nn.rope import rotate


@dataclasses.dataclass(frozen=True, kw_only=True)
class NAtSLConfig(QueryKeyConfig):
    """Configuration of `NAtSL`; the defaults are the layer of the paper's hybrid model.

    `heads` counts linear heads H; `kv_heads`, `qk_norm` and `output_norm` are not used.

    Attributes:
        group: softmax heads G of each linear head, whose channels they share: sizes D / G and E / G.
        rule: linear branch: "gated_delta", "delta" (no decay) or "ssd" (the core of Mamba-2).
        rope: rotate queries and keys of the softmax branch; off in the hybrid model, on in the pure one.
        chunk_size: tokens that are routed together.
        capacity: pages of a stream's cache, each for one chunk of one linear head. A stream that routes more to softmax
            attention is an error, and NaN in compiled code.
        own_chunk: which branches see the tokens of the own chunk: "both", "softmax" or "linear".
        decay_through_softmax: see `jaxmix.natsl_attention`.
        counterfactual_router_grad: see `jaxmix.natsl_attention`.
        detach_own_chunk: see `jaxmix.natsl_attention`.
        branch_norm: RMSNorm on the output of each branch.
        fusion: what the weights of the branches are made of: "queries", "input", or None for one half each.
        max_documents: see `jaxmix.mixers.natsl.count_chunks`.
    """

    name: ClassVar[str] = "natsl"
    has_cache: ClassVar[bool] = True
    group: int = 2
    rule: Literal["gated_delta", "delta", "ssd"] = "gated_delta"
    conv_width: int = 4
    gate: bool = True
    chunk_size: int = 64
    capacity: int = 512
    own_chunk: Literal["both", "softmax", "linear"] = "both"
    decay_through_softmax: bool = True
    counterfactual_router_grad: bool = False
    detach_own_chunk: bool = False
    branch_norm: bool = True
    fusion: Literal["queries", "input"] | None = "queries"
    max_documents: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, default in (("kv_heads", None), ("qk_norm", None), ("output_norm", False)):
            if getattr(self, name) != default:
                fail(name, f"{default!r}, which has no meaning in this layer", repr(getattr(self, name)))
        check_choice("rule", self.rule, ("gated_delta", "delta", "ssd"))
        check_choice("own_chunk", self.own_chunk, ("both", "softmax", "linear"))
        check_choice("fusion", self.fusion, (None, "queries", "input"))
        for name in ("group", "chunk_size", "capacity"):
            check_count(name, getattr(self, name))
        if self.max_documents is not None:
            check_count("max_documents", self.max_documents)
        for name in ("decay_through_softmax", "counterfactual_router_grad", "detach_own_chunk", "branch_norm"):
            check_flag(name, getattr(self, name))

    def head_sizes(self, d_model: int) -> tuple[int, int]:
        """Key size D and value size E of a linear head, multiples of `group`."""
        if self.rope:
            keys, _ = dataclasses.replace(self, rope=False).head_sizes(d_model)
            self.rotated_size(keys // self.group)
            return dataclasses.replace(self, rope=False).head_sizes(d_model)
        keys, values = super().head_sizes(d_model)
        for name, size in (("key_size", keys), ("value_size", values)):
            if size % self.group:
                fail(name, f"a multiple of group={self.group}", size)
        return keys, values

    def mixer_products(self, d_model: int, length: int) -> int:
        """The linear branch as in Gated DeltaNet, and softmax attention to half of the earlier tokens.

        How many chunks softmax attention keeps is the router's choice.
        """
        keys, values = self.head_sizes(d_model)
        linear = delta_products(keys, values, self.chunk_size)
        return self.heads * (linear + (keys + values) * (self.chunk_size + length // 4))

    @property
    def layer(self) -> type[TokenMixer]:
        """`NAtSL`."""
        return NAtSL


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoutedState(State):
    """The state of `natsl_attention`, and what the router has seen of the open chunk.

    Attributes:
        attention: the mixer's state.
        router: sum of the layer's inputs over the open chunk, [B, d] float32.
    """

    attention: NAtSLState
    router: Array


class NAtSL(TokenMixer):
    """Routed softmax and linear attention, `NAtSL(d_model, heads=H, group=G, ..., rngs=rngs)`.

        q, k, v = SiLU(conv(x Wq)), SiLU(conv(x Wk)), SiLU(conv(x Wv))       for both branches
        choice  = argmax over (softmax, linear) of mean_chunk(x) Wr          a chunk and linear head; float32
        o       = natsl_attention(unit q, unit k, v, ..., RMSNorm(q), RMSNorm(k), v, choice)
        w       = softmax over (linear, softmax) of q Wf                     a token and softmax head; float32
        y       = (SiLU(x Wg) * sum_branches w RMSNorm(o)) Wo

    The choice is straight-through: its gradient is that of the softmax over the router's logits. See `MixerLayer` for
    the arguments and `NAtSLConfig` for the options.

    Source: Deng et al., "Neural Attention Search Linear", arXiv 2602.03681.
    """

    config_class = NAtSLConfig

    def __init__(
        self,
        d_model: int,
        config: Any = None,
        *,
        rngs: nnx.Rngs,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        init_std: float = 0.02,
        **arguments: Any,
    ):
        shared: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        super().__init__(d_model, config, rngs=rngs, init_std=init_std, **shared, **arguments)
        config, wide = self.config, self.state_dtype
        heads, softmax_heads = config.heads, config.heads * config.group
        self.softmax_key_size, self.softmax_value_size = self.key_size // config.group, self.value_size // config.group
        gates: dict[str, Any] = {"std": init_std, "dtype": wide, "rngs": rngs}
        self.router = projection(d_model, 2 * heads, param_dtype=wide, **gates)
        fused = {"queries": heads * self.key_size, "input": d_model, None: 0}[config.fusion]
        self.fusion = projection(fused, 2 * softmax_heads, param_dtype=param_dtype, **gates) if fused else None
        self.beta = projection(d_model, heads, param_dtype=wide, **gates) if config.rule != "ssd" else None
        self.decay = _step_size(config.rule, d_model, heads, rngs=rngs, init_std=init_std, dtype=wide)
        norm = {"eps": config.norm_eps, "dtype": self.dtype, "param_dtype": param_dtype}
        self.softmax_query_norm = RMSNorm(self.softmax_key_size, **norm)
        self.softmax_key_norm = RMSNorm(self.softmax_key_size, **norm)
        branch = [RMSNorm(self.softmax_value_size, **norm) if config.branch_norm else None for _ in range(2)]
        self.linear_norm, self.softmax_norm = branch

    def project(
        self, x: Array, segments: Segments | None, tails: tuple[Array, ...], positions: Array
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Queries and keys of the linear branch, values, queries and keys of the softmax branch, flat queries."""
        config = self.config
        streams = [self.query(x), self.key(x), self.value(x)]
        if self.convolutions:
            kernels = [convolution.kernel[...] for convolution in self.convolutions]
            ys, tails = zip(*convolve_streams(streams, kernels, tails, segments), strict=True)
            streams = [jax.nn.silu(y) for y in ys]
        q, k, v = streams
        linear = (l2_normalize(self._heads(y, config.heads), config.norm_eps) for y in (q, k))
        normed = []
        for y, norm in ((q, self.softmax_query_norm), (k, self.softmax_key_norm)):
            y = norm(self._heads(y, config.heads * config.group))
            if config.rope:
                size = config.rotated_size(self.softmax_key_size)
                y = jnp.concatenate([rotate(y[..., :size], positions, config.rope_base), y[..., size:]], axis=-1)
            normed.append(y)
        return (*linear, self._heads(v, config.heads), *normed, q), tails

    def _heads(self, x: Array, heads: int) -> Array:
        return x.reshape(*x.shape[:2], heads, -1)

    def mix(
        self, streams: tuple[Array, ...], x: Array, segment_ids: Array | None, state: RoutedState | None
    ) -> tuple[Array, RoutedState]:
        """Routes, attends in both branches, and fuses them."""
        config = self.config
        q, k, v, q_softmax, k_softmax, flat = streams
        choice, seen = self.route(x, segment_ids, state)
        log_decay, written = None, v
        if self.decay is not None:
            step = self.decay(x)
            log_decay = -self.decay.rates() * step
            if config.rule == "ssd":
                written = (step[..., None] * v).astype(v.dtype)
        (linear, softmax), attention = natsl_attention(
            q,
            k,
            written,
            log_decay,
            None if self.beta is None else jax.nn.sigmoid(self.beta(x)),
            q_softmax,
            k_softmax,
            self._heads(v, config.heads * config.group),
            choice,
            rule="ssd" if config.rule == "ssd" else "gated_delta",
            scale=config.scale,
            own_chunk=config.own_chunk,
            decay_through_softmax=config.decay_through_softmax,
            counterfactual_router_grad=config.counterfactual_router_grad,
            detach_own_chunk=config.detach_own_chunk,
            segment_ids=segment_ids,
            initial_state=None if state is None else state.attention,
            implementation=config.implementation,
            chunk_size=config.chunk_size,
            capacity=config.capacity,
            max_documents=config.max_documents,
        )
        branches = [linear.reshape(softmax.shape), softmax]
        if self.linear_norm is not None and self.softmax_norm is not None:
            branches = [self.linear_norm(branches[0]), self.softmax_norm(branches[1])]
        weights = jnp.full((*softmax.shape[:3], 2), 0.5, self.state_dtype)
        if self.fusion is not None:
            logits = self.fusion(flat if config.fusion == "queries" else x)
            weights = jax.nn.softmax(logits.reshape(weights.shape), axis=-1)
        out = weights[..., :1] * branches[0] + weights[..., 1:] * branches[1]
        return out.astype(self.dtype), RoutedState(attention, seen)

    def route(self, x: Array, segment_ids: Array | None, state: RoutedState | None) -> tuple[Array, Array]:
        """The choice for every chunk, [B, N, H, 2], and the sum of inputs over the chunk that is then open, [B, d].

        `x` [B, T, d] is the layer's input, cleared at padding.
        """
        config = self.config
        batch, length, _ = x.shape
        segments = None if segment_ids is None else find_segments(segment_ids)
        wide = x.astype(self.state_dtype)
        if length == 1:
            sums, seen = self._route_token(wide[:, 0], segments, state)
        else:
            counted = {"packed": segments is not None, "continued": state is not None}
            chunks = count_chunks(length, config.chunk_size, max_documents=config.max_documents, **counted)
            filled = None if state is None else state.attention.filled
            layout = ChunkLayout.of(batch, length, config.chunk_size, chunks, segments, filled)
            sums = jnp.zeros((batch, chunks, wide.shape[-1]), wide.dtype)
            sums = sums.at[jnp.arange(batch)[:, None], layout.chunk].add(wide, mode="drop")
            if state is not None:
                sums = sums.at[:, 0].add(state.router)
            at = layout.last[:, None, None]
            closed = jnp.take_along_axis(layout.complete, layout.last[:, None], axis=1)
            seen = jnp.where(closed, 0, jnp.take_along_axis(sums, at, axis=1)[:, 0])
        logits = self.router(sums / config.chunk_size).reshape(batch, -1, config.heads, 2)
        p = jax.nn.softmax(logits, axis=-1)
        hard = jax.nn.one_hot(jnp.argmax(logits, axis=-1), 2, dtype=p.dtype)
        # In this order the value is exactly 0 or 1.
        return hard + (p - jax.lax.stop_gradient(p)), seen

    def _route_token(self, x: Array, segments: Segments | None, state: RoutedState | None) -> tuple[Array, Array]:
        """Sums [B, 1, d] for the chunk that one token x [B, d] may complete, and what is open after it."""
        before = jnp.zeros_like(x) if state is None else state.router
        filled = jnp.zeros(x.shape[:1], jnp.int32) if state is None else state.attention.filled
        valid = jnp.ones(x.shape[:1], jnp.bool_) if segments is None else segments.valid[:, 0]
        if segments is not None:
            reset = segments.reset[:, 0]
            before, filled = jnp.where(expand_to(reset, 2), 0, before), jnp.where(reset, 0, filled)
        sums = before + x
        full = valid & (filled + 1 == self.config.chunk_size)
        return sums[:, None], jnp.where(expand_to(full, 2), 0, sums)

    def init_mixer(self, batch_size: int) -> RoutedState:
        """The mixer's state of streams that have seen nothing."""
        config = self.config
        attention = NAtSLState.init(
            batch_size,
            config.heads,
            self.key_size,
            self.value_size,
            softmax_heads=config.heads * config.group,
            softmax_key_size=self.softmax_key_size,
            softmax_value_size=self.softmax_value_size,
            chunk_size=config.chunk_size,
            capacity=config.capacity,
            dtype=self.state_dtype,
            cache_dtype=self.dtype,
        )
        return RoutedState(attention, jnp.zeros((batch_size, self.d_model), self.state_dtype))


def _step_size(rule: str, d_model: int, heads: int, **options: Any) -> StepSize | None:
    """The decay of the linear branch; that of "ssd" starts as in the reference, which is not as `Mamba2` starts."""
    if rule == "delta":
        return None
    step = StepSize(d_model, heads, (0.0, 16.0), **options)
    if rule == "ssd":
        step.A_log[...] = jnp.log(jnp.arange(1, heads + 1, dtype=options["dtype"]))
        step.dt_bias[...] = jnp.ones((heads,), options["dtype"])
    return step
