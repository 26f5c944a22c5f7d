"""Training steps of whole decoders: tokens a second, and the share of the measured matrix product speed (MFU)."""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmix.arrays import Array
from jaxmix.bench.ceilings import Ceilings
from jaxmix.bench.gate import WrongResult
from jaxmix.bench.hlo import custom_calls
from jaxmix.bench.jax_cases import peak_bytes
from jaxmix.bench.loop import LoopOptions, to_timing
from jaxmix.bench.report import Row
from jaxmix.models import Decoder, DecoderConfig, flops_per_token, get_preset, parameter_count
from jaxmix.nn import HLAConfig, SoftmaxAttentionConfig

LENGTHS = (4096, 16384)
TOKENS = {"125m": 65536, "1.3b": 32768}
"""Tokens of a batch at every length."""
WIDTHS = 128
"""SwiGLU widths are multiples of it."""


@dataclasses.dataclass(frozen=True)
class TrainingEntry:
    """A training step to be timed.

    Attributes:
        name: title of the model.
        config: the model.
        batch: sequences B.
        length: tokens T.
    """

    name: str
    config: DecoderConfig
    batch: int
    length: int

    @property
    def title(self) -> str:
        """What `match` looks into."""
        return f"training: {self.name}, ({self.batch}, {self.length})"

    def measure(self, loop: LoopOptions, ceilings: Ceilings) -> Row:
        """Times steps on one batch; the loss has to be finite and to fall."""
        # jaxmix.train needs packages that a machine for benchmarks may lack; then only these rows are missing.
        from jaxmix.train.config import OptimizerConfig
        from jaxmix.train.optimizer import make_optimizer
        from jaxmix.train.step import init_state, make_train_step, split_model

        structure, params = split_model(Decoder(self.config, rngs=nnx.Rngs(0)))
        steps = loop.runs + 2
        optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-3, warmup_steps=1), steps + 1)
        state, batch = init_state(params, optimizer), self.draw()
        del params
        compiled: Any = make_train_step(structure, optimizer).lower(state, batch).compile()
        losses, seconds = [], []
        for _ in range(steps):
            start = time.perf_counter()
            state, metrics = compiled(state, batch)
            losses.append(float(metrics["loss"]))
            seconds.append(time.perf_counter() - start)
        if not (np.isfinite(losses).all() and losses[-1] < losses[0]):
            raise WrongResult(f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")
        timing = to_timing(seconds[2:])
        flops = self.batch * self.length * sum(flops_per_token(self.config, self.length).values())
        values = {
            "M parameters": parameter_count(self.config) / 1e6,
            "milliseconds": timing.median * 1e3,
            "lower quartile": timing.lower * 1e3,
            "upper quartile": timing.upper * 1e3,
            "runs": timing.repeats,
            "tokens/s": self.batch * self.length / timing.median,
            "TFLOP": flops / 1e12,
            "MFU": flops / timing.median / ceilings.matmul,
            "peak MB": (peak_bytes(compiled.memory_analysis()) or 0) / 1e6,
            "first loss": losses[0],
            "last loss": losses[-1],
        }
        served = custom_calls(compiled.as_text() or "")
        return Row("training", self.name, self.shape, values, f"custom calls: {', '.join(served)}" if served else "")

    @property
    def shape(self) -> str:
        """(B, T)."""
        return f"({self.batch}, {self.length})"

    def draw(self) -> dict[str, Array | None]:
        """A batch of random tokens; without documents, so that softmax attention needs no mask and takes cuDNN."""
        shape = (self.batch, self.length)
        tokens = jax.random.randint(jax.random.key(0), shape, 0, self.config.vocab_size)
        return {
            "tokens": tokens,
            "labels": jnp.roll(tokens, -1, axis=1),
            "weights": jnp.ones(shape),
            "segment_ids": None,
            "positions": None,
        }

    def failed(self, why: str) -> Row:
        """The row that says why there is nothing."""
        return Row("training", self.name, self.shape, {}, why)


def training_entries() -> list[TrainingEntry]:
    """A second-order HLA decoder beside the same decoder with softmax attention, two sizes, two lengths.

    Both have the same number of parameters, up to a step of `WIDTHS`: the SwiGLUs beside HLA are narrower by its gate.
    """
    found = []
    for scale, tokens in TOKENS.items():
        base = get_preset(f"softmax-{scale}")
        heads = base.layers[0].heads
        hla = dataclasses.replace(base, layers=(HLAConfig(heads=heads, order=2),) * len(base.layers))
        extra = (parameter_count(hla) - parameter_count(base)) / (3 * base.d_model * len(base.layers))
        hla = dataclasses.replace(hla, hidden=base.hidden - WIDTHS * round(extra / WIDTHS))
        for length in LENGTHS:
            softmax = SoftmaxAttentionConfig(heads=heads, capacity=length)
            softmax = dataclasses.replace(base, layers=(softmax,) * len(base.layers))
            for name, config in (("hla2", hla), ("softmax", softmax)):
                found.append(TrainingEntry(f"{name} {scale}", config, tokens // length, length))
    return found
