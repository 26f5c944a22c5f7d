"""Training on the terminal: a bar with loss, speed and time left, and a line for every look at the validation loss."""

import math
import time
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from jaxmix.data import PreparedData
from jaxmix.train.config import TrainConfig
from jaxmix.train.loop import Watcher

# The loss shown is an average over about this many updates.
_SMOOTHING_STEPS = 20


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Nats per token to bits per byte, by the mean size of a token."""
    return loss / math.log(2) / bytes_per_token


class _Speed(ProgressColumn):
    def render(self, task: Task) -> Text:
        rate = task.fields["rate"]
        return Text("" if rate is None else f"{rate:,.0f} tokens/s", style="cyan")


class Progress(Watcher):
    """Shows a run on a console; use as a context manager around `fit`.

    On something that is not a terminal there is no bar, only the lines.

    Args:
        console: where to.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = RichProgress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            _Speed(),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            refresh_per_second=4,
            disable=not console.is_terminal,
        )
        self._average, self._first = None, None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()

    def prepared(self, config: TrainConfig, data: PreparedData, parameters: int, start: int) -> None:
        """Prints what is trained on what."""
        train = data.manifest.splits["train"]
        self._bytes_per_token = {name: split.bytes_per_token for name, split in data.manifest.splits.items()}
        self._steps = config.steps
        tokens = config.steps * config.data.batch_size * config.data.length
        self._console.print(
            f"[bold]{config.data.corpus}[/]: {train.text_bytes / 1e6:.1f} MB in {train.documents} documents to train "
            f"on, {data.manifest.splits['validation'].text_bytes / 1e6:.1f} MB to validate on; "
            f"{config.data.tokenizer}: {data.manifest.vocab_size:,} ids, {train.bytes_per_token:.2f} bytes a token",
            highlight=False,
        )
        self._console.print(
            f"[bold]{parameters:,} parameters[/], {len(config.decoder.layers)} layers; {config.steps:,} updates of "
            f"{config.data.batch_size} x {config.data.length} tokens, {tokens / train.tokens:.2f} epochs",
            highlight=False,
        )
        if start:
            self._console.print(f"going on from step {start:,}", highlight=False)
        self._task = self._bar.add_task("training", total=config.steps, completed=start, loss="", rate=None)

    def stepped(self, step: int, loss: float, tokens: int) -> None:
        """Moves the bar."""
        now = time.monotonic()
        if self._first is None:  # the first update compiles: the speed is measured from its end
            self._first = (now, tokens)
        bits = bits_per_byte(loss, self._bytes_per_token["train"])
        weight = 1.0 if self._average is None else 1.0 / _SMOOTHING_STEPS
        self._average = bits if self._average is None else self._average + weight * (bits - self._average)
        self._bar.update(
            self._task, completed=step, loss=f"loss {self._average:.3f} bits/byte", rate=self._rate(now, tokens)
        )
        self._tokens = tokens

    def evaluated(self, step: int, loss: float) -> None:
        """Prints a line."""
        rate = self._rate(time.monotonic(), self._tokens)
        speed = "" if rate is None else f"   {rate:,.0f} tokens/s"
        self._console.print(
            f"step {step:>{len(str(self._steps))}}   train {self._average:.3f}   "
            f"validation {bits_per_byte(loss, self._bytes_per_token['validation']):.3f} bits/byte{speed}",
            highlight=False,
        )

    def _rate(self, now: float, tokens: int) -> float | None:
        if self._first is None or tokens == self._first[1]:
            return None
        return (tokens - self._first[1]) / (now - self._first[0])
