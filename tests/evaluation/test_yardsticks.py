import lzma
import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from jaxmix.evaluation import byte_model_bits_per_byte, xz_bits_per_byte, yardsticks

TRAIN = [b"the cat sat on the mat, and the rat sat on the cat", b"a", b"\x00\x00\xff", b"that hat", b"x" * 20]
VALIDATION = [b"the hat sat on that mat", b"\x00\x01", b"zz", b"xxxxxxxxxxxx"]


def _by_hand(order):
    """The recursion of the docstring with dictionaries, one byte at a time."""
    counts = defaultdict(Counter)
    for document in TRAIN:
        for end in range(len(document)):
            for length in range(min(order, end) + 1):
                counts[document[end - length : end]][document[end]] += 1
    bits = []
    for document in VALIDATION:
        for end in range(len(document)):
            probability = 1 / 256
            for length in range(min(order, end) + 1):
                seen = counts.get(document[end - length : end])
                if seen:
                    total = sum(seen.values())
                    probability = (seen[document[end]] + len(seen) * probability) / (total + len(seen))
            bits.append(-math.log2(probability))
    return sum(bits) / len(bits)


def test_the_byte_models_are_those_of_the_formula():
    found = byte_model_bits_per_byte(TRAIN, VALIDATION, max_order=7)
    assert list(found) == list(range(8))
    for order, bits in found.items():
        assert bits == pytest.approx(_by_hand(order), rel=1e-12)


def test_order_zero_of_much_text_is_its_entropy():
    rng = np.random.default_rng(0)
    probabilities = np.array([0.5, 0.25, 0.125, 0.125])
    text = rng.choice(np.frombuffer(b"abcd", np.uint8), 400_000, p=probabilities).tobytes()
    shares = np.array(list(Counter(text).values())) / len(text)
    entropy = -(shares * np.log2(shares)).sum()
    assert byte_model_bits_per_byte([text], [text], max_order=0)[0] == pytest.approx(entropy, abs=1e-3)
    assert entropy == pytest.approx(1.75, abs=0.01)


def test_higher_orders_find_structure_that_lower_ones_miss():
    found = byte_model_bits_per_byte([b"abcabdabcabe" * 500], [b"abcabdabcabe" * 20], max_order=5)
    assert found[0] > found[1] > found[2] > found[5]


def test_probabilities_of_all_bytes_sum_to_one():
    prefix = b"the cat s"
    total = 0.0
    for byte in range(256):
        whole = byte_model_bits_per_byte(TRAIN, [prefix + bytes([byte])], max_order=4)[4] * (len(prefix) + 1)
        without = byte_model_bits_per_byte(TRAIN, [prefix], max_order=4)[4] * len(prefix)
        total += 2.0 ** -(whole - without)
    assert total == pytest.approx(1.0, rel=1e-9)


def test_xz_counts_what_the_text_adds():
    train, validation = [b"some text to refer to. " * 40, b"more"], [b"some text to refer to. more"]

    def size(data):
        return len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))

    alone, after = xz_bits_per_byte(train, validation)
    assert alone == 8 * size(validation[0]) / len(validation[0])
    assert after == 8 * (size(b"".join(train + validation)) - size(b"".join(train))) / len(validation[0])
    assert after < alone


def test_all_yardsticks_together():
    train, validation = ["the cat sat on the mat. " * 30], ["the mat sat on the cat. é"]
    found = yardsticks(train, validation, max_order=3)
    encoded = [t.encode() for t in train], [t.encode() for t in validation]
    assert found.byte_model == byte_model_bits_per_byte(*encoded, max_order=3)
    assert (found.xz_alone, found.xz_after_training) == xz_bits_per_byte(*encoded)
    assert found.text_bytes == 26
    assert found.best_byte_model == min(found.byte_model.values()) == found.byte_model[found.best_order]


@pytest.mark.parametrize(
    ("train", "validation", "order", "message"),
    [
        ([], [b"a"], 3, "train: expected some text"),
        ([b"a"], [b""], 3, "validation: expected some text"),
        ([b"a"], [b"a"], 8, "max_order: expected 0 to 7, got 8"),
        ([b"a"], [b"a"], -1, "max_order: expected 0 to 7, got -1"),
    ],
)
def test_wrong_arguments_are_refused(train, validation, order, message):
    with pytest.raises(ValueError, match=message):
        byte_model_bits_per_byte(train, validation, max_order=order)
