"""A training run that takes a second, for tests."""

from pathlib import Path

from jaxmix.models import DecoderConfig
from jaxmix.nn import LinearAttentionConfig
from jaxmix.train import DataConfig, OptimizerConfig, TrainConfig

TEXT = "".join(f"Line {number}: the cat sat on mat {number * 7 % 13}, and the rat ran.\n" for number in range(120))
LAYER = LinearAttentionConfig(heads=2, conv_width=0, gate=False, output_norm=False, chunk_size=16)


def write_corpus(directory: Path) -> Path:
    for number in range(6):
        (directory / f"{number}.txt").write_text(TEXT[number * 300 :], "utf-8")
    return directory


def small_run(corpus: Path, **options) -> TrainConfig:
    data = {"corpus": str(corpus), "tokenizer": "bytes", "length": 16, "batch_size": 2, "shuffle_window": 8}
    return TrainConfig(
        model=DecoderConfig(vocab_size=8, d_model=8, layers=(LAYER,), hidden=8, tie_embeddings=True),
        data=DataConfig(**{**data, **options.pop("data", {})}),
        optimizer=OptimizerConfig(**{"learning_rate": 1e-2, "warmup_steps": 2, **options.pop("optimizer", {})}),
        **{"steps": 9, "eval_every": 4, "eval_batches": 2, "checkpoint_every": 3, **options},
    )
