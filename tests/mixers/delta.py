"""Inputs, definitions, specs and misuse of the delta rules, for their tests."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix import delta_rule, gated_delta_rule
from jaxmix.mixers import DeltaState
from tests.contract import MixerSpec, Shape, Variant
from tests.contract.errors import Errors, in_words
from tests.contract.spec import BATCH
from tests.mixers import brute_force, recurrences
from tests.mixers.modal import documents


@dataclasses.dataclass(frozen=True)
class Spread(Shape):
    """Head counts of q, k and v, each of which divides `heads`."""

    q_heads: int = 2
    k_heads: int = 2
    v_heads: int = 2


def head_counts(shape):
    return (shape.q_heads, shape.k_heads, shape.v_heads) if isinstance(shape, Spread) else (shape.heads,) * 3


def draw(rng, batch, tokens, variant):
    """q, v of variance one, keys of norm 0.7 to 1.2, beta between 0.1 and 1, log decays between -1 and -1e-3 a step."""
    shape = variant.shape
    q_heads, k_heads, v_heads = head_counts(shape)
    k = rng.normal(size=(batch, tokens, k_heads, shape.key_size))
    norm = rng.uniform(0.7, 1.2, (batch, tokens, k_heads, 1))
    inputs = {
        "q": rng.normal(size=(batch, tokens, q_heads, shape.key_size)),
        "k": norm * k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": rng.normal(size=(batch, tokens, v_heads, shape.value_size)),
        "beta": rng.uniform(0.1, 1.0, (batch, tokens, shape.heads)),
    }
    if variant.gate != "none":
        size = (batch, tokens, shape.heads) if variant.gate == "token" else (shape.heads,)
        inputs["log_decay"] = -np.exp(rng.uniform(np.log(1e-3), 0.0, size))
    return inputs


def draw_masked(rng, batch, tokens, variant):
    """`draw` and a write mask for the chunks of `variant.options`."""
    chunks = -(-tokens // variant.options["chunk_size"])
    mask = rng.uniform(0.0, 1.0, (batch, chunks, variant.shape.heads))
    return draw(rng, batch, tokens, variant) | {"write_mask": mask}


def init_state(variant, batch, dtype):
    return DeltaState.init(batch, variant.shape.heads, variant.shape.key_size, variant.shape.value_size, dtype=dtype)


def expanded(q, k, v, beta, log_decay=None, write_mask=None):
    """Every input with H heads, and the decay written out for every token."""
    heads = beta.shape[2]
    q, k, v = (np.repeat(x, heads // x.shape[2], axis=2) for x in (q, k, v))
    log_decay = np.zeros(beta.shape) if log_decay is None else np.broadcast_to(log_decay, beta.shape)
    return q, k, v, log_decay, beta


def scale_of(variant):
    return variant.options.get("scale", variant.shape.key_size**-0.5)


def explicit_sums(inputs, segment_ids, variant):
    arrays = expanded(**inputs)
    out = np.zeros((*arrays[4].shape, variant.shape.value_size))
    for row, tokens in documents(segment_ids):
        for head in range(variant.shape.heads):
            terms = (x[row, tokens, head] for x in arrays)
            out[row, tokens, head] = brute_force.delta_rule(*terms, scale=scale_of(variant))
    return out


def printed_recurrence(case, variant):
    """Output and final state token by token in numpy, with the write mask and the options of the variant."""
    arrays = expanded(**case.inputs)
    out = np.zeros((*arrays[4].shape, variant.shape.value_size))
    S = np.zeros(case.state.S.shape)
    options = {name: x for name, x in variant.options.items() if name in ("decay_masked", "chunk_size")}
    for row in range(BATCH):
        for head in range(variant.shape.heads):
            mask = case.inputs["write_mask"][row, :, head] if "write_mask" in case.inputs else None
            out[row, :, head], S[row, head] = recurrences.gated_delta_rule(
                *(x[row, :, head] for x in arrays),
                case.state.S[row, head],
                case.segment_ids[row],
                scale=scale_of(variant),
                write_mask=mask,
                **options,
            )
    return out, DeltaState(S)


PER_TOKEN = Variant(gate="token")
MORE_VALUES = Variant({"scale": 0.7}, Spread(4, q_heads=2, k_heads=2, v_heads=4, key_size=4), gate="head")
MORE_QUERIES = Variant(shape=Spread(4, q_heads=4, k_heads=1, v_heads=2, key_size=3), gate="token")
NO_DECAY = Variant({"scale": 1.3}, Shape(heads=3, key_size=6, value_size=3))

GATED_DELTA_RULE = MixerSpec(
    function=functools.partial(gated_delta_rule, log_decay=None),
    state=DeltaState,
    draw=draw,
    init_state=init_state,
    brute_force=explicit_sums,
    variants={
        "decay per token": PER_TOKEN,
        "decay per head, more value heads, scale": MORE_VALUES,
        "one key head, more query heads": MORE_QUERIES,
        "no decay, scale": NO_DECAY,
    },
    gates=frozenset({"log_decay", "beta"}),
    representatives=("decay per token", "decay per head, more value heads, scale"),
    sharded_variants=("decay per token",),
    lengths=(5,),
    # A state grows with the cube of this at every token: k, k and beta.
    large=1e6,
)

DELTA_RULE = MixerSpec(
    function=delta_rule,
    state=DeltaState,
    draw=draw,
    init_state=init_state,
    brute_force=explicit_sums,
    variants={"no decay": Variant(), "no decay, scale": NO_DECAY},
    gates=frozenset({"beta"}),
    log_gates=frozenset(),
    representatives=("no decay",),
    lengths=(5,),
    large=1e6,
)

MASKED = MixerSpec(
    function=functools.partial(gated_delta_rule, log_decay=None),
    state=DeltaState,
    draw=draw_masked,
    init_state=init_state,
    brute_force=explicit_sums,
    variants={},
    gates=frozenset({"log_decay", "beta", "write_mask"}),
)
"""For `evaluate` only: the chunks of the mask are those of the option `chunk_size`, at the lengths that are drawn."""


class DeltaErrors(Errors):
    """Misuse that only the delta rules know."""

    def test_head_counts_that_do_not_divide_the_largest(self):
        inputs = self.correct_call()
        for name in ("q", "k", "v"):
            three = jnp.concatenate([inputs[name]] * 2, axis=2)[:, :, :3]
            self.refuse(
                inputs | {name: three}, r"\b(q|k|v): expected a head count", rf"\b3 heads of {name}\b", r"got 2\b"
            )

    def test_queries_and_keys_of_different_size(self):
        inputs = self.correct_call()
        self.refuse(inputs | {"k": inputs["k"][..., :-1]}, r"\bk\b", rf"\b{inputs['k'].shape[-1] - 1}\b")

    def test_gates_of_another_number_of_heads(self):
        inputs = self.correct_call()
        wrong = [("beta", inputs["beta"][:, :, :1]), ("beta", inputs["beta"][0, 0])]
        if "log_decay" in inputs:
            wrong += [("log_decay", inputs["log_decay"][:, :, :1]), ("log_decay", inputs["log_decay"][0, 0, :1])]
        for name, x in wrong:
            self.refuse(inputs | {name: x}, rf"\b{name}\b", in_words(x.shape))

    @pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan"), True, "1"])
    def test_scales_that_are_not_positive_numbers(self, scale):
        self.refuse(self.correct_call(), r"\bscale: expected a positive number", str(scale), scale=scale)

    def test_write_masks_of_another_shape_or_dtype(self):
        inputs = self.correct_call()
        batch, _, heads = inputs["beta"].shape
        for shape in [(batch, 2, heads), (batch, 4, heads), (batch, 3, heads + 1), (1, 3, heads), (batch, 3)]:
            patterns = r"\bwrite_mask: expected", in_words((batch, 3, heads)), in_words(shape)
            self.refuse(inputs, *patterns, write_mask=jnp.ones(shape), chunk_size=3)
        for dtype in ("bfloat16", "int32", "bool"):
            mask = jnp.ones((batch, 3, heads), dtype)
            self.refuse(inputs, r"\bwrite_mask\b", "float32", dtype, write_mask=mask, chunk_size=3)
