"""Named training runs."""

from jaxmix.models import DecoderConfig
from jaxmix.nn import HLAConfig
from jaxmix.train.config import DataConfig, OptimizerConfig, TrainConfig

QUICKSTART = TrainConfig(
    model=DecoderConfig(
        vocab_size=2048,
        d_model=192,
        layers=(HLAConfig(heads=6),) * 3,
        hidden=512,
        tie_embeddings=True,
    ),
    data=DataConfig(corpus="sotu", tokenizer="bpe-2048", length=256, batch_size=8),
    optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=50),
    steps=600,
    eval_every=50,
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
