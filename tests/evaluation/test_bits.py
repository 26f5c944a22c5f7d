import math

import numpy as np
import pytest

from jaxmix.data import ByteTokenizer, Document, build_tokenizer
from jaxmix.evaluation import bits_per_byte
from tests.evaluation.stub_model import CountingModel, log2_probability

DOCUMENTS = [
    Document("a", "hello world, hé!"),
    Document("b", "x"),
    Document("c", "the end of the text"),
    Document("d", "yz"),
]


def _by_hand(model, tokenizer, document, reach=None):
    (ids,) = tokenizer.encode_batch([document.text])
    stream = [tokenizer.bos_id, *ids.tolist()]
    starts = [0] * len(stream) if reach is None else reach(len(stream))
    return -sum(log2_probability(model, stream[starts[t] : t], stream[t]) for t in range(1, len(stream)))


@pytest.mark.parametrize("specification", ["bytes", "bpe-262"])
@pytest.mark.parametrize(("length", "batch_size"), [(4, 2), (7, 16), (64, 1)])
def test_every_byte_is_counted_once_with_all_that_came_before(specification, length, batch_size):
    tokenizer = build_tokenizer(specification, [d.text for d in DOCUMENTS] * 9)
    model = CountingModel(tokenizer.vocab_size)
    result = bits_per_byte(model, tokenizer, DOCUMENTS, length=length, batch_size=batch_size)
    expected = {d.name: _by_hand(model, tokenizer, d) for d in DOCUMENTS}
    assert result.bits == pytest.approx(sum(expected.values()), rel=1e-5)
    assert result.text_bytes == 17 + 1 + 19 + 2
    assert result.bits_per_byte == pytest.approx(sum(expected.values()) / 39, rel=1e-5)
    assert result.text_tokens == sum(ids.size for ids in tokenizer.encode_batch([d.text for d in DOCUMENTS]))
    assert result.nats_per_token == pytest.approx(result.bits * math.log(2) / result.text_tokens)
    for document in DOCUMENTS:
        assert result.by_document[document.name] == pytest.approx(expected[document.name] / document.size, rel=1e-5)


@pytest.mark.parametrize(("length", "batch_size"), [(4, 2), (6, 3), (64, 4)])
def test_windows_count_every_byte_once_too(length, batch_size):
    model, tokenizer = CountingModel(258), ByteTokenizer()
    result = bits_per_byte(model, tokenizer, DOCUMENTS, context="windows", length=length, batch_size=batch_size)

    def reach(size):
        """The start of the window that predicts each token: windows end every length // 2 tokens, or at the end."""
        starts, predicted = [0], 0
        while predicted < size - 1:
            start = max(0, min(predicted - length // 2, size - 1 - length))
            end = min(start + length, size - 1)
            starts += [start] * (end - predicted)
            predicted = end
        return starts

    assert result.bits == pytest.approx(sum(_by_hand(model, tokenizer, d, reach) for d in DOCUMENTS), rel=1e-5)
    assert result.context == f"the last {length // 2 + 1} to {length} tokens of the document before it"


def test_a_model_that_knows_nothing_needs_the_logarithm_of_its_vocabulary():
    model = CountingModel(258)
    model.weight[...], model.bias[...] = np.zeros(258), np.zeros(258)
    assert bits_per_byte(model, ByteTokenizer(), DOCUMENTS).bits_per_byte == pytest.approx(math.log2(258), rel=1e-6)


class _Lossy(ByteTokenizer):
    def encode_batch(self, texts):
        return super().encode_batch([text.replace("é", "e") for text in texts])


def test_a_tokenizer_that_loses_text_is_refused():
    with pytest.raises(ValueError, match="reproduces 'a' exactly"):
        bits_per_byte(CountingModel(258), _Lossy(), DOCUMENTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"documents": []}, "documents: expected at least one"),
        ({"length": 1}, "length, batch_size: expected at least 2 and 1, got 1 and 16"),
        ({"batch_size": 0}, "got 256 and 0"),
        ({"context": "all"}, "context: expected 'stream' or 'windows', got 'all'"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    arguments = {"documents": DOCUMENTS, **options}
    with pytest.raises(ValueError, match=message):
        bits_per_byte(CountingModel(258), ByteTokenizer(), arguments.pop("documents"), **arguments)
