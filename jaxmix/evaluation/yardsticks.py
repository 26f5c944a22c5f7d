"""Yardsticks: what simple, well understood predictors reach on the same validation text, in bits per byte.

A language model that does not beat them has learnt less than counting or copying gives.
"""

import lzma
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

MAX_ORDER = 7  # a context of 7 bytes and the byte after it fill one uint64


@dataclass(frozen=True)
class Yardsticks:
    """Bits per byte of the validation documents.

    Attributes:
        byte_model: order (bytes of context) to the bits per byte of the interpolated byte model of that order.
        xz_alone: `xz -9e` of the validation text by itself.
        xz_after_training: what the validation text adds to the size of `xz -9e` of the training text in front of it.
        text_bytes: size of the validation text in bytes.
    """

    byte_model: dict[int, float]
    xz_alone: float
    xz_after_training: float
    text_bytes: int

    @property
    def best_order(self) -> int:
        """The order that does best on the validation text: chosen there, which favours the yardstick."""
        return min(self.byte_model, key=lambda order: self.byte_model[order])

    @property
    def best_byte_model(self) -> float:
        """Bits per byte of the byte model of `best_order`."""
        return self.byte_model[self.best_order]


def yardsticks(train: Sequence[str], validation: Sequence[str], *, max_order: int = MAX_ORDER) -> Yardsticks:
    """Fits every yardstick on the training documents and judges it on the validation documents.

    Args:
        train: texts.
        validation: texts.
        max_order: byte models of order 0 to `max_order`, at most 7.

    Returns:
        The bits per byte.

    Raises:
        ValueError: if a split has no text or `max_order` is out of range.
    """
    train_bytes = [text.encode("utf-8") for text in train]
    validation_bytes = [text.encode("utf-8") for text in validation]
    byte_model = byte_model_bits_per_byte(train_bytes, validation_bytes, max_order=max_order)
    alone, after_training = xz_bits_per_byte(train_bytes, validation_bytes)
    return Yardsticks(byte_model, alone, after_training, sum(map(len, validation_bytes)))


def xz_bits_per_byte(train: Sequence[bytes], validation: Sequence[bytes]) -> tuple[float, float]:
    """Bits per byte of the validation text under `xz -9e`: alone, and as what it adds behind the training text.

    Args:
        train: documents; those of the last 64 MiB can be referred to.
        validation: documents.

    Returns:
        (8 |xz(V)| / |V|, 8 (|xz(T V)| - |xz(T)|) / |V|), where T and V are the documents put end to end.

    Raises:
        ValueError: if `validation` has no text.
    """
    before, text = b"".join(train), b"".join(validation)
    if not text:
        raise ValueError("validation: expected some text, got none")

    def size(data: bytes) -> int:
        return len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))

    # The compressor releases the interpreter lock: the two long jobs run side by side.
    with ThreadPoolExecutor(max_workers=2) as pool:
        alone, both, train_alone = pool.map(size, (text, before + text, before))
    return 8 * alone / len(text), 8 * (both - train_alone) / len(text)


class _OrderCounts(NamedTuple):
    """Counts of one order: grams and contexts are codes, sorted; types counts the distinct bytes after a context."""

    grams: np.ndarray
    gram_counts: np.ndarray
    contexts: np.ndarray
    context_counts: np.ndarray
    context_types: np.ndarray


def byte_model_bits_per_byte(
    train: Sequence[bytes], validation: Sequence[bytes], *, max_order: int = MAX_ORDER
) -> dict[int, float]:
    """Bits per byte of interpolated byte models with Witten-Bell smoothing, of every order up to `max_order`.

    With c the counts of the training documents, u a context of n bytes, u' the same without its oldest byte, and t(u)
    the number of distinct bytes seen after u:

        p_n(x | u) = (c(u x) + t(u) p_{n-1}(x | u')) / (c(u) + t(u)),   p_n = p_{n-1} where c(u) = 0,   p_{-1} = 1/256

    Contexts stay inside a document: the first bytes of one are predicted from as many bytes as there are.

    Args:
        train: documents to count.
        validation: documents to predict, every byte once.
        max_order: largest n, 0 to 7.

    Returns:
        Order n to the mean of -log2 p_n over the validation bytes.

    Raises:
        ValueError: if a split has no text or `max_order` is out of range.

    Source: Witten, Bell, "The zero-frequency problem", IEEE Transactions on Information Theory 37(4), 1991; the
    interpolated form as in Chen, Goodman, "An empirical study of smoothing techniques for language modeling", 1999.
    """
    if not 0 <= max_order <= MAX_ORDER:
        raise ValueError(f"max_order: expected 0 to {MAX_ORDER}, got {max_order}")
    for name, documents in (("train", train), ("validation", validation)):
        if not any(documents):
            raise ValueError(f"{name}: expected some text, got none")
    train_codes, train_left, _ = _codes(train)
    codes, _, offsets = _codes(validation)
    # The grams of every order are prefixes of those of the highest, so that one sort serves all orders.
    whole = train_left > MAX_ORDER
    sorted_codes, tails, tail_left = np.sort(train_codes[whole]), train_codes[~whole], train_left[~whole]
    probability = np.full(codes.size, 1.0 / 256.0)
    bits = {}
    for order in range(max_order + 1):
        shift = np.uint64(8 * (MAX_ORDER - order))
        grams = sorted_codes >> shift
        extra = np.sort(tails[tail_left > order] >> shift)
        counts = _count(np.insert(grams, np.searchsorted(grams, extra), extra))
        position = np.flatnonzero(offsets >= order)
        _interpolate(probability, position, codes[position - order] >> shift, counts)
        bits[order] = float(-np.log2(probability).mean())
    return bits


def _codes(documents: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each byte: the 8 bytes from it on as one number, the bytes left in its document, its offset there."""
    text = np.frombuffer(b"".join(documents) + bytes(MAX_ORDER), np.uint8)
    size = text.size - MAX_ORDER
    codes = np.zeros(size, np.uint64)
    for byte in range(MAX_ORDER + 1):
        codes <<= np.uint64(8)
        codes |= text[byte : byte + size]
    lengths = np.array([len(document) for document in documents])
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    offsets = np.arange(size) - starts
    return codes, np.repeat(lengths, lengths) - offsets, offsets


def _count(grams: np.ndarray) -> _OrderCounts:
    """Counts sorted grams and their contexts (all but the last byte)."""
    starts = _run_starts(grams)
    distinct, counts = grams[starts], np.diff(starts, append=grams.size)
    contexts = distinct >> np.uint64(8)
    context_starts = _run_starts(contexts)
    return _OrderCounts(
        grams=distinct,
        gram_counts=counts,
        contexts=contexts[context_starts],
        context_counts=np.add.reduceat(counts, context_starts) if counts.size else counts,
        context_types=np.diff(context_starts, append=contexts.size),
    )


def _run_starts(values: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]])) if values.size else np.zeros(0, np.int64)


def _interpolate(probability: np.ndarray, position: np.ndarray, grams: np.ndarray, counts: _OrderCounts) -> None:
    """Raises the probabilities at `position`, whose grams are given, by one order, in place."""
    by_code = np.argsort(grams, kind="stable")  # neighbours in the tables are found from warm caches
    position, grams = position[by_code], grams[by_code]
    in_grams, gram_at = _find(counts.grams, grams)
    in_contexts, context_at = _find(counts.contexts, grams >> np.uint64(8))
    gram_count = np.where(in_grams, counts.gram_counts[gram_at], 0)
    total, types = counts.context_counts[context_at], counts.context_types[context_at]
    blended = (gram_count + types * probability[position]) / (total + types)
    probability[position] = np.where(in_contexts, blended, probability[position])


def _find(table: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whether and where each value is in a sorted table (any index where it is not)."""
    index = np.minimum(np.searchsorted(table, values), table.size - 1)
    return table[index] == values, index
