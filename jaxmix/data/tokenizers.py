"""Tokenizers: text to token ids and back, saved beside a checkpoint.

A tokenizer is asked for by a specification (`build_tokenizer`): "bytes", "bpe-N", or the path of a Hugging Face
`tokenizer.json`. Every tokenizer knows the id that begins a document and the id that ends one.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

BEGIN, END = "<|begin|>", "<|end|>"
TOKENIZER_FILE, SPECIALS_FILE, BYTES_FILE = "tokenizer.json", "tokenizer_config.json", "bytes.json"
# Names that published tokenizers use, for files that come without a tokenizer_config.json.
_KNOWN_BEGINS = (BEGIN, "<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<|endoftext|>", "<|im_start|>")
_KNOWN_ENDS = (END, "</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "<|im_end|>")


@runtime_checkable
class Tokenizer(Protocol):
    """What the pipeline, evaluation and generation need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids; every id is in [0, vocab_size)."""
        ...

    @property
    def bos_id(self) -> int:
        """The id put in front of every document."""
        ...

    @property
    def eos_id(self) -> int:
        """The id put behind every document; it stops generation."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, int32 [tokens]; no special ids are added, and none can be smuggled in by the text."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; special ids are left out, bytes that are not UTF-8 become U+FFFD."""
        ...

    def save(self, directory: Path) -> None:
        """Writes what `load_tokenizer` needs into an existing directory."""
        ...


class ByteTokenizer:
    """UTF-8 bytes: id = byte value, then the two special ids 256 (begin) and 257 (end)."""

    vocab_size, bos_id, eos_id = 258, 256, 257

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The bytes of each text's UTF-8 encoding, int32."""
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text whose UTF-8 encoding the ids below 256 are."""
        return bytes(i for i in map(int, ids) if i < 256).decode("utf-8", errors="replace")

    def save(self, directory: Path) -> None:
        """Writes `bytes.json`."""
        specials = {"vocab_size": self.vocab_size, "bos_id": self.bos_id, "eos_id": self.eos_id}
        (Path(directory) / BYTES_FILE).write_text(json.dumps(specials) + "\n", "utf-8")


class HuggingFaceTokenizer:
    """A tokenizer of the `tokenizers` library, as read from a `tokenizer.json`.

    Args:
        tokenizer: the library's tokenizer.
        bos: the token that begins a document.
        eos: the token that ends a document.

    Raises:
        ValueError: if the vocabulary has no such token.
    """

    def __init__(self, tokenizer: "RustTokenizer", *, bos: str, eos: str) -> None:
        self._tokenizer, self._bos, self._eos = tokenizer, bos, eos
        # A document that spells out "<|end|>" is text, not the end of a document.
        tokenizer.encode_special_tokens = True
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.bos_id: int = self._special("bos", bos)
        self.eos_id: int = self._special("eos", eos)

    def _special(self, argument: str, token: str) -> int:
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise ValueError(f"{argument}: expected a token of the vocabulary, got {token!r}")
        return token_id

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, int32, without special ids."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids without special tokens."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def save(self, directory: Path) -> None:
        """Writes `tokenizer.json` and, for the special tokens, `tokenizer_config.json`."""
        self._tokenizer.save(str(Path(directory) / TOKENIZER_FILE))
        specials = {"bos_token": self._bos, "eos_token": self._eos}
        (Path(directory) / SPECIALS_FILE).write_text(json.dumps(specials, indent=2) + "\n", "utf-8")


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> HuggingFaceTokenizer:
    """Trains a byte-level BPE, which reproduces any text exactly.

    Args:
        texts: what to learn the merges from; the training split and nothing else.
        vocab_size: number of ids, the 256 bytes and the 2 special ids included; a smaller text yields fewer.

    Returns:
        The tokenizer.

    Raises:
        ValueError: if `vocab_size` is below 258.

    Source: Sennrich, Haddow, Birch, "Neural Machine Translation of Rare Words with Subword Units", arXiv 1508.07909.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < 258:
        raise ValueError(f"vocab_size: expected at least 258 (256 bytes and 2 special ids), got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return HuggingFaceTokenizer(tokenizer, bos=BEGIN, eos=END)


def load_tokenizer(path: str | Path, *, bos: str | None = None, eos: str | None = None) -> Tokenizer:
    """Reads a tokenizer that was saved, or that came with a published model.

    Args:
        path: a directory that a tokenizer was saved in, or a Hugging Face `tokenizer.json` (or its directory).
        bos: the token that begins a document. Default: what the `tokenizer_config.json` beside it says, else the
            first token of the vocabulary among the usual names.
        eos: the token that ends a document, found in the same way.

    Returns:
        The tokenizer.

    Raises:
        ValueError: if there is no tokenizer at `path`, or no special token was named and none is known.
    """
    path = Path(path).expanduser()
    directory, file = (path, path / TOKENIZER_FILE) if path.is_dir() else (path.parent, path)
    if path.is_dir() and (path / BYTES_FILE).is_file():
        return ByteTokenizer()
    if not file.is_file():
        raise ValueError(f"tokenizer: expected 'bytes', 'bpe-N' or the path of a tokenizer.json, got {str(path)!r}")
    from tokenizers import Tokenizer as RustTokenizer

    try:
        tokenizer = RustTokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception on a malformed file
        raise ValueError(f"tokenizer: expected a Hugging Face tokenizer.json in {file}, got: {error}") from error
    declared = _declared_specials(directory / SPECIALS_FILE)
    return HuggingFaceTokenizer(
        tokenizer,
        bos=bos or declared.get("bos_token") or _first_known(tokenizer, "bos", _KNOWN_BEGINS),
        eos=eos or declared.get("eos_token") or _first_known(tokenizer, "eos", _KNOWN_ENDS),
    )


def _declared_specials(file: Path) -> dict[str, str]:
    if not file.is_file():
        return {}
    declared = json.loads(file.read_text("utf-8"))
    tokens = {name: declared.get(name) for name in ("bos_token", "eos_token")}
    # Published files hold the token as a string or as an object with the string under "content".
    return {n: t["content"] if isinstance(t, dict) else t for n, t in tokens.items() if t is not None}


def _first_known(tokenizer: "RustTokenizer", argument: str, names: Sequence[str]) -> str:
    for name in names:
        if tokenizer.token_to_id(name) is not None:
            return name
    raise ValueError(f"{argument}: the vocabulary has none of the usual names {list(names)}; name the token to use")


def build_tokenizer(specification: str, texts: Sequence[str]) -> Tokenizer:
    """The tokenizer that a specification asks for.

    Args:
        specification: "bytes"; "bpe-N", a byte-level BPE of N ids trained on `texts`; or a path for `load_tokenizer`.
        texts: the training split.

    Returns:
        The tokenizer.

    Raises:
        ValueError: if the specification is none of these.
    """
    if specification == "bytes":
        return ByteTokenizer()
    if specification.startswith("bpe-"):
        size = specification.removeprefix("bpe-")
        if not size.isdecimal():
            raise ValueError(f"tokenizer: expected 'bpe-N' with a number N, got {specification!r}")
        return train_bpe(texts, vocab_size=int(size))
    return load_tokenizer(specification)
