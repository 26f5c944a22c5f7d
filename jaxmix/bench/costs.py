"""Bytes that a call has to move and operations that it has to do, by formula.

Bytes are those of a call that reads every argument once and writes every result once, with bfloat16 q, k, v and
outputs and float32 gates and states: what no implementation can avoid, whatever else it moves. With A the bytes of
the arguments and O those of the output:

    forward             A + O
    backward            A + O (gradient of the output) + A (gradients)
    forward+backward    the sum of both
    decode              A + O of one token, and the state: read and written, or for softmax attention the keys and
                        values of all earlier tokens read and those of one written

Operations are two per multiply-add. Those of a pass over a sequence are the matrix products in chunks of C = 64 tokens
as in `MixerConfig.mixer_products`, where both halves of a triangle count; causal softmax attention counts the pairs
that it needs, and the gated delta rule C (3 D + 2 E) + 3 D E multiply-adds for one token and head (two products of
keys or queries, the solve applied to keys and values, the scores applied to values, three products with the state),
without the products of whole chunks of its associative scan, which a walk over the chunks does not need. The backward
pass counts twice the forward pass, without what is computed again.

Multiply-adds for one token and head in decoding, one for every entry of a state that is multiplied with the token's
vectors and one for every entry that is added to, decays not counted:

    linear_attention, ssd    2 D E                          hla2    2 D^2 + 5 D E
    gated_delta_rule         3 D E                          ahla    4 D E
    softmax_attention        (D + E) (tokens so far)        hla3    3 D^2 + 4 D E
"""

import dataclasses
import math
from typing import Any, Literal

import jax

from jaxmix.bench.operands import MIXERS
from jaxmix.bench.shapes import Shape
from jaxmix.nn import (
    HLAConfig,
    LinearAttentionConfig,
    Mamba2Config,
    MixerConfig,
    SoftmaxAttentionConfig,
)

Pass = Literal["forward", "backward", "forward+backward", "decode"]
CHUNK = 64
"""Tokens of a chunk that operations are counted for."""
PASSES: tuple[Pass, ...] = ("forward", "backward", "forward+backward")


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a call has to do.

    Attributes:
        nbytes: bytes to move.
        flops: operations of matrix products.
    """

    nbytes: int
    flops: int

    def floor(self, copy: float, matmul: float) -> float:
        """Seconds below which no implementation can be.

        Args:
            copy: bytes a second, read and written.
            matmul: operations a second.
        """
        return max(self.nbytes / copy, self.flops / matmul)


def cost(mixer: str, shape: Shape, part: Pass) -> Cost:
    """Bytes and operations of one call."""
    if part == "decode":
        return _decode_cost(mixer, shape)
    given, out = _argument_bytes(mixer, shape, shape.length)
    products = shape.batch * shape.length * _products(mixer, shape)
    nbytes = {"forward": given + out, "backward": 2 * given + out}
    flops = {"forward": 2 * products, "backward": 4 * products}
    chosen = [part] if part != "forward+backward" else list(nbytes)
    return Cost(sum(nbytes[name] for name in chosen), sum(flops[name] for name in chosen))


def state_bytes(mixer: str, shape: Shape) -> int:
    """Bytes of the states of all streams."""
    state: Any = jax.eval_shape(lambda: MIXERS[mixer].draw_state(shape, 0))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))


def _decode_cost(mixer: str, shape: Shape) -> Cost:
    token = sum(_argument_bytes(mixer, shape, 1))
    d, e = shape.key_size, shape.value_size
    products = {
        "linear_attention": 2 * d * e,
        "ssd": 2 * d * e,
        "gated_delta_rule": 3 * d * e,
        "ahla": 4 * d * e,
        "hla2": 2 * d * d + 5 * d * e,
        "hla3": 3 * d * d + 4 * d * e,
        "softmax_attention": (d + e) * shape.length,
    }[mixer]
    flops = 2 * shape.batch * shape.heads * products
    state = state_bytes(mixer, shape)
    if mixer == "softmax_attention":
        return Cost(token + state + state // shape.length, flops)
    return Cost(token + 2 * state, flops)


def _argument_bytes(mixer: str, shape: Shape, length: int) -> tuple[int, int]:
    """Bytes of all arguments, and of the output."""
    bench = MIXERS[mixer]
    arrays: Any = jax.eval_shape(lambda: bench.draw(shape, 0, length=length))
    given = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
    return given, shape.batch * length * shape.heads * shape.value_size * 2


def _products(mixer: str, shape: Shape) -> int:
    """Multiply-adds of the forward pass for one token of all heads."""
    d, e = shape.key_size, shape.value_size
    if mixer == "gated_delta_rule":
        return shape.heads * (CHUNK * (3 * d + 2 * e) + 3 * d * e)
    return _config(mixer, shape).mixer_products(0, shape.length)


def _config(mixer: str, shape: Shape) -> MixerConfig:
    """The layer whose mixer function has these sizes."""
    sizes: dict[str, Any] = {"heads": shape.heads, "key_size": shape.key_size, "value_size": shape.value_size}
    if mixer == "linear_attention":
        return LinearAttentionConfig(chunk_size=CHUNK, **sizes)
    if mixer == "ssd":
        return Mamba2Config(chunk_size=CHUNK, **sizes)
    if mixer == "softmax_attention":
        return SoftmaxAttentionConfig(capacity=shape.length, **sizes)
    orders: dict[str, Any] = {"hla2": 2, "ahla": "asymmetric", "hla3": 3}
    return HLAConfig(order=orders[mixer], chunk_size=CHUNK, **sizes)
