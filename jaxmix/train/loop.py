"""The training loop: from a configuration and a directory to a trained model, through any number of interruptions."""

import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxmix.data import PreparedData, load_corpus, packed_batches, prepare
from jaxmix.parallel import make_mesh
from jaxmix.train.checkpoints import Checkpoints
from jaxmix.train.config import DataConfig, TrainConfig
from jaxmix.train.optimizer import learning_rate, make_optimizer
from jaxmix.train.routing import routing_probe
from jaxmix.train.run import Metrics, RunDirectory, build_decoder
from jaxmix.train.step import Batch, init_state, make_eval_step, make_train_step, split_model

# Draws the validation windows that the curve is measured on; the same ones for every run on the same data.
_EVALUATION_SEED = 0


@dataclass(frozen=True)
class FitResult:
    """How a call of `fit` ended.

    Attributes:
        status: "finished" by this call, "interrupted" (a rerun goes on from `step`), or "already finished".
        step: updates made in all.
    """

    status: Literal["finished", "interrupted", "already finished"]
    step: int


class Watcher:
    """Who is told how training goes. This one shows nothing; `jaxmix.train.progress.Progress` is for terminals."""

    def prepared(self, config: TrainConfig, data: PreparedData, parameters: int, start: int) -> None:
        """Called once, before the first update; `start` updates were made by earlier calls."""

    def stepped(self, step: int, loss: float, tokens: int) -> None:
        """Called after every update with its loss in nats per token and the tokens seen by this call so far."""

    def evaluated(self, step: int, loss: float) -> None:
        """Called after every look at the validation loss, in nats per token."""


def fit(
    config: TrainConfig, directory: str | Path, *, devices: int | None = None, watcher: Watcher | None = None
) -> FitResult:
    """Trains a decoder, or goes on with a run that was interrupted, or finds that it is finished.

    An interrupted run goes on exactly: on as many devices, the losses are, bit for bit, those of a run that was not
    interrupted. SIGINT and SIGTERM end the update in hand, save a checkpoint and return.

    Args:
        config: the run.
        directory: of the run; see `jaxmix.train.run` for what is in it.
        devices: how many devices of this process share a batch; by default the most that divide it.
        watcher: who is told; nobody by default.

    Returns:
        How it ended.

    Raises:
        ValueError: if the configuration cannot be served, or the directory holds another run.
        FloatingPointError: if the loss is not finite. The checkpoints saved before are left.
    """
    run, watcher = RunDirectory(Path(directory)), watcher or Watcher()
    learning_rate(config.optimizer, config.steps)  # a schedule that cannot be served fails before data are prepared
    run.check_same(config)
    mesh = make_mesh(data=devices or sharing_devices(config.data.batch_size, len(jax.devices())))
    corpus = load_corpus(config.data.corpus, validation_fraction=config.data.validation_fraction)
    if config.data.newest is not None:
        corpus = corpus.newest(config.data.newest)
    data = prepare(corpus, config.data.tokenizer, run.data)
    config = run.resolve(config, data.manifest.vocab_size)
    run.tokenizer.mkdir(exist_ok=True)
    data.tokenizer.save(run.tokenizer)
    config.save(run.config_file)
    with Checkpoints(run.checkpoints, keep=config.keep_checkpoints) as checkpoints:
        if checkpoints.latest == config.steps:
            return FitResult("already finished", config.steps)
        return _Loop(config, run, data, checkpoints, watcher, mesh).run_to_end()


def sharing_devices(batch_size: int, available: int) -> int:
    """The most devices of those available that a batch can be shared out to in equal parts."""
    return max(count for count in range(1, available + 1) if batch_size % count == 0)


def train_batches(config: DataConfig, directory: Path, seed: int) -> Any:
    """The endless iterator of training batches of a run."""
    return iter(
        packed_batches(
            directory,
            "train",
            length=config.length,
            batch_size=config.batch_size,
            seed=seed,
            repeat=True,
            shuffle_window=config.shuffle_window,
            workers=config.workers,
        )
    )


def evaluation_batches(config: DataConfig, directory: Path, count: int) -> list[Batch]:
    """The validation batches that the curve is measured on: a fixed draw of at most `count`."""
    batches = packed_batches(
        directory,
        "validation",
        length=config.length,
        batch_size=config.batch_size,
        seed=_EVALUATION_SEED,
        shuffle_window=config.shuffle_window,
    )
    return list(islice(batches, count))


class _Loop:
    """One call of `fit` after everything is prepared."""

    def __init__(
        self,
        config: TrainConfig,
        run: RunDirectory,
        data: PreparedData,
        checkpoints: Checkpoints,
        watcher: Watcher,
        mesh: jax.sharding.Mesh,
    ) -> None:
        self.config, self.checkpoints, self.watcher = config, checkpoints, watcher
        structure, params = split_model(build_decoder(config))
        optimizer = make_optimizer(config.optimizer, config.steps)
        self.rates = np.asarray(jax.vmap(learning_rate(config.optimizer, config.steps))(np.arange(config.steps)))
        everywhere, self.shared = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec("data")))
        self.state = jax.device_put(init_state(params, optimizer), everywhere)
        self.batches = train_batches(config.data, data.directory, config.seed)
        self.evaluation = evaluation_batches(config.data, data.directory, config.eval_batches)
        if checkpoints.latest == 0:  # of an imported model, or before the first update: the rest is as it begins
            self.state = dataclasses.replace(self.state, params=checkpoints.restore_params(self.state.params))
        elif checkpoints.latest is not None:
            self.state, data_state = checkpoints.restore(self.state)
            self.batches.set_state(data_state)
        self.step = int(self.state.step)
        self.train_step = make_train_step(structure, optimizer, sharding=everywhere)
        self.eval_step = make_eval_step(structure)
        self.routing = routing_probe(structure, config.decoder, self.evaluation, self.shared)
        self.metrics = Metrics(run.metrics, resume_after=self.step)
        self.tokens, self.started = 0, time.monotonic()
        self.unread: tuple[int, dict[str, Any]] | None = None
        parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
        watcher.prepared(config, data, parameters, self.step)

    def run_to_end(self) -> FitResult:
        try:
            with _interruptible() as interrupted:
                while self.step < self.config.steps and not interrupted():
                    self.update()
                    if self.due(self.config.eval_every):
                        self.evaluate()
                    if self.due(self.config.checkpoint_every):
                        self.save()
                self.save()
            return FitResult("finished" if self.step == self.config.steps else "interrupted", self.step)
        finally:
            self.metrics.close()

    def due(self, every: int) -> bool:
        return self.step == self.config.steps or (every > 0 and self.step % every == 0)

    def update(self) -> None:
        batch = next(self.batches)
        self.state, metrics = self.train_step(self.state, jax.device_put(batch, self.shared))
        # The metrics of the update before are read while this one runs.
        self.read_metrics()
        self.step += 1
        self.tokens += int(np.count_nonzero(batch["segment_ids"]))
        self.unread = (self.step, metrics)

    def read_metrics(self) -> None:
        if self.unread is None:
            return
        (step, metrics), self.unread = self.unread, None
        loss = float(metrics["loss"])
        record = {
            "step": step,
            "loss": loss,
            "grad_norm": float(metrics["grad_norm"]),
            "learning_rate": float(self.rates[step - 1]),
            "labels": int(metrics["labels"]),
            "seconds": round(time.monotonic() - self.started, 3),
        }
        self.metrics.write(record)
        if not math.isfinite(loss) or not math.isfinite(record["grad_norm"]):
            raise FloatingPointError(
                f"update {step}: loss {loss}, gradient norm {record['grad_norm']}; the last checkpoint is that of "
                f"step {self.checkpoints.latest}. A smaller learning_rate or clip_norm may help."
            )
        self.watcher.stepped(step, loss, self.tokens)

    def evaluate(self) -> None:
        self.read_metrics()
        sums = [self.eval_step(self.state.params, jax.device_put(batch, self.shared)) for batch in self.evaluation]
        nats, labels = (sum(float(pair[i]) for pair in sums) for i in range(2))
        routing = self.routing(self.state.params)
        self.metrics.write({"step": self.step, "validation_loss": nats / labels, **routing})
        self.watcher.evaluated(self.step, nats / labels)

    def save(self) -> None:
        self.read_metrics()
        self.checkpoints.save(self.state, self.batches.get_state())


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Turns the first SIGINT or SIGTERM into a flag; a second one acts as usual."""
    caught = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield caught.is_set  # only the main thread may set signal handlers
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def catch(number: int, frame: Any) -> None:
        caught.set()
        restore()

    for number in before:
        signal.signal(number, catch)
    try:
        yield caught.is_set
    finally:
        restore()
