"""Runs from published checkpoints, and published checkpoints from runs. Needs the extra `weights` too."""

import json
import shutil
from pathlib import Path
from typing import Any

from jaxmix.arrays import fail
from jaxmix.data.tokenizers import SPECIALS_FILE, TOKENIZER_FILE, HuggingFaceTokenizer, Tokenizer, load_tokenizer
from jaxmix.models import Decoder
from jaxmix.models.weights import load_decoder, save_decoder
from jaxmix.models.weights.files import CONFIG, check_new_directory, read_json
from jaxmix.train.checkpoints import Checkpoints
from jaxmix.train.config import DataConfig, TrainConfig
from jaxmix.train.run import RunDirectory, load_run
from jaxmix.train.step import split_model

# Files that say more of a tokenizer; carried along as they are.
_TOKENIZER_COMPANIONS = ("special_tokens_map.json", "chat_template.jinja")


def import_run(
    source: str | Path,
    directory: str | Path,
    *,
    tokenizer: str | Path | None = None,
    dtype: str | None = None,
    param_dtype: str | None = None,
    capacity: int | None = None,
) -> Decoder:
    """Makes a run of a published checkpoint: what `load_run`, generation, evaluation and training read.

    Args:
        source: directory with config.json, safetensors and, if `tokenizer` is not given, tokenizer.json.
        directory: of the run; must be empty or not exist.
        tokenizer: a tokenizer.json or a directory with one, in place of the source's.
        dtype: see `jaxmix.models.weights.load_decoder`.
        param_dtype: likewise.
        capacity: likewise.

    Returns:
        The decoder.

    Raises:
        ValueError: if the directory holds something already, there is no tokenizer, it has more ids than the model, or
            the checkpoint is not what its config.json says.
        NotImplementedError: for an architecture or option that the decoder has not.
    """
    source, run = Path(source).expanduser(), RunDirectory(Path(directory).expanduser())
    check_new_directory("run_directory", run.path)
    fields = read_json(source / CONFIG)
    origin = source if tokenizer is None else Path(tokenizer).expanduser()
    model = load_decoder(source, dtype=dtype, param_dtype=param_dtype, capacity=capacity)
    loaded = _load_tokenizer(origin, fields)
    if loaded.vocab_size > model.config.vocab_size:
        fail("tokenizer", f"at most the {model.config.vocab_size} ids of the model", loaded.vocab_size)
    run.tokenizer.mkdir(parents=True)
    _copy_tokenizer(loaded, origin, run.tokenizer)
    _, params = split_model(model)
    with Checkpoints(run.checkpoints) as checkpoints:
        checkpoints.save_params(params)
    provenance = {"source": str(source.resolve()), "architecture": fields["architectures"][0]}
    run.imported.write_text(json.dumps(provenance, indent=2) + "\n", "utf-8")
    TrainConfig(model=model.config, data=DataConfig(tokenizer=str(run.tokenizer.resolve()))).save(run.config_file)
    return model


def export_run(run_or_checkpoint: str | Path, target: str | Path, *, dtype: str | None = None) -> None:
    """Writes the model of a run, with its tokenizer, as a published checkpoint.

    Args:
        run_or_checkpoint: directory of a run, for its latest checkpoint, or RUN/checkpoints/STEP.
        target: directory, which must be empty or not exist.
        dtype: see `jaxmix.models.weights.save_decoder`.

    Raises:
        ValueError: if there is no such run or checkpoint, or the target holds something already.
        NotImplementedError: if no published architecture holds the model; the message says why not.
    """
    path, target = Path(run_or_checkpoint).expanduser(), Path(target).expanduser()
    check_new_directory("target", target)
    step = None
    if path.resolve().parent.name == "checkpoints" and path.name.isdecimal():
        path, step = path.resolve().parents[1], int(path.name)
    model, tokenizer, _ = load_run(path, step=step)
    save_decoder(model, target, dtype=dtype, extra={"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id})
    for file in sorted(RunDirectory(path).tokenizer.iterdir()):
        shutil.copyfile(file, target / file.name)
    specials = target / SPECIALS_FILE
    if specials.is_file():
        # Without a class transformers would rebuild the tokenizer in the way usual for the architecture.
        declared = {"tokenizer_class": "PreTrainedTokenizerFast"} | read_json(specials)
        specials.write_text(json.dumps(declared, indent=2) + "\n", "utf-8")


def _load_tokenizer(origin: Path, fields: dict[str, Any]) -> Tokenizer:
    """The tokenizer, whose special tokens are those of its own files, else those of the model's config.json."""
    directory = origin if origin.is_dir() else origin.parent
    file = origin / TOKENIZER_FILE if origin.is_dir() else origin
    declared = read_json(directory / SPECIALS_FILE) if (directory / SPECIALS_FILE).is_file() else {}
    content = read_json(file) if file.is_file() else {}
    added = {token["id"]: token["content"] for token in content.get("added_tokens", ())}
    specials = {}
    for name in ("bos", "eos"):
        ids = fields.get(f"{name}_token_id")
        first = ids[0] if isinstance(ids, list) and ids else ids
        specials[name] = added.get(first) if declared.get(f"{name}_token") is None else None
    return load_tokenizer(origin, **specials)


def _copy_tokenizer(tokenizer: Tokenizer, origin: Path, directory: Path) -> None:
    """Saves a tokenizer, keeping what its source says beyond what `Tokenizer.save` writes."""
    tokenizer.save(directory)
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return
    file, beside = (origin / TOKENIZER_FILE, origin) if origin.is_dir() else (origin, origin.parent)
    shutil.copyfile(file, directory / TOKENIZER_FILE)
    if (beside / SPECIALS_FILE).is_file():
        saved, given = read_json(directory / SPECIALS_FILE), read_json(beside / SPECIALS_FILE)
        named = {name: value for name, value in given.items() if value is not None}
        (directory / SPECIALS_FILE).write_text(json.dumps(saved | named, indent=2) + "\n", "utf-8")
    for name in _TOKENIZER_COMPANIONS:
        if (beside / name).is_file():
            shutil.copyfile(beside / name, directory / name)
