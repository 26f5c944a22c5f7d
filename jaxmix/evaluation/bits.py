"""Bits per byte of a language model: every byte of every document counted exactly once."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import batched
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxmix.data.corpora import Document
from jaxmix.data.prepare import encode_documents
from jaxmix.data.tokenizers import Tokenizer

Context = Literal["stream", "windows"]


@dataclass(frozen=True)
class BitsPerByte:
    """What a model needs to encode documents.

    Attributes:
        bits: sum of -log2 p(token | context) over the text tokens of all documents.
        text_bytes: size of the documents in UTF-8 bytes.
        text_tokens: number of tokens that were predicted.
        context: what each token was predicted from, in words.
        by_document: document name to its bits per byte.
    """

    bits: float
    text_bytes: int
    text_tokens: int
    context: str
    by_document: dict[str, float]

    @property
    def bits_per_byte(self) -> float:
        """Bits over bytes."""
        return self.bits / self.text_bytes

    @property
    def nats_per_token(self) -> float:
        """Mean loss of a token, in nats."""
        return self.bits * math.log(2) / self.text_tokens


def bits_per_byte(
    model: nnx.Module,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    *,
    context: Context = "stream",
    length: int = 256,
    batch_size: int = 16,
) -> BitsPerByte:
    """Measures a model on documents.

    Each document is the begin token and the tokens of its text. The tokens of the text are predicted, each once: the
    end token is not, since it stands for no byte. The sum of -log2 p bounds the bits of the text from above, because a
    text has other tokenisations too, whose probability is left out.

    Args:
        model: (tokens, segment_ids=, state=) -> (logits [B, T, V], state), with init_state(batch_size).
        tokenizer: what the model was trained with.
        documents: what to predict.
        context: "stream" hands the model's state on from one call to the next, so that every token is predicted from
            all of its document before it, in memory that does not grow; "windows" predicts from the last
            length/2 + 1 to length tokens (fewer only at the beginning of a document), at twice the cost.
        length: tokens of a call.
        batch_size: streams, or windows, of a call.

    Returns:
        The bits and the bytes.

    Raises:
        ValueError: if there is no document, a number is out of range, or the tokenizer does not reproduce a document
            exactly, so that its bytes would not be counted.
    """
    if not documents:
        raise ValueError("documents: expected at least one, got none")
    if length < 2 or batch_size < 1:
        raise ValueError(f"length, batch_size: expected at least 2 and 1, got {length} and {batch_size}")
    ids = [document[:-1] for document in encode_documents(tokenizer, documents)]
    for document, tokens in zip(documents, ids, strict=True):
        if tokenizer.decode(tokens) != document.text:
            raise ValueError(f"tokenizer: expected one that reproduces {document.name!r} exactly; it loses text")
    bits = np.zeros(len(documents))
    if context == "stream":
        _add_stream_bits(bits, model, ids, length=length, batch_size=batch_size)
        words = "all of the document before it, by the model's state"
    elif context == "windows":
        _add_window_bits(bits, model, ids, length=length, batch_size=batch_size)
        words = f"the last {length // 2 + 1} to {length} tokens of the document before it"
    else:
        raise ValueError(f"context: expected 'stream' or 'windows', got {context!r}")
    return BitsPerByte(
        bits=float(bits.sum()),
        text_bytes=sum(document.size for document in documents),
        text_tokens=sum(tokens.size - 1 for tokens in ids),
        context=words,
        by_document={d.name: float(b / d.size) for d, b in zip(documents, bits, strict=True)},
    )


def _add_stream_bits(
    bits: np.ndarray, model: nnx.Module, ids: Sequence[np.ndarray], *, length: int, batch_size: int
) -> None:
    """Lays the documents one after the other on streams of nearly equal length and runs down all streams at once."""
    streams: list[list[int]] = [[] for _ in range(min(batch_size, len(ids)))]
    sizes = [0] * len(streams)
    for document in sorted(range(len(ids)), key=lambda i: -ids[i].size):
        shortest = sizes.index(min(sizes))
        streams[shortest].append(document)
        sizes[shortest] += ids[document].size - 1
    total = -(-max(sizes) // length) * length
    tokens, labels, owners = (np.zeros((len(streams), total), np.int32) for _ in range(3))
    for row, members in enumerate(streams):
        start = 0
        for document in members:
            end = start + ids[document].size - 1
            tokens[row, start:end], labels[row, start:end] = ids[document][:-1], ids[document][1:]
            owners[row, start:end] = document + 1
            start = end
    structure, variables = nnx.split(model)
    state = model.init_state(len(streams))  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    before = np.zeros(len(streams), np.int32)
    for start in range(0, total, length):
        part = np.s_[:, start : start + length]
        # A segment's id says where documents change inside a call; between calls the state has to be told.
        first = owners[:, start]
        begins = (first != before) & (first > 0)
        nats, state = _stream_nats(variables, tokens[part], labels[part], owners[part], state, begins, structure)
        np.add.at(
            bits, owners[part][owners[part] > 0] - 1, np.asarray(nats, np.float64)[owners[part] > 0] / math.log(2)
        )
        before = owners[part][:, -1]


def _add_window_bits(
    bits: np.ndarray, model: nnx.Module, ids: Sequence[np.ndarray], *, length: int, batch_size: int
) -> None:
    """Cuts windows that overlap by half; each predicts its second half, the first of a document all of itself."""
    structure, variables = nnx.split(model)
    for chosen in batched(_windows(ids, length), batch_size):
        tokens, labels, segment_ids = (np.zeros((batch_size, length), np.int32) for _ in range(3))
        counted = np.zeros((batch_size, length), bool)
        for row, (document, start, skip) in enumerate(chosen):
            inputs = ids[document][start : start + length + 1]
            size = inputs.size - 1
            tokens[row, :size], labels[row, :size], segment_ids[row, :size] = inputs[:-1], inputs[1:], 1
            counted[row, skip:size] = True
        nats = np.asarray(_window_nats(variables, tokens, labels, segment_ids, structure), np.float64)
        for row, (document, _, _) in enumerate(chosen):
            bits[document] += nats[row][counted[row]].sum() / math.log(2)


def _windows(ids: Sequence[np.ndarray], length: int) -> Iterator[tuple[int, int, int]]:
    """(document, first input, inputs whose prediction an earlier window has made) of every window."""
    for document, tokens in enumerate(ids):
        predicted = 0
        while predicted < tokens.size - 1:
            start = max(0, min(predicted - length // 2, tokens.size - 1 - length))
            yield document, start, predicted - start
            predicted = min(start + length, tokens.size - 1)


@partial(jax.jit, static_argnames="structure", donate_argnames="state")
def _stream_nats(
    variables: Any, tokens: Any, labels: Any, segment_ids: Any, state: Any, begins: Any, structure: Any
) -> tuple[jax.Array, Any]:
    model: Callable[..., Any] = nnx.merge(structure, variables)
    logits, state = model(tokens, segment_ids=segment_ids, state=state.reset(begins))
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels), state


@partial(jax.jit, static_argnames="structure")
def _window_nats(variables: Any, tokens: Any, labels: Any, segment_ids: Any, structure: Any) -> jax.Array:
    model: Callable[..., Any] = nnx.merge(structure, variables)
    logits, _ = model(tokens, segment_ids=segment_ids)
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
