import dataclasses
import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from jaxmix.data import (
    ByteTokenizer,
    Corpus,
    Document,
    Manifest,
    encode_documents,
    packed_batches,
    prepare,
    read_shards,
    state_from_json,
    state_to_json,
    write_shards,
)
from jaxmix.data.shards import token_dtype

LENGTH = 15


def _corpus(lengths=(3, 40, 1, 14, 14, 62, 5, 30, 16, 2)):
    documents = tuple(
        Document(str(i), "".join(chr(97 + (i + j) % 26) for j in range(n))) for i, n in enumerate(lengths)
    )
    return Corpus("letters", documents, documents[:4])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare(_corpus(), "bytes", tmp_path_factory.mktemp("data"))


def _documents(prepared):
    return encode_documents(ByteTokenizer(), _corpus().train)


def _windows(batches):
    for batch in batches:
        for row in range(batch["tokens"].shape[0]):
            yield {name: values[row] for name, values in batch.items()}


def test_a_record_is_a_document_between_its_begin_and_end(prepared):
    records = read_shards(prepared.directory, "train")
    assert len(records) == len(_documents(prepared))
    for index, document in enumerate(_documents(prepared)):
        np.testing.assert_array_equal(records[index]["tokens"], document)
        assert (document[0], document[-1]) == (256, 257)


def test_the_manifest_counts(prepared):
    manifest = prepared.manifest.splits["train"]
    assert manifest.documents == 10
    assert manifest.text_bytes == manifest.text_tokens == sum(d.size for d in _corpus().train)
    assert manifest.tokens == manifest.text_tokens + 20
    assert manifest.bytes_per_token == 1.0
    assert Manifest.load(prepared.directory) == prepared.manifest


def test_prepared_data_are_kept_while_corpus_and_tokenizer_stay(tmp_path):
    prepare(_corpus(), "bytes", tmp_path)
    written = (tmp_path / "train-00000.array_record").stat().st_mtime_ns
    prepare(_corpus(), "bytes", tmp_path)
    assert (tmp_path / "train-00000.array_record").stat().st_mtime_ns == written
    changed = dataclasses.replace(_corpus(), train=(*_corpus().train, Document("new", "text")))
    assert prepare(changed, "bytes", tmp_path).manifest.splits["train"].documents == 11
    assert prepare(changed, "bpe-260", tmp_path).manifest.vocab_size > 258
    assert len(read_shards(tmp_path, "train")) == 11


@pytest.mark.parametrize(("vocab_size", "dtype"), [(258, "<u2"), (65536, "<u2"), (65537, "<u4")])
def test_ids_take_the_smallest_little_endian_type(tmp_path, vocab_size, dtype):
    assert token_dtype(vocab_size) == np.dtype(dtype)
    ids = np.array([0, 255, 256, vocab_size - 1])
    shards = write_shards(tmp_path, "train", [ids], vocab_size=vocab_size)
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(str(tmp_path / shards[0]))
    assert reader.read() == ids.astype(dtype).tobytes()
    reader.close()


def test_shards_are_divided_by_size_and_read_as_one(tmp_path):
    documents = [np.arange(n) for n in (5, 5, 5, 5, 5)]
    shards = write_shards(tmp_path, "train", documents, vocab_size=10, tokens_per_shard=10)
    assert shards == ("train-00000.array_record", "train-00001.array_record", "train-00002.array_record")


def test_an_id_outside_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"expected ids in \[0, 4\), got 0 to 4 in document 1"):
        write_shards(tmp_path, "train", [np.arange(3), np.arange(5)], vocab_size=4)


def test_no_token_is_lost_or_doubled(prepared):
    batches = packed_batches(prepared.directory, "train", length=LENGTH, batch_size=2)
    stream = np.concatenate(_documents(prepared))
    # A window is its inputs and the last label; the last label of a window whose document ends there has no weight,
    # and is read from the next window's first input instead.
    seen = []
    for start, window in zip(range(0, stream.size, LENGTH + 1), _windows(batches), strict=False):
        expected = stream[start : start + LENGTH]
        real = window["segment_ids"] > 0
        np.testing.assert_array_equal(window["tokens"][real], expected[: real.sum()])
        seen.append((window["tokens"], real))
    assert sum(real.sum() for _, real in seen) == stream.size - stream.size // (LENGTH + 1)


def test_every_prediction_inside_a_window_is_made_once(prepared):
    batches = list(packed_batches(prepared.directory, "train", length=LENGTH, batch_size=2))
    pairs = [
        pair
        for window in _windows(batches)
        for pair, weight in zip(zip(window["tokens"], window["labels"], strict=True), window["weights"], strict=True)
        if weight
    ]
    stream, owner = (np.concatenate(parts) for parts in _streams(prepared))
    inside = [
        (stream[i], stream[i + 1])
        for i in range(stream.size - 1)
        if owner[i] == owner[i + 1] and (i + 1) % (LENGTH + 1)
    ]
    assert pairs == inside


def _streams(prepared):
    documents = _documents(prepared)
    return documents, [np.full(document.size, index) for index, document in enumerate(documents)]


def test_labels_stay_in_their_document(prepared):
    for window in _windows(packed_batches(prepared.directory, "train", length=LENGTH, batch_size=2)):
        for t in range(LENGTH - 1):
            same = window["segment_ids"][t] == window["segment_ids"][t + 1] > 0
            assert window["weights"][t] == same
            assert window["labels"][t] == (window["tokens"][t + 1] if same else 0)
        assert not window["weights"][window["tokens"] == 257].any()


def test_segments_count_up_and_positions_start_at_zero(prepared):
    for window in _windows(packed_batches(prepared.directory, "train", length=LENGTH, batch_size=2)):
        ids = window["segment_ids"][window["segment_ids"] > 0]
        assert ids.size == 0 or (ids[0] == 1 and set(np.diff(ids)) <= {0, 1})
        for segment in np.unique(ids):
            positions = window["positions"][window["segment_ids"] == segment]
            np.testing.assert_array_equal(positions, np.arange(positions.size))


def test_only_the_end_of_a_pass_is_padded(prepared):
    batches = list(packed_batches(prepared.directory, "train", length=LENGTH, batch_size=4))
    assert all(batch["tokens"].shape == (4, LENGTH) for batch in batches)
    padding = np.concatenate([batch["segment_ids"].ravel() == 0 for batch in batches])
    first = padding.argmax()
    assert padding[first:].all()
    assert padding.size - first < 4 * LENGTH


def test_repeating_never_pads(prepared):
    batches = packed_batches(prepared.directory, "train", length=LENGTH, batch_size=4, repeat=True, seed=1)
    assert all((batch["segment_ids"] > 0).all() for batch in islice(batches, 20))


def test_shuffling_changes_the_order_and_keeps_the_pairs(prepared):
    def pairs(**options):
        batches = packed_batches(prepared.directory, "train", length=300, batch_size=1, **options)
        return [
            (int(a), int(b))
            for w in _windows(batches)
            for a, b, weight in zip(w["tokens"], w["labels"], w["weights"], strict=True)
            if weight
        ]

    plain, shuffled, again = pairs(), pairs(seed=3, shuffle_window=4), pairs(seed=3, shuffle_window=4)
    assert shuffled == again != plain
    assert sorted(shuffled) == sorted(plain)


def test_epochs_bring_the_same_documents_in_another_order(prepared):
    tokens = sum(document.size for document in _documents(prepared))
    batches = packed_batches(prepared.directory, "train", length=tokens - 1, batch_size=1, seed=0, repeat=True)
    first, second = (batch["tokens"][0] for batch in islice(batches, 2))
    assert (first != second).any()
    # Every document ends with 257, so that the window's last token, which is no input, is that of both.
    np.testing.assert_array_equal(np.sort(first), np.sort(second))


def test_hosts_share_the_documents(prepared):
    def tokens(host):
        batches = packed_batches(prepared.directory, "train", length=500, batch_size=1, host=host, hosts=3)
        (window,) = _windows(batches)
        return window["tokens"][window["segment_ids"] > 0]

    documents = _documents(prepared)
    for host in range(3):
        np.testing.assert_array_equal(tokens(host), np.concatenate(documents[host::3]))


@pytest.mark.parametrize("taken", [0, 1, 2, 5, 11, 16, 30])
def test_resuming_continues_exactly(prepared, taken):
    def batches():
        return iter(
            packed_batches(
                prepared.directory, "train", length=LENGTH, batch_size=2, seed=7, repeat=True, shuffle_window=5
            )
        )

    whole = batches()
    for _ in range(taken):
        next(whole)
    resumed = batches()
    resumed.set_state(state_from_json(json.loads(json.dumps(state_to_json(whole.get_state())))))
    for _ in range(25):
        ours, theirs = next(resumed), next(whole)
        for name, values in theirs.items():
            np.testing.assert_array_equal(ours[name], values)


def test_resuming_continues_exactly_where_documents_end_with_their_windows(tmp_path):
    """There the packing holds no remainder, which it marks by a tuple: JSON must not make a list of it."""
    data = prepare(_corpus((14, 14, 30, 14, 14)), "bytes", tmp_path)
    whole = iter(packed_batches(data.directory, "train", length=LENGTH, batch_size=1, repeat=True))
    resumed = iter(packed_batches(data.directory, "train", length=LENGTH, batch_size=1, repeat=True))
    for _ in range(7):
        next(whole)
        resumed.set_state(state_from_json(json.loads(json.dumps(state_to_json(whole.get_state())))))
        for name, values in next(resumed).items():
            if name == "tokens":
                state = whole.get_state()
                np.testing.assert_array_equal(values, next(whole)[name])
                whole.set_state(state)


@pytest.mark.parametrize("state", [{}, {"a": (1, [2, (3,)], {"b": None}), "c": "x", "d": 1.5, "e": True}, [], ()])
def test_states_survive_json(state):
    restored = state_from_json(json.loads(json.dumps(state_to_json(state))))
    assert restored == state
    assert repr(restored) == repr(state)


def test_a_state_that_json_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="state: expected plain values, got ndarray"):
        state_to_json({"a": np.zeros(2)})


WORKER_SCRIPT = """
import sys
from jaxmix.data import packed_batches

if __name__ == "__main__":
    def batches():
        return iter(packed_batches(sys.argv[1], "train", length=15, batch_size=2, seed=7, repeat=True, workers=2))
    whole, resumed = batches(), batches()
    for _ in range(5):
        next(whole)
    resumed.set_state(whole.get_state())
    print(all((next(whole)["tokens"] == next(resumed)["tokens"]).all() for _ in range(10)))
"""


def test_worker_processes_resume_exactly_too(prepared, tmp_path):
    (tmp_path / "script.py").write_text(WORKER_SCRIPT, "utf-8")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", prepared.directory],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", "PATH": ""},
        check=False,
    )
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "length: expected at least 1, got 0"),
        ({"batch_size": 0}, "batch_size: expected at least 1, got 0"),
        ({"shuffle_window": 0}, "shuffle_window: expected at least 1, got 0"),
        ({"workers": -1}, "workers: expected at least 0, got -1"),
        ({"host": 2, "hosts": 2}, r"host, hosts: expected 0 <= host < hosts <= 10 .* got host=2, hosts=2"),
        ({"hosts": 11}, "got host=0, hosts=11"),
    ],
)
def test_numbers_out_of_range_are_refused(prepared, options, message):
    with pytest.raises(ValueError, match=message):
        packed_batches(prepared.directory, "train", **{"length": 4, "batch_size": 1, **options})


def test_missing_shards_and_splits_are_named(prepared, tmp_path):
    with pytest.raises(ValueError, match=r"expected prepared shards with a manifest.json, got"):
        read_shards(tmp_path, "train")
    with pytest.raises(ValueError, match=r"split: expected one of \['train', 'validation'\], got 'test'"):
        read_shards(prepared.directory, "test")
