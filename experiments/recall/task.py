"""Multi-query associative recall: pairs of a key and a value, then the keys again, each to be answered with its value.

    k1 v1 k2 v2 ... kn vn | . . k2 . k1 . . . kn . ...        n pairs, then n queries among blanks
                                v2   v1       vn               scored, at the queries only

Source: Arora et al., "Zoology: Measuring and Improving Recall in Efficient Language Models", arXiv 2312.04927.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

BLANK = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
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
    """

    vocabulary: int = 256
    length: int = 256
    pairs: tuple[int, ...] = (4, 8, 16, 32, 64)
    gaps: Literal["power", "far"] = "power"
    power: float = 0.01
    filler: Literal["blank", "random"] = "blank"

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


def sequences(task: Task, key: jax.Array, count: int, pairs: jax.Array | int | None = None) -> dict[str, jax.Array]:
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


def _sequence(task: Task, key: jax.Array, n: jax.Array) -> dict[str, jax.Array]:
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
