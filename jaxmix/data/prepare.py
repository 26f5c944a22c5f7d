"""From a corpus to shards: fit the tokenizer on the training split, encode both splits, write them once."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxmix.data.corpora import SPLITS, Corpus, Document
from jaxmix.data.shards import MANIFEST_FILE, Manifest, SplitManifest, write_shards
from jaxmix.data.tokenizers import Tokenizer, build_tokenizer, load_tokenizer

TOKENIZER_FOLDER = "tokenizer"
# Documents encoded at a time: enough for the encoder's threads, few enough to bound memory.
_ENCODE_BATCH = 256


@dataclass(frozen=True)
class PreparedData:
    """A directory of shards with its tokenizer.

    Attributes:
        directory: holds the shards, `manifest.json` and the folder `tokenizer`.
        manifest: what the shards hold.
        tokenizer: what they were encoded with.
    """

    directory: Path
    manifest: Manifest
    tokenizer: Tokenizer


def prepare(corpus: Corpus, tokenizer: str, directory: str | Path) -> PreparedData:
    """Encodes a corpus into shards, or finds that this was done before.

    Every document becomes one record: the begin id, the ids of its text, the end id.

    Args:
        corpus: the documents.
        tokenizer: a specification for `jaxmix.data.tokenizers.build_tokenizer`.
        directory: where the shards go. Shards of the same corpus and specification that are there are kept, others
            are written anew.

    Returns:
        The prepared data.

    Raises:
        ValueError: if `tokenizer` is no specification.
    """
    directory = Path(directory)
    fingerprint = _fingerprint(corpus, tokenizer)
    if (directory / MANIFEST_FILE).is_file():
        manifest = Manifest.load(directory)
        if manifest.fingerprint == fingerprint:
            return PreparedData(directory, manifest, load_tokenizer(directory / TOKENIZER_FOLDER))
    fitted = build_tokenizer(tokenizer, [document.text for document in corpus.train])
    (directory / TOKENIZER_FOLDER).mkdir(parents=True, exist_ok=True)
    (directory / MANIFEST_FILE).unlink(missing_ok=True)
    fitted.save(directory / TOKENIZER_FOLDER)
    splits = {split: _write_split(directory, split, corpus.split(split), fitted) for split in SPLITS}
    manifest = Manifest(fingerprint=fingerprint, vocab_size=fitted.vocab_size, splits=splits)
    manifest.save(directory)
    return PreparedData(directory, manifest, fitted)


def encode_documents(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[np.ndarray]:
    """The ids of each document between its begin and end id, int32 [tokens + 2]."""
    encoded = tokenizer.encode_batch([document.text for document in documents])
    return [np.concatenate([[tokenizer.bos_id], ids, [tokenizer.eos_id]]).astype(np.int32) for ids in encoded]


def _write_split(directory: Path, split: str, documents: Sequence[Document], tokenizer: Tokenizer) -> SplitManifest:
    tokens = 0

    def encoded():
        nonlocal tokens
        for start in range(0, len(documents), _ENCODE_BATCH):
            for ids in encode_documents(tokenizer, documents[start : start + _ENCODE_BATCH]):
                tokens += ids.size
                yield ids

    shards = write_shards(directory, split, encoded(), vocab_size=tokenizer.vocab_size)
    return SplitManifest(shards, len(documents), tokens, sum(document.size for document in documents))


def _fingerprint(corpus: Corpus, tokenizer: str) -> str:
    digest = hashlib.sha256(f"{corpus.fingerprint()}\n{tokenizer}\n".encode())
    file = Path(tokenizer).expanduser()
    if file.is_file():
        digest.update(file.read_bytes())
    return digest.hexdigest()
