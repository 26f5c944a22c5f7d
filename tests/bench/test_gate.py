"""What is wrong gets no time; the references themselves are right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix import softmax_attention
from jaxmix.bench import operands
from jaxmix.bench.gate import LIMIT, Work, WrongResult, check, error_ratio
from jaxmix.bench.operands import MIXERS, blockwise_softmax, checked_part
from jaxmix.bench.shapes import GENERAL, Shape

SHAPE = Shape(2, 24, 4, 8, 4, shared_heads=2)
WORK = Work("linear_attention", SHAPE, "forward+backward")


@pytest.fixture(scope="module")
def results():
    """Output and gradients of linear attention in bfloat16."""
    arrays, call = WORK.arrays(0), MIXERS["linear_attention"].call

    @jax.jit
    def run(arrays, cotangent):
        out, pull = jax.vjp(lambda *arrays: call(*arrays, implementation="scan")[0], *arrays)
        return {"out": out} | dict(zip(MIXERS["linear_attention"].arguments, pull(cotangent), strict=True))

    return run(arrays, WORK.cotangent(0))


def test_right_results_pass(results):
    assert set(results) == {"out", "q", "k", "v", "log_decay"}
    assert 1e-5 < check(WORK, results) < LIMIT


@pytest.mark.parametrize("name", ["out", "q", "log_decay"])
def test_a_wrong_result_is_refused_and_named(results, name):
    wrong = results | {name: results[name] * 1.0625}
    with pytest.raises(WrongResult, match=rf"{name} 6\.\de-02"):
        check(WORK, wrong)


def test_what_is_not_finite_is_refused(results):
    with pytest.raises(WrongResult, match="out nan"):
        check(WORK, {"out": results["out"].at[-1, 3, 0, 0].set(jnp.nan)})


def test_another_shape_is_refused(results):
    with pytest.raises(WrongResult, match="expected shape"):
        check(WORK, {"out": results["out"][:, 1:]})


def test_errors_are_relative_to_the_size():
    assert error_ratio(np.full(4, 11.0), np.full(4, 10.0)) == pytest.approx(0.1)


@pytest.mark.parametrize("mixer", GENERAL)
def test_arguments_have_the_shapes_that_the_mixer_takes(mixer):
    bench = MIXERS[mixer]
    arrays = jax.eval_shape(lambda: bench.draw(SHAPE, 0))
    out, state = jax.eval_shape(lambda *arrays: bench.call(*arrays), *arrays)
    assert out.shape == (2, 24, 4, 4)
    assert [x.shape[2] for x in arrays] == [bench.heads(SHAPE)[name] for name in bench.arguments]
    drawn = jax.eval_shape(lambda: bench.draw_state(SHAPE, 0))
    assert jax.tree.structure(drawn) == jax.tree.structure(state)
    assert [x.shape for x in jax.tree.leaves(drawn)] == [x.shape for x in jax.tree.leaves(state)]


def test_the_part_that_is_checked_is_one_group_of_heads():
    heads = {name: part.stop for name, part in checked_part("hla2", SHAPE).items()}
    assert heads == {"q": 2, "k": 1, "v": 1, "log_decay": 2, "out": 2}
    assert checked_part("gated_delta_rule", SHAPE)["k"] == slice(1)
    assert checked_part("gated_delta_rule", SHAPE)["v"] == slice(2)
    assert checked_part("ssd", SHAPE) == {"x": slice(4), "dt": slice(4), "B": slice(1), "C": slice(1), "out": slice(4)}


def test_softmax_in_blocks_is_softmax(monkeypatch):
    monkeypatch.setattr(operands, "QUERY_BLOCK", 8)
    q, k, v = (x.astype(jnp.float32) for x in MIXERS["softmax_attention"].draw(Shape(2, 13, 4, 8, 4, 2), 0))
    expected, _ = softmax_attention(q, k, v, implementation="serial")
    np.testing.assert_allclose(blockwise_softmax(q, k, v), expected, atol=2e-6)
