"""Bytes and operations by formula."""

import math

import jax
import pytest

from jaxmix.bench.costs import PASSES, cost, state_bytes
from jaxmix.bench.operands import MIXERS
from jaxmix.bench.shapes import ANCHORS, DECODE, GENERAL, LENGTHS, MODELS, SHAPES, TOKENS, Shape

COPY, MATMUL = 4.3e12, 790e12
"""Measured on an H200."""


@pytest.mark.parametrize("shape", ANCHORS, ids=str)
def test_the_floor_of_linear_attention_is_one_read_of_q_k_v_and_one_write_of_o(shape):
    needed = cost("linear_attention", shape, "forward")
    entries = shape.batch * shape.length * shape.heads
    assert needed.nbytes == entries * (4 * 2 * shape.key_size + 4)
    assert needed.floor(COPY, MATMUL) == pytest.approx(needed.nbytes / COPY)


def test_known_floors():
    milliseconds = [cost("hla2", shape, "forward").nbytes / COPY * 1e3 for shape in ANCHORS]
    assert milliseconds == pytest.approx([0.063, 0.063, 0.125, 0.063, 0.031, 0.031, 0.187, 0.125], abs=2e-3)


def test_causal_attention_needs_half_of_all_pairs():
    shape = Shape(2, 4096, 3, 64, 32)
    pairs = 2 * 3 * 4096 * 4097 / 2
    assert cost("softmax_attention", shape, "forward").flops == pytest.approx(2 * pairs * (64 + 32), rel=1e-3)
    assert cost("softmax_attention", shape, "backward").flops == 2 * cost("softmax_attention", shape, "forward").flops


@pytest.mark.parametrize("mixer", GENERAL)
def test_both_passes_cost_what_each_does(mixer):
    forward, backward, both = (cost(mixer, Shape(2, 128, 4, 32), part) for part in PASSES)
    assert both.nbytes == forward.nbytes + backward.nbytes
    assert both.flops == forward.flops + backward.flops
    arrays = jax.eval_shape(lambda: MIXERS[mixer].draw(Shape(2, 128, 4, 32), 0))
    given = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
    assert backward.nbytes == forward.nbytes + given


@pytest.mark.parametrize("mixer", GENERAL)
def test_decoding_moves_the_state(mixer):
    shape = Shape(4, 256, 2, 16)
    needed, state = cost(mixer, shape, "decode"), state_bytes(mixer, shape)
    assert state < needed.nbytes < 2 * state * 1.2
    assert needed.flops > 0


def test_states_have_the_sizes_of_their_matrices():
    shape = Shape(64, 4096, 16, 128)
    matrix = 64 * 16 * 128 * 128 * 4
    assert state_bytes("gated_delta_rule", shape) == matrix
    assert state_bytes("hla2", shape) == pytest.approx(3 * matrix, rel=0.02)
    assert state_bytes("softmax_attention", shape) == pytest.approx(64 * 4096 * 16 * 128 * 2 * 2, rel=1e-3)


def test_suites_are_what_they_promise():
    assert {shape.batch * shape.length for shape in LENGTHS} == {TOKENS}
    assert [shape.length for shape in LENGTHS] == [2**n for n in range(12, 19)]
    assert all(shape.batch * shape.heads >= 1024 for shape in DECODE)
    assert {mixer for shapes in SHAPES.values() for shape in shapes for mixer in shape.mixers} == set(MIXERS)
    assert str(MODELS[2]) == "(1, 8192, 32/8, 128) Llama 3.1 8B"
    assert str(MODELS[5]) == "(8, 4096, 6, 128/256) Gated DeltaNet 380M"


@pytest.mark.parametrize(("sizes", "name"), [((0, 1, 1, 1), "batch"), ((1, 1, 4, 8, 8, 3), "shared_heads")])
def test_bad_shapes_are_named(sizes, name):
    with pytest.raises(ValueError, match=name):
        Shape(*sizes)
