import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from jaxmix.evaluation.router import router_map, softmax_fractions
from jaxmix.evaluation.router_plots import plot_cache, plot_router_map
from jaxmix.models import Decoder, DecoderConfig
from jaxmix.nn import LinearAttentionConfig, NAtSLConfig, SoftmaxAttentionConfig

ROUTED = NAtSLConfig(heads=2, chunk_size=4, capacity=32)
LINEAR = LinearAttentionConfig(heads=2, chunk_size=4)
TOKENS = np.random.default_rng(0).integers(0, 16, 31).astype(np.int32)


def decoder(*layers):
    # Strong weights, so that routers choose differently from chunk to chunk.
    config = DecoderConfig(vocab_size=16, d_model=8, layers=layers, hidden=8, init_std=0.5)
    return Decoder(config, rngs=nnx.Rngs(1))


@pytest.fixture(scope="module")
def single():
    model = decoder(ROUTED)
    return model, router_map(model, TOKENS)


def test_the_map_is_what_the_layer_chooses_in_one_pass(single):
    model, found = single
    structure, params = nnx.split(model.groups[0].blocks[0])
    block = nnx.merge(structure, jax.tree.map(lambda x: x[0], params))
    x = block.mixer_norm(model.embedding[...][TOKENS[None]])
    choice, _ = block.mixer.route(x, None, None)
    (layer,) = found.layers
    assert layer.softmax.shape == (2, 7)
    np.testing.assert_array_equal(layer.softmax, np.asarray(choice[0, :7, :, 0] > 0.5).T)
    assert 0 < layer.softmax.mean() < 1


def test_fractions_are_those_of_one_pass(single):
    model, found = single
    assert found.tokens == 28
    np.testing.assert_allclose(softmax_fractions(model, TOKENS)[0], found.layers[0].fractions, rtol=1e-6)


def test_sizes_are_counted_by_hand(single):
    _, found = single
    (layer,) = found.layers
    # Keys of 4 and values of 4 channels a head, for 4 tokens in float32.
    assert layer.page_bytes == 4 * (4 + 4) * 4
    # Two linear states, the open chunk, decays, the number of tokens and of pages in it, and the router's sum.
    assert layer.fixed_bytes == 4 * (2 * 2 * 4 * 4 + 4 * 2 * (4 + 4) + 2 + 1 + 2 + 1 + 8)
    kept = np.cumsum(layer.softmax.sum(axis=0))
    np.testing.assert_array_equal(found.positions, np.arange(0, 29, 4))
    np.testing.assert_array_equal(layer.pages(np.array([0, 3, 4, 11, 28])), [0, 0, kept[0], kept[1], kept[6]])
    np.testing.assert_array_equal(found.kept_bytes, 128 * np.array([0, *kept]))
    np.testing.assert_array_equal(found.full_bytes, 128 * 2 * np.arange(8))


def test_layers_are_named_by_their_place_and_may_differ_in_chunk_size(tmp_path):
    wide = dataclasses.replace(ROUTED, chunk_size=6, rope=True)
    model = decoder(LINEAR, ROUTED, wide)
    found = router_map(model, TOKENS[:26])
    assert [(x.layer, x.chunk_size, x.softmax.shape) for x in found.layers] == [
        (1, 4, (2, 6)),
        (2, 6, (2, 4)),
    ]
    assert (found.step, found.tokens) == (2, 26)
    whole = softmax_fractions(model, TOKENS[:26])
    for layer in found.layers:
        np.testing.assert_allclose(layer.fractions, whole[layer.layer], rtol=1e-6)
    assert len(found.kept_bytes) == len(found.full_bytes) == len(found.positions)
    for draw in (plot_router_map, plot_cache):
        draw(found, tmp_path / "picture.png", title="a text")
        assert (tmp_path / "picture.png").stat().st_size > 5000


def test_a_model_without_routers_is_refused():
    for measure in (router_map, softmax_fractions):
        with pytest.raises(ValueError, match=r"expected a decoder with NAtS-L layers.*got layers of linear_attention"):
            measure(decoder(LINEAR), TOKENS)


def test_a_text_without_a_whole_chunk_is_refused(single):
    with pytest.raises(ValueError, match=r"tokens: expected ids \[T\] of at least one chunk of 4, got \[3\]"):
        router_map(single[0], TOKENS[:3])


def test_a_text_that_needs_more_pages_names_the_capacity(single):
    _, found = single
    pages = found.layers[0].pages(found.positions)
    room = int(pages[-1]) - 1
    where = int(found.positions[np.argmax(pages > room)])
    model = decoder(dataclasses.replace(ROUTED, capacity=room))
    with pytest.raises(
        ValueError, match=rf"capacity: expected layer 0 to keep at most its {room} pages, got .* {where} of"
    ):
        router_map(model, TOKENS)


def test_a_text_that_softmax_layers_cannot_hold_names_the_capacity():
    model = decoder(ROUTED, SoftmaxAttentionConfig(heads=2, capacity=30))
    with pytest.raises(ValueError, match=r"capacity: expected a text of at most the 30 tokens .* layer 1, .* got 31"):
        router_map(model, TOKENS)


def test_an_early_choice_does_not_depend_on_what_follows(single):
    model, found = single
    other = np.concatenate([TOKENS[:12], (TOKENS[12:] + 1) % 16])
    np.testing.assert_array_equal(router_map(model, other).layers[0].softmax[:, :3], found.layers[0].softmax[:, :3])
