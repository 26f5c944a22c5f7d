"""Judging a language model: bits per byte, beside what simple predictors reach on the same text."""

from jaxmix.evaluation.bits import BitsPerByte, bits_per_byte
from jaxmix.evaluation.yardsticks import Yardsticks, byte_model_bits_per_byte, xz_bits_per_byte, yardsticks

__all__ = [
    "BitsPerByte",
    "Yardsticks",
    "bits_per_byte",
    "byte_model_bits_per_byte",
    "xz_bits_per_byte",
    "yardsticks",
]
