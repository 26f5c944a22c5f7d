"""What the experiments are measured on."""

import jax
import numpy as np
import pytest

from experiments.peers.recall import BLANK, Recall, sequences

LAYOUTS = [
    Recall(vocabulary=64, length=64, pairs=(2, 5, 16), gaps=gaps, filler=filler)
    for gaps, filler in [("power", "blank"), ("power", "random"), ("far", "random")]
]


def draw(task: Recall, seed: int, count: int = 64, pairs: int | None = None) -> dict[str, np.ndarray]:
    drawn = jax.jit(sequences, static_argnums=(0, 2, 3))(task, jax.random.key(seed), count, pairs)
    return {name: np.asarray(x) for name, x in drawn.items()}


@pytest.mark.parametrize("task", LAYOUTS, ids=lambda task: f"{task.gaps}-{task.filler}")
def test_every_query_of_recall_has_one_answer_which_was_shown(task):
    drawn = draw(task, seed=0)
    half, seen = task.vocabulary // 2, set()
    columns = (drawn[name] for name in ("tokens", "labels", "weights", "distances"))
    for tokens, labels, weights, distances in zip(*columns, strict=True):
        asked = np.flatnonzero(weights)
        n = len(asked)
        seen.add(n)
        shown = dict(zip(tokens[: 2 * n : 2], tokens[1 : 2 * n : 2], strict=True))
        assert len(shown) == len(set(shown.values())) == n
        assert all(BLANK < key < half <= value < task.vocabulary for key, value in shown.items())
        assert asked.min() >= 2 * n
        assert {tokens[t]: labels[t] for t in asked} == shown
        assert all(tokens[t - d] == tokens[t] for t, d in zip(asked, distances[asked], strict=True))
        other = np.delete(tokens, [*range(2 * n), *asked])
        assert np.all(other >= half) if task.filler == "random" else np.all(other == BLANK)
        assert not labels[weights == 0].any()
        assert not distances[weights == 0].any()
        if task.gaps == "far":
            assert set(asked) == set(range(task.length - 2 * n, task.length, 2))
    assert seen == set(task.pairs)


def test_recall_sequences_follow_from_their_key():
    task = LAYOUTS[0]
    np.testing.assert_array_equal(draw(task, 0)["tokens"], draw(task, 0)["tokens"])
    assert not np.array_equal(draw(task, 0)["tokens"], draw(task, 1)["tokens"])


def test_recall_queries_are_on_places_of_a_power_law_drawn_without_replacement():
    """Against numpy's draws, as the paper's generator makes them."""
    count, pairs = 4000, 4
    task = Recall(vocabulary=64, length=64, pairs=(pairs,))
    weights = draw(task, 0, count, pairs)["weights"]
    asked = weights[:, 2 * pairs :: 2].mean(0)
    rng = np.random.default_rng(0)
    law = np.arange(1, len(asked) + 1) ** (task.power - 1.0)
    places = np.stack([rng.choice(len(law), pairs, replace=False, p=law / law.sum()) for _ in range(count)])
    expected = np.bincount(places.ravel(), minlength=len(law)) / count
    np.testing.assert_allclose(asked, expected, atol=5 * np.sqrt(2 * 0.25 / count))
    assert weights.sum() == count * pairs


def test_recall_keys_are_asked_for_in_random_order():
    distances = draw(Recall(vocabulary=64, length=64, pairs=(8,), gaps="far"), 0, 4000)["distances"]
    query, far = np.nonzero(distances)[1].reshape(-1, 8), distances[distances > 0].reshape(-1, 8)
    key = (query - far) // 2
    np.testing.assert_allclose(key.mean(0), np.full(8, 3.5), atol=0.2)


def test_part_of_the_training_sequences_of_recall_is_easier():
    """Filler tells which: blanks in the easier ones, whose queries are soon after the pairs."""
    task = Recall(vocabulary=64, length=64, pairs=(4,), gaps="far", filler="random", easy=0.25)
    drawn = jax.tree.map(np.asarray, jax.jit(task.draw, static_argnums=1)(jax.random.key(0), 4000))
    easy = np.any(drawn["tokens"] == BLANK, axis=1)
    np.testing.assert_allclose(easy.mean(), task.easy, atol=0.03)
    asked = drawn["weights"] > 0
    assert not asked[~easy, :-8].any()
    assert asked[easy, 8:16].sum() > 0.4 * asked[easy].sum()
    np.testing.assert_allclose(drawn["weights"].sum(1), 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pairs": (17,)}, "pairs"),
        ({"length": 63}, "even"),
        ({"vocabulary": 8}, "keys"),
        ({"gaps": "near"}, "near"),
        ({"easy": 2.0}, "easy"),
    ],
)
def test_recall_says_what_does_not_fit(wrong, message):
    with pytest.raises(ValueError, match=message):
        Recall(**({"vocabulary": 64, "length": 64, "pairs": (4,)} | wrong))
