from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix.generate import Sampling, _decode, filter_logits, generate, sample, stream
from tests.evaluation.stub_model import CountingModel

LOGITS = jnp.log(jnp.array([[0.05, 0.4, 0.3, 0.05, 0.2]]))


def _kept(**options):
    return np.flatnonzero(np.isfinite(filter_logits(LOGITS, Sampling(**options))[0])).tolist()


def test_top_k_keeps_the_most_likely():
    assert _kept(top_k=1) == [1]
    assert _kept(top_k=3) == [1, 2, 4]
    assert _kept(top_k=99) == [0, 1, 2, 3, 4]


def test_top_p_keeps_the_fewest_that_reach_p():
    assert _kept(top_p=0.1) == [1]
    assert _kept(top_p=0.41) == [1, 2]
    assert _kept(top_p=0.69) == [1, 2]
    assert _kept(top_p=0.71) == [1, 2, 4]
    assert _kept(top_p=1.0) == [0, 1, 2, 3, 4]


def test_top_p_follows_the_temperature():
    assert _kept(temperature=10.0, top_p=0.41) == [1, 2]
    assert _kept(temperature=0.1, top_p=0.9) == [1]


def test_filters_leave_the_other_logits_in_proportion():
    kept = filter_logits(LOGITS, Sampling(temperature=2.0, top_k=2))[0]
    assert float(kept[1] - kept[2]) == pytest.approx(np.log(0.4 / 0.3) / 2, rel=1e-5)


def test_draws_follow_the_probabilities():
    logits = jnp.tile(LOGITS, (20_000, 1))
    drawn = np.bincount(np.asarray(sample(logits, jax.random.key(0), Sampling())), minlength=5) / 20_000
    np.testing.assert_allclose(drawn, [0.05, 0.4, 0.3, 0.05, 0.2], atol=0.015)


def test_temperature_zero_takes_the_most_likely():
    assert sample(LOGITS, jax.random.key(0), Sampling(temperature=0.0)).tolist() == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature: expected a finite number of at least 0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k: expected at least 1 or None, got 0"),
        ({"top_p": 0.0}, r"top_p: expected a number in \(0, 1\] or None, got 0.0"),
        ({"top_p": 1.5}, "got 1.5"),
    ],
)
def test_settings_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


GREEDY = Sampling(temperature=0.0)


def _greedy_by_full_passes(model, prompt, count):
    ids = list(prompt)
    for _ in range(count):
        logits, _ = model(jnp.array([ids]))
        ids.append(int(jnp.argmax(logits[0, -1])))
    return ids[len(prompt) :]


def test_the_state_continues_what_the_full_pass_would():
    model = CountingModel(11)
    prompts = [np.array([1, 2, 3, 2]), np.array([5]), np.arange(10), np.array([7] * 70)]
    for prompt, continued in zip(prompts, generate(model, prompts, max_tokens=9, sampling=GREEDY), strict=True):
        assert continued.tolist() == _greedy_by_full_passes(model, prompt, 9)


def test_a_prompt_does_not_depend_on_its_neighbours():
    model, prompt = CountingModel(11), np.array([3, 1, 4])
    (alone,) = generate(model, [prompt], max_tokens=6, sampling=GREEDY)
    for others in ([np.array([9])], [np.arange(11), np.array([2] * 100)]):
        assert generate(model, [prompt, *others], max_tokens=6, sampling=GREEDY)[0].tolist() == alone.tolist()


def test_a_seed_repeats_its_draws():
    def draw(seed):
        return [row.tolist() for row in generate(CountingModel(11), [np.array([1])] * 3, max_tokens=20, seed=seed)]

    assert draw(0) == draw(0) != draw(1)
    assert len({tuple(row) for row in draw(0)}) == 3


def test_a_stop_id_ends_its_own_prompt_only():
    model = CountingModel(11)
    prompts = [np.array([1, 2]), np.array([8])]
    free = generate(model, prompts, max_tokens=30, seed=4)
    stop = free[0][5]
    stopped = generate(model, prompts, max_tokens=30, seed=4, stop_ids=[int(stop)])
    for ours, theirs in zip(stopped, free, strict=True):
        places = np.flatnonzero(theirs == stop)
        assert ours.tolist() == theirs[: places[0] if places.size else None].tolist()


def test_every_token_takes_one_compiled_step_and_a_state_of_one_size():
    before = _decode._cache_size()
    for token in islice(stream(CountingModel(13), [np.array([1])] * 2), 12):
        assert token.shape == (2,)
    assert _decode._cache_size() == before + 1


@pytest.mark.parametrize(
    ("prompts", "message"), [([], "at least one, got none"), ([np.array([1]), np.array([])], r"got lengths \[1, 0\]")]
)
def test_missing_prompts_are_refused(prompts, message):
    with pytest.raises(ValueError, match=message):
        generate(CountingModel(11), prompts, max_tokens=1)


def test_no_tokens_are_refused():
    with pytest.raises(ValueError, match="max_tokens: expected at least 1, got 0"):
        generate(CountingModel(11), [np.array([1])], max_tokens=0)
