"""The input pipeline: shards to packed batches, with exact resume.

documents -> this host's share -> shuffle -> repeat -> concatenate and split into windows -> shuffle windows -> batch
"""

import functools
from pathlib import Path
from typing import Any

import grain
import numpy as np
from absl import flags
from grain.experimental import ConcatThenSplitIterDataset, WindowShuffleIterDataset, batch_and_pad

from jaxmix.data.shards import read_shards


def shift_labels(element: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Turns a packed window of T + 1 tokens into T inputs and the T tokens that follow them."""
    tokens, segment_ids = element["tokens"], element["tokens_segment_ids"]
    same_document = (segment_ids[1:] == segment_ids[:-1]) & (segment_ids[1:] > 0)
    return {
        "tokens": tokens[:-1],
        "labels": np.where(same_document, tokens[1:], 0).astype(np.int32),
        "segment_ids": segment_ids[:-1],
        "positions": element["tokens_positions"][:-1],
        "weights": same_document.astype(np.float32),
    }


def packed_batches(
    directory: str | Path,
    split: str,
    *,
    length: int,
    batch_size: int,
    seed: int | None = None,
    repeat: bool = False,
    shuffle_window: int = 1,
    host: int = 0,
    hosts: int = 1,
    workers: int = 0,
) -> grain.IterDataset:
    """Batches of fixed shape with nothing lost and nothing doubled.

    The documents of a split are put end to end and cut into windows of length + 1 tokens; a document that does not
    end with its window goes on in the next one. Inputs are the first `length` tokens, labels the last `length`.
    A prediction never crosses a document: the label that would has weight 0. Each element is a dict of

        tokens       int32   [B, T]  inputs
        labels       int32   [B, T]  the next token of the same document, 0 where there is none
        segment_ids  int32   [B, T]  1, 2, ... for the documents of a window, 0 for padding
        positions    int32   [B, T]  position in the document's part of this window, from 0
        weights      float32 [B, T]  1 where the label counts, else 0

    Only the end of a pass without `repeat` is padded, to a full window and a full batch.
    `iter(...)` has `get_state()` and `set_state(...)`, which resume the whole chain exactly.

    Args:
        directory: what `prepare` wrote.
        split: "train" or "validation".
        length: T.
        batch_size: B, of this host.
        seed: shuffles the documents anew in each epoch, and the windows; None keeps the order of the corpus.
        repeat: whether to go on with the next epoch for ever.
        shuffle_window: windows held in memory to draw a batch from. A long document fills many windows in a row;
            1 leaves them side by side in a batch.
        host: index of this process.
        hosts: number of processes; process i reads the documents i, i + hosts, ...
        workers: reading processes; 0 reads in this one. With more than 0 the program needs a __main__ guard.

    Returns:
        The dataset.

    Raises:
        ValueError: if a number is out of its range, or there are more hosts than documents.
    """
    for name, value in (("length", length), ("batch_size", batch_size), ("shuffle_window", shuffle_window)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    if workers < 0:
        raise ValueError(f"workers: expected at least 0, got {workers}")
    documents = read_shards(Path(directory), split)
    if not 0 <= host < hosts <= len(documents):
        raise ValueError(
            f"host, hosts: expected 0 <= host < hosts <= {len(documents)} (the documents of {split!r}), "
            f"got host={host}, hosts={hosts}"
        )
    documents = documents[host::hosts]
    if seed is not None:
        documents = documents.seed(seed).shuffle()
    if repeat:
        documents = documents.repeat()
    windows = ConcatThenSplitIterDataset(
        documents.to_iter_dataset(grain.ReadOptions(num_threads=0)), length_struct={"tokens": length + 1}
    ).map(shift_labels)
    if seed is not None and shuffle_window > 1:
        windows = WindowShuffleIterDataset(windows, window_size=shuffle_window, seed=seed)
    batches = windows.batch(batch_size, batch_fn=functools.partial(batch_and_pad, batch_size=batch_size))
    if workers > 0:
        # Grain's workers read absl flags, which a program that does not use absl has never parsed.
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()
        batches = batches.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=workers))
    return batches


def state_to_json(state: Any) -> Any:
    """An iterator's `get_state()` as JSON values; `state_from_json` gives back an equal state.

    JSON has no tuples, and grain compares tuples in its states: a list in the place of one would lose tokens.

    Raises:
        ValueError: if the state holds something else than dicts, lists, tuples, strings, numbers, booleans and None.
    """
    if isinstance(state, dict):
        return {"dict": [[key, state_to_json(value)] for key, value in state.items()]}
    if isinstance(state, list | tuple):
        return {type(state).__name__: [state_to_json(item) for item in state]}
    if state is None or isinstance(state, str | int | float):
        return state
    raise ValueError(f"state: expected plain values, got {type(state).__name__}")


def state_from_json(state: Any) -> Any:
    """The inverse of `state_to_json`."""
    if not isinstance(state, dict):
        return state
    ((kind, items),) = state.items()
    if kind == "dict":
        return {key: state_from_json(value) for key, value in items}
    values = [state_from_json(item) for item in items]
    return tuple(values) if kind == "tuple" else values
