"""What initial time scales do to linear attention and its higher orders on text.

    python -m experiments.hla_text.run weights [--mixers linear hla2 ahla hla3] [--time-scales 8,1024 1,32]
    python -m experiments.hla_text.run train [--mixers ...] [--time-scales ...] [--seeds 0] [--steps 300]

`weights` prints, for the first layer of an untrained model, which part of the energy (the sum of the squares) of a
head's weights of past tokens is on the last few tokens, by head, averaged over tokens of validation windows. The
weights are what the mixer gives for values that are the rows of the identity. `train` trains small models and prints
their bits per byte, the effective rank of the heads' outputs, each scaled to unit length, and what became of the time
scales, by head with a slash between layers. The effective rank is the exponential of the entropy of the squared
singular values, each as a part of their sum: 1 when a head gives every token of a window the same direction.

Data are bytes of the messages of presidents, see experiments/peers/text.py.
"""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.peers.text import Text
from experiments.peers.train import Budget, train
from jaxmix.arrays import Array
from jaxmix.bench import environment
from jaxmix.data import load_corpus
from jaxmix.data.tokenizers import ByteTokenizer
from jaxmix.models import Decoder, DecoderConfig
from jaxmix.nn import HLAConfig, LinearAttentionConfig
from jaxmix.nn.recurrent import RecurrentConfig, RecurrentMixer

MIXERS: dict[str, RecurrentConfig] = {
    "linear": LinearAttentionConfig(heads=1),
    "hla2": HLAConfig(heads=1),
    "ahla": HLAConfig(heads=1, order="asymmetric"),
    "hla3": HLAConfig(heads=1, order=3),
}
"""By the names of experiments/peers."""

Scales = tuple[float, float]


def build(mixer: str, scales: Scales, *, width: int, heads: int, layers: int, hidden: int) -> DecoderConfig:
    """A decoder whose layers are all alike."""
    layer = dataclasses.replace(MIXERS[mixer], heads=heads, time_scales=scales)
    return DecoderConfig(
        vocab_size=ByteTokenizer.vocab_size,
        d_model=width,
        layers=(layer,) * layers,
        hidden=hidden,
        tie_embeddings=True,
    )


def validation(length: int, count: int) -> Array:
    """The first windows of the validation documents, int32 [count, length]."""
    documents = ByteTokenizer().encode_batch([document.text for document in load_corpus("sotu").validation])
    windows = [ids[i : i + length] for ids in documents for i in range(0, len(ids) - length, length)]
    return jnp.asarray(np.stack(windows[:count]), jnp.int32)


def mixers_and_inputs(model: Decoder, tokens: Array) -> Iterator[tuple[RecurrentMixer, Array]]:
    """Every mixer of a model, and the x [B, T, d] that it is given."""
    x = model.embedding[...][tokens]
    for group in model.groups:
        definition, stacked = nnx.split(group)
        for i in range(jax.tree.leaves(stacked)[0].shape[0]):
            for block in nnx.merge(definition, jax.tree.map(lambda y, i=i: y[i], stacked)).blocks:
                assert isinstance(block.mixer, RecurrentMixer)
                yield block.mixer, block.mixer_norm(x)
                x, _ = block(x, None, None, None)


def head_outputs(mixer: RecurrentMixer, x: Array, *, weights: bool = False) -> Array:
    """What heads give before their norm, [B, T, H, E]; with `weights`, their weights of past tokens, [B, T, H, T]."""
    tails = mixer.init_state(x.shape[0]).convolutions
    (q, k, v), _ = mixer.project(x, None, tails, jnp.zeros(x.shape[:2], jnp.int32))
    if weights:
        tokens = x.shape[1]
        v = jnp.broadcast_to(jnp.eye(tokens, dtype=v.dtype)[:, None], (*v.shape[:3], tokens))
    return mixer.mix((q, k, v), x, None, None)[0]


def recent_energy(weights: Array, recent: int) -> np.ndarray:
    """The part of the energy of weights [B, T, H, T] on the last tokens, [H]; tokens of the second half of a window."""
    tokens = weights.shape[1]
    distance = np.arange(tokens)[:, None] - np.arange(tokens)
    energy = np.square(np.asarray(weights, np.float64))
    parts = np.sum(energy, axis=-1, where=(distance < recent)[:, None]) / np.sum(energy, axis=-1)
    return parts[:, tokens // 2 :].mean(axis=(0, 1))


def effective_ranks(out: Array) -> np.ndarray:
    """Effective ranks of unit-length outputs [B, T, H, E], [H]; the first quarter of a window is left out."""
    by_head = np.moveaxis(np.asarray(out, np.float64)[:, out.shape[1] // 4 :], 2, 1)
    unit = by_head / np.linalg.norm(by_head, axis=-1, keepdims=True)
    parts = np.square(np.linalg.svd(unit, compute_uv=False))
    parts /= parts.sum(axis=-1, keepdims=True)
    return np.exp(-np.sum(parts * np.log(parts + 1e-30), axis=-1)).mean(axis=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookedInto(Text):
    """The task, whose measurements have "ranks" and "time_scales" too, by layer and head.

    Attributes:
        probes: validation windows that ranks are averaged over.
    """

    probes: int = 6

    def measure(self, structure: Any, params: Any, models: int) -> list[dict[str, Any]]:
        """What `Text` measures, and ranks and time scales."""
        found = super().measure(structure, params, models)
        tokens = validation(self.length, self.probes)

        @jax.jit
        def look(params: Any) -> tuple[list[Array], list[Array]]:
            seen = list(mixers_and_inputs(nnx.merge(structure, params), tokens))
            return [head_outputs(mixer, x) for mixer, x in seen], [-1 / _log_decay(mixer, x) for mixer, x in seen]

        for i, one in enumerate(found):
            outputs, one["time_scales"] = look(jax.tree.map(lambda x, i=i: x[i], params))
            one["ranks"] = [effective_ranks(out) for out in outputs]
        return found


def _log_decay(mixer: RecurrentMixer, x: Array) -> Array:
    assert mixer.decay is not None
    return mixer.decay(x)


def show_weights(chosen: argparse.Namespace) -> None:
    """Prints where the weights of untrained heads are."""
    tokens = validation(chosen.length, 3)
    sizes = {"width": 256, "heads": 4, "layers": 4, "hidden": 848}
    print(f"\n| mixer | time scales | energy on the last {chosen.recent} tokens, by head |\n|" + " - |" * 3)
    for scales in chosen.time_scales:
        for name in chosen.mixers:
            model = Decoder(build(name, scales, **sizes), rngs=nnx.Rngs(jax.random.key(0)))
            weights = head_outputs(*next(mixers_and_inputs(model, tokens)), weights=True)
            parts = recent_energy(weights, chosen.recent)
            print(f"| {name} | {_pair(scales)} | {' '.join(f'{x:.3f}' for x in parts)} |", flush=True)


def show_training(chosen: argparse.Namespace) -> None:
    """Trains and prints a row for every mixer, pair of time scales and seed."""
    task = LookedInto(length=256, beyond=1, windows=400)
    sizes = {"width": 128, "heads": 2, "layers": 2, "hidden": 256}
    columns = ("mixer", "time scales", "seed", "updates", "bits per byte", "effective ranks", "time scales at the end")
    print(f"\n| {' | '.join(columns)} |\n|" + " - |" * len(columns), flush=True)
    for scales in chosen.time_scales:
        for name in chosen.mixers:
            config, budget = build(name, scales, **sizes), Budget(steps=chosen.steps, batch=chosen.batch)
            with contextlib.redirect_stdout(sys.stderr):
                found, _ = train(config, task, budget, [(chosen.rate, seed) for seed in chosen.seeds])
            for seed, one in zip(chosen.seeds, found, strict=True):
                cells = [name, _pair(scales), str(seed), str(chosen.steps), f"{one['bits_per_byte']:.3f}"]
                cells += [_by_layer(one["ranks"], ".2f"), _by_layer(one["time_scales"], ".1f")]
                print(f"| {' | '.join(cells)} |", flush=True)


def _pair(scales: Scales) -> str:
    return f"({scales[0]:g}, {scales[1]:g})"


def _by_layer(layers: list[Any], form: str) -> str:
    return " / ".join(" ".join(format(float(x), form) for x in heads) for heads in layers)


def _scales(text: str) -> Scales:
    shortest, longest = map(float, text.split(","))
    return shortest, longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["weights", "train"])
    parser.add_argument("--mixers", nargs="+", choices=list(MIXERS), default=list(MIXERS))
    parser.add_argument("--time-scales", nargs="+", type=_scales, default=[(8.0, 1024.0), (1.0, 32.0)])
    parser.add_argument("--length", type=int, default=512, help="bytes of a window of `weights`")
    parser.add_argument("--recent", type=int, default=4, help="tokens, the last one included")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of `train`, as are those that follow")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=3e-3)
    chosen = parser.parse_args()
    {"weights": show_weights, "train": show_training}[chosen.part](chosen)
    print(f"\n{environment()}")


if __name__ == "__main__":
    main()
