"""Token shards: array_record files with one document a record, and a manifest that says what they hold."""

import dataclasses
import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True)
class SplitManifest:
    """What the shards of one split hold.

    Attributes:
        shards: file names, in order.
        documents: number of records.
        tokens: number of ids in all records, the begin and end ids of every document included.
        text_bytes: size of the documents' text in UTF-8 bytes.
    """

    shards: tuple[str, ...]
    documents: int
    tokens: int
    text_bytes: int

    @property
    def text_tokens(self) -> int:
        """Number of ids that stand for text: all but the begin and end id of each document."""
        return self.tokens - 2 * self.documents

    @property
    def bytes_per_token(self) -> float:
        """Mean size in bytes of a text token."""
        return self.text_bytes / self.text_tokens


@dataclass(frozen=True)
class Manifest:
    """What a directory of shards holds.

    Attributes:
        fingerprint: identifies the corpus and the tokenizer that the shards were made of.
        vocab_size: every id is below it.
        splits: split name to its shards.
    """

    fingerprint: str
    vocab_size: int
    splits: dict[str, SplitManifest]

    def save(self, directory: Path) -> None:
        """Writes `manifest.json`, by a rename, so that a manifest that can be read is complete."""
        partial = directory / (MANIFEST_FILE + ".partial")
        partial.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", "utf-8")
        partial.replace(directory / MANIFEST_FILE)

    @classmethod
    def load(cls, directory: Path) -> "Manifest":
        """Reads `manifest.json`.

        Raises:
            ValueError: if the directory has none.
        """
        file = directory / MANIFEST_FILE
        if not file.is_file():
            raise ValueError(f"directory: expected prepared shards with a {MANIFEST_FILE}, got {str(directory)!r}")
        content = json.loads(file.read_text("utf-8"))
        splits = {
            name: SplitManifest(**{**split, "shards": tuple(split["shards"])})
            for name, split in content.pop("splits").items()
        }
        return cls(splits=splits, **content)


def token_dtype(vocab_size: int) -> np.dtype:
    """Little-endian uint16 where every id fits (vocab_size <= 65536), else little-endian uint32."""
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


def write_shards(
    directory: Path, split: str, documents: Iterable[np.ndarray], *, vocab_size: int, tokens_per_shard: int = 2**27
) -> tuple[str, ...]:
    """Writes one document a record, as raw ids of `token_dtype(vocab_size)`.

    Args:
        directory: where the files go; it exists.
        split: begins the names of the files.
        documents: ids of each document, integers [tokens].
        vocab_size: sets the dtype and bounds the ids.
        tokens_per_shard: a new file begins once the last one holds this many ids.

    Returns:
        The names of the files, `SPLIT-00000.array_record` and on.

    Raises:
        ValueError: if an id is not in [0, vocab_size).
    """
    dtype, names = token_dtype(vocab_size), []
    writer, held = None, 0
    try:
        for number, document in enumerate(documents):
            if document.size and not 0 <= document.min() <= document.max() < vocab_size:
                raise ValueError(
                    f"documents: expected ids in [0, {vocab_size}), got {document.min()} to {document.max()} "
                    f"in document {number}"
                )
            if writer is None or held >= tokens_per_shard:
                if writer is not None:
                    writer.close()
                names.append(f"{split}-{len(names):05d}.array_record")
                # One record a group lets a shuffled reader fetch one document without decoding its neighbours.
                writer, held = ArrayRecordWriter(str(directory / names[-1]), "group_size:1"), 0
            writer.write(document.astype(dtype).tobytes())
            held += document.size
    finally:
        if writer is not None:
            writer.close()
    return tuple(names)


def decode_tokens(record: bytes, dtype: np.dtype) -> dict[str, np.ndarray]:
    """A record as {"tokens": int32 [tokens]}; `dtype` is that of `token_dtype`."""
    return {"tokens": np.frombuffer(record, dtype).astype(np.int32)}


def read_shards(directory: Path, split: str) -> grain.MapDataset:
    """The documents of a split by index, each {"tokens": int32 [tokens]}.

    Args:
        directory: where `prepare` wrote the shards.
        split: "train" or "validation".

    Raises:
        ValueError: if the directory has no manifest or no such split.
    """
    manifest = Manifest.load(directory)
    if split not in manifest.splits:
        raise ValueError(f"split: expected one of {sorted(manifest.splits)}, got {split!r}")
    files: Sequence[str] = [str(directory / name) for name in manifest.splits[split].shards]
    # The source has the methods of a sequence, but its package declares no types that say so.
    source: Any = grain.sources.ArrayRecordDataSource(files)
    decode = functools.partial(decode_tokens, dtype=token_dtype(manifest.vocab_size))
    return grain.MapDataset.source(source).map(decode)
