"""What the layers of linear attention and its higher orders share: a learned decay and a state of fixed size."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from flax import nnx

from jaxmix.arrays import Array, check_choice, check_count, check_flag, check_positive, fail
from jaxmix.mixers.state import State
from jaxmix.nn.base import TokenMixer
from jaxmix.nn.config import QueryKeyConfig
from jaxmix.nn.decay import DataDecay, HeadDecay


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentConfig(QueryKeyConfig):
    """Options of the recurrent layers beside those of `QueryKeyConfig`, whose defaults are set for them here.

    The mixers sum products of queries and keys that grow with the number of tokens and their degree. Unit queries and
    keys, a decay and a norm on the output keep a layer's output at one scale.

    Attributes:
        scale: factor on the queries; 1 by default with `qk_norm`, D^-1/2 without.
        decay: "head" learns one decay per head, "data" one that depends on the token too; None for no decay. See
            `jaxmix.nn.decay`.
        time_scales: shortest and longest initial time scale 1 / -log_decay in tokens, over which the heads are spread.
        shared_decay: one decay per key/value head instead of one per query head, so that the query heads of a group
            share the part of the state that depends on keys only.
        normalize: divide by the same sum over values of 1, plus `eps`. That denominator may be near zero or negative
            unless queries and keys are such that it cannot.
        eps: added to the denominator.
        chunk_size: tokens per chunk of the scan form.
    """

    qk_norm: Literal["l2", "rms"] | None = "l2"
    conv_width: int = 4
    output_norm: bool = True
    gate: bool = True
    decay: Literal["head", "data"] | None = "head"
    time_scales: tuple[float, float] = (8.0, 1024.0)
    shared_decay: bool = False
    normalize: bool = False
    eps: float = 1e-6
    chunk_size: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("decay", self.decay, (None, "head", "data"))
        check_flag("shared_decay", self.shared_decay)
        check_flag("normalize", self.normalize)
        check_positive("eps", self.eps)
        check_count("chunk_size", self.chunk_size)
        if not isinstance(self.time_scales, tuple | list) or len(self.time_scales) != 2:
            fail("time_scales", "two numbers, shortest and longest", repr(self.time_scales))
        for scale in self.time_scales:
            check_positive("time_scales", scale)
        if self.time_scales[0] > self.time_scales[1]:
            fail("time_scales", "the shortest first", self.time_scales)
        object.__setattr__(self, "time_scales", tuple(self.time_scales))

    def linear_products(self, keys: int, values: int) -> int:
        """Multiply-adds per token and head of one linear attention in chunks, its scores not counted."""
        return self.chunk_size * values + 2 * keys * values

    @property
    def mixer(self) -> Callable[..., tuple[Array, Any]]:
        """The mixer function with the options that only it has."""
        raise NotImplementedError

    @property
    def state(self) -> Any:
        """The class of the mixer's state."""
        raise NotImplementedError


class RecurrentMixer(TokenMixer):
    """Base of the layers around `mixer(q, k, v, log_decay, ...)`; see `MixerLayer` for the arguments."""

    def __init__(self, d_model: int, config: Any = None, *, rngs: nnx.Rngs, init_std: float = 0.02, **arguments: Any):
        super().__init__(d_model, config, rngs=rngs, init_std=init_std, **arguments)
        config, dtype = self.config, self.state_dtype
        heads = config.groups if config.shared_decay else config.heads
        if config.decay == "head":
            self.decay = HeadDecay(heads, config.time_scales, dtype=dtype)
        elif config.decay == "data":
            self.decay = DataDecay(d_model, heads, config.time_scales, rngs=rngs, init_std=init_std, dtype=dtype)
        else:
            self.decay = None

    def mix(self, streams: tuple[Array, ...], x: Array, segment_ids: Array | None, state: Any) -> tuple[Array, Any]:
        """Runs the recurrence over every segment."""
        q, k, v = streams
        config = self.config
        if config.scale is not None:
            q = q * config.scale
        elif config.qk_norm is None:
            q = q * self.key_size**-0.5
        return config.mixer(
            q,
            k,
            v,
            None if self.decay is None else self.decay(x),
            normalize=config.normalize,
            eps=config.eps,
            segment_ids=segment_ids,
            initial_state=state,
            implementation=config.implementation,
            chunk_size=config.chunk_size,
        )

    def init_mixer(self, batch_size: int) -> State:
        """The mixer's state of streams that have seen nothing."""
        config = self.config
        shared = config.groups if config.decay is None or config.shared_decay else config.heads
        return config.state.init(
            batch_size,
            config.heads,
            self.key_size,
            self.value_size,
            shared_heads=shared,
            dtype=self.state_dtype,
        )
