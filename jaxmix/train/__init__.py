"""Training a decoder on text. Needs the extras `data` and `train`; the progress bar `cli`, the picture `plots`."""

from jaxmix.train.config import DataConfig, OptimizerConfig, TrainConfig
from jaxmix.train.loop import FitResult, Watcher, fit
from jaxmix.train.presets import TRAIN_PRESETS, get_train_preset
from jaxmix.train.run import RunDirectory, load_run, read_metrics

__all__ = [
    "TRAIN_PRESETS",
    "DataConfig",
    "FitResult",
    "OptimizerConfig",
    "RunDirectory",
    "TrainConfig",
    "Watcher",
    "fit",
    "get_train_preset",
    "load_run",
    "read_metrics",
]
