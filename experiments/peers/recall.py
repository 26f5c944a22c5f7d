"""Multi-query associative recall: pairs of a key and a value, then the keys again, each to be answered with its value.

    k1 v1 k2 v2 ... kn vn | . . k2 . k1 . . . kn . ...        n pairs, then n queries among blanks
                                v2   v1       vn               scored, at the queries only

Source: Arora et al., "Zoology: Measuring and Improving Recall in Efficient Language Models", arXiv 2312.04927.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

BLANK = 0
VALIDATION, TEST = 1_000_003, 1_000_033
"""Seeds of held-out sequences: the first choose learning rates, the second are reported."""
TOGETHER = 64
"""Held-out sequences of one pass."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall:
    """What a sequence looks like.

    Token 0 is the blank, those below vocabulary / 2 are keys, the others are values. No key and no value occurs twice
    among the pairs, and no key is asked for twice, so that every query has exactly one answer.

    Attributes:
        vocabulary: number of token ids V, even.
        length: tokens of a sequence T, even, at least four for every pair.
        pairs: numbers of pairs; every training sequence draws one of them.
        gaps: where the queries are, on even places behind the pairs. "power": place g (1, 2, ...) is drawn with
            probability proportional to g^(power - 1), without replacement, as in Zoology; the order of the keys is
            random (Zoology's is that of the draws). "far": on the last n even places, in random order, so that
            everything between the pairs and the queries is filler.
        power: exponent of the power law; 0.01 in Zoology, which puts most queries soon after the pairs.
        filler: what is on all other places: "blank", or "random" values, which are not asked for.
        easy: part of the training sequences that have gaps "power" and blanks as filler whatever the rest has, an
            easier start; what is held out has none of them.
        held_out: held-out sequences of every number of pairs, twice, a multiple of 64.
    """

    vocabulary: int = 256
    length: int = 256
    pairs: tuple[int, ...] = (4, 8, 16, 32, 64)
    gaps: Literal["power", "far"] = "power"
    power: float = 0.01
    filler: Literal["blank", "random"] = "blank"
    easy: float = 0.0
    held_out: int = 512

    def __post_init__(self) -> None:
        object.__setattr__(self, "pairs", tuple(sorted(self.pairs)))
        if self.vocabulary % 2 or self.length % 2:
            raise ValueError(f"expected even numbers, got vocabulary={self.vocabulary}, length={self.length}")
        if self.pairs[0] < 1 or 4 * self.pairs[-1] > self.length:
            raise ValueError(f"pairs: expected 1 to length / 4 = {self.length // 4}, got {self.pairs}")
        if self.pairs[-1] > self.vocabulary // 2 - 1:
            raise ValueError(f"pairs: expected fewer than keys, {self.vocabulary // 2 - 1}, got {self.pairs}")
        if self.gaps not in ("power", "far") or self.filler not in ("blank", "random"):
            raise ValueError(f"expected gaps power or far and filler blank or random, got {self.gaps}, {self.filler}")
        if not 0 <= self.easy <= 1:
            raise ValueError(f"easy: expected a part from 0 to 1, got {self.easy}")
        if self.held_out < 1 or self.held_out % TOGETHER:
            raise ValueError(f"held_out: expected a multiple of {TOGETHER}, got {self.held_out}")

    @property
    def longest(self) -> int:
        """All sequences are of the same length."""
        return self.length

    def draw(self, key: jax.Array, count: int) -> dict[str, jax.Array]:
        """Training sequences; in the loss every sequence counts the same, whatever its number of pairs."""
        drawn = sequences(self, key, count)
        if self.easy:
            chosen, each = jax.random.split(jax.random.fold_in(key, 1))
            easy = sequences(dataclasses.replace(self, gaps="power", filler="blank"), each, count)
            is_easy = jax.random.bernoulli(chosen, self.easy, (count, 1))
            drawn = jax.tree.map(lambda other, x: jnp.where(is_easy, other, x), easy, drawn)
        each = drawn["weights"] / drawn["weights"].sum(-1, keepdims=True)
        return {"tokens": drawn["tokens"], "labels": drawn["labels"], "weights": each}

    def measure(self, structure: Any, params: Any, models: int) -> list[dict[str, Any]]:
        """What the models get right.

        Returns:
            Of every model "validation" and "test", each with "pairs", fraction right by number of pairs, and
            "distances", by number of pairs [right, asked] of queries 1, 2 to 3, 4 to 7, ... tokens behind their key.
        """
        count = _counter(self, structure)
        found: list[dict[str, Any]] = [{} for _ in range(models)]
        for name, seed in (("validation", VALIDATION), ("test", TEST)):
            for i in range(models):
                found[i][name] = {"pairs": {}, "distances": {}}
            for pairs in self.pairs:
                key = jax.random.fold_in(jax.random.key(seed), pairs)
                right, asked = (np.asarray(x) for x in count(params, key, pairs))
                for i in range(models):
                    found[i][name]["pairs"][str(pairs)] = float(right[i].sum() / asked.sum())
                    bins = [[int(r), int(a)] for r, a in zip(right[i], asked, strict=True)]
                    found[i][name]["distances"][str(pairs)] = bins
        return found


def sequences(task: Recall, key: jax.Array, count: int, pairs: jax.Array | int | None = None) -> dict[str, jax.Array]:
    """Draws `count` sequences, in compiled code too.

    Args:
        task: what they look like.
        key: random key; equal keys give equal sequences.
        count: how many, B.
        pairs: pairs of every sequence, at most the largest of `task.pairs`; by default each draws one of these.

    Returns:
        "tokens" and "labels" int32 [B, T], "weights" float32 [B, T], 1 where the label counts, "distances" int32
        [B, T], tokens from the key among the pairs to the query, 0 where there is none.
    """
    sizes, each = jax.random.split(key)
    numbers = jax.random.choice(sizes, jnp.array(task.pairs), (count,)) if pairs is None else jnp.full(count, pairs)
    return jax.vmap(functools.partial(_sequence, task))(jax.random.split(each, count), numbers)


def _sequence(task: Recall, key: jax.Array, n: jax.Array) -> dict[str, jax.Array]:
    """One sequence of n pairs; what belongs to those beyond n is written behind the end and lost."""
    half, end, most = task.vocabulary // 2, task.length, task.pairs[-1]
    for_keys, for_values, for_places, for_order, for_filler = jax.random.split(key, 5)
    keys = 1 + jax.random.permutation(for_keys, half - 1)[:most]
    values = half + jax.random.permutation(for_values, half)[:most]
    pair = jnp.arange(most)
    used = pair < n
    order = jnp.argsort(jnp.where(used, jax.random.uniform(for_order, (most,)), 2.0))

    # Adding Gumbel noise and taking the largest draws without replacement.
    place, free = jnp.arange(end // 2), end // 2 - n
    likely = (task.power - 1) * jnp.log1p(place) if task.gaps == "power" else jnp.zeros(place.shape)
    allowed = (place < free) & ((task.gaps == "power") | (place >= free - n))
    noise = jax.random.gumbel(for_places, place.shape)
    _, places = jax.lax.top_k(jnp.where(allowed, likely + noise, -jnp.inf), most)

    at_key = jnp.where(used, 2 * pair, end)
    at_query = jnp.where(used, 2 * (n + places), end)
    tokens = jnp.full(end, BLANK)
    if task.filler == "random":
        tokens = jax.random.randint(for_filler, (end,), half, task.vocabulary)
    tokens = tokens.at[at_key].set(keys, mode="drop").at[at_key + 1].set(values, mode="drop")

    def at_queries(start: jax.Array, x: jax.Array) -> jax.Array:
        return start.at[at_query].set(x, mode="drop")

    nothing = jnp.zeros(end, jnp.int32)
    return {
        "tokens": at_queries(tokens, keys[order]).astype(jnp.int32),
        "labels": at_queries(nothing, values[order]),
        "weights": at_queries(jnp.zeros(end), jnp.ones(most)),
        "distances": at_queries(nothing, at_query - 2 * order),
    }


def _counter(task: Recall, structure: Any) -> Any:
    """Compiles (stacked params, key, pairs) -> (right [models, bins], asked [bins]), bins as in `Recall.measure`."""
    bins = task.length.bit_length()

    @jax.jit
    def count(params: Any, key: jax.Array, pairs: jax.Array) -> tuple[jax.Array, jax.Array]:
        def batch(key: jax.Array) -> tuple[jax.Array, jax.Array]:
            drawn = sequences(task, key, TOGETHER, pairs)
            bin = jnp.sum(drawn["distances"][..., None] >= 2 ** jnp.arange(1, bins), axis=-1)
            asked = drawn["weights"][..., None] * jax.nn.one_hot(bin, bins)

            def right(params: Any) -> jax.Array:
                logits, _ = nnx.merge(structure, params)(drawn["tokens"])
                return jnp.sum((logits.argmax(-1) == drawn["labels"])[..., None] * asked, axis=(0, 1))

            return jax.vmap(right)(params), asked.sum((0, 1))

        right, asked = jax.lax.map(batch, jax.random.split(key, task.held_out // TOGETHER))
        return right.sum(0), asked.sum(0)

    return count
