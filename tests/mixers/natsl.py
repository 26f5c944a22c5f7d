"""NAtS-L by its definition, random calls of it, and what one call gives, for its tests.

Sizes: H = 2 linear heads of D = 4 and E = 6, each with G = 2 softmax heads of 3 and 5, chunks of C = 4 tokens.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix.mixers.natsl import NAtSLState, count_chunks, natsl_attention
from tests.contract.packing import documents
from tests.contract.spec import gate_dtype, precision
from tests.nn.layers import floats, with_floats

BATCH, TOKENS, CHUNK = 2, 22, 4
HEADS, GROUP = 2, 2
KEYS, VALUES = 4, 6
SOFTMAX_KEYS, SOFTMAX_VALUES = 3, 5
CAPACITY = 26
GATES = ("log_decay", "beta", "choice")
FLOATS = ("S_start", "S_cur", "log_decay", "own_k", "own_v", "page_k", "page_v", "weight")
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["serial", "scan"])
MAX_DOCUMENTS = 7
"""Documents for which `run_packed` has room in a row."""
ONE = np.ones((BATCH, TOKENS), np.int32)
INSIDE = np.array([[1] * 9 + [2] * 13, [1] * 3 + [2] * 19], np.int32)


class Call(NamedTuple):
    """Arguments of a call by name, `choice` included, and the cotangents it is differentiated with."""

    inputs: dict[str, Any]
    segment_ids: Any
    state: Any
    out_cotangent: tuple[Any, Any]
    state_cotangent: Any


class Evaluation(NamedTuple):
    """Outputs, final state, gradients of every input and of the arrays of floats in the initial state."""

    out: tuple[Any, Any]
    state: Any
    gradients: dict[str, Any]
    state_gradient: Any


def softmax_first(routed):
    """The choice for bool [B, N, H]: True for softmax attention."""
    return np.stack([routed, ~routed], axis=-1).astype(np.float64)


def draw_inputs(rng, tokens=TOKENS, batch=BATCH, rule="gated_delta"):
    """Inputs without the choice: keys of norm 0.8 to 1.2, log decays between -1 and -0.02 a step."""
    k = rng.normal(size=(batch, tokens, HEADS, KEYS))
    both = (batch, tokens, HEADS * GROUP)
    inputs = {
        "q": rng.normal(size=k.shape),
        "k": rng.uniform(0.8, 1.2, (batch, tokens, HEADS, 1)) * k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": rng.normal(size=(batch, tokens, HEADS, VALUES)),
        "log_decay": -np.exp(rng.uniform(-4.0, 0.0, (batch, tokens, HEADS))),
        "beta": rng.uniform(0.1, 1.0, (batch, tokens, HEADS)),
        "q_softmax": rng.normal(size=(*both, SOFTMAX_KEYS)),
        "k_softmax": rng.normal(size=(*both, SOFTMAX_KEYS)),
        "v_softmax": rng.normal(size=(*both, SOFTMAX_VALUES)),
    }
    return inputs | {"beta": None} if rule == "ssd" else inputs


def draw_call(segment_ids=None, *, state=None, tokens=TOKENS, seed=0, rule="gated_delta", **counted) -> Call:
    """A random call, with cotangents on the outputs, and on the final state if there is an initial one."""
    rng = np.random.default_rng(seed)
    inputs = draw_inputs(rng, tokens, rule=rule)
    packed, continued = segment_ids is not None, state is not None
    chunks = count_chunks(tokens, CHUNK, packed=packed, continued=continued, **counted)
    inputs["choice"] = softmax_first(rng.random((BATCH, chunks, HEADS)) < 0.5)
    cotangent = (rng.normal(size=inputs["v"].shape), rng.normal(size=inputs["v_softmax"].shape))
    ids = None if segment_ids is None else np.asarray(segment_ids, np.int32)
    return Call(inputs, ids, state, cotangent, [rng.normal(size=x.shape) for x in floats(state)] if continued else None)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _evaluate(call: Call, implementation, options) -> Evaluation:
    def mixer(inputs, values):
        state = None if call.state is None else with_floats(call.state, values)
        arguments = {"chunk_size": CHUNK, "segment_ids": call.segment_ids, "initial_state": state} | dict(options)
        out, state = natsl_attention(**inputs, implementation=implementation, **arguments)
        return (out, floats(state)), state

    values = [] if call.state is None else floats(call.state)
    (out, finals), pull_back, state = jax.vjp(mixer, call.inputs, values, has_aux=True)
    cotangent = [jnp.zeros_like(x) for x in finals] if call.state_cotangent is None else call.state_cotangent
    return Evaluation(out, state, *pull_back((call.out_cotangent, cotangent)))


def cast(call: Call, dtype) -> Call:
    """The call in `dtype`, gates and states in float32 or better."""
    wide = gate_dtype(dtype)
    inputs = {
        name: None if x is None else np.asarray(x, wide if name in GATES else dtype) for name, x in call.inputs.items()
    }
    cotangent = tuple(np.asarray(x, dtype) for x in call.out_cotangent)
    return call._replace(inputs=inputs, out_cotangent=cotangent)


def evaluate(call: Call, implementation, dtype=np.float64, **options) -> Evaluation:
    """Outputs, final state and all gradients of one call, as numpy arrays."""
    with precision(dtype):
        return jax.device_get(_evaluate(cast(call, dtype), implementation, tuple(sorted(options.items()))))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _forward(call: Call, implementation, options):
    arguments = {"chunk_size": CHUNK, "segment_ids": call.segment_ids, "initial_state": call.state} | dict(options)
    return natsl_attention(**call.inputs, implementation=implementation, **arguments)


def forward(call: Call, implementation, **options):
    """Outputs and final state of one call in float64, as numpy arrays."""
    with precision():
        return jax.device_get(_forward(cast(call, np.float64), implementation, tuple(sorted(options.items()))))


def fresh_state(capacity=CAPACITY, batch=BATCH, dtype=np.float64) -> Any:
    """The state of streams that have seen nothing, as numpy arrays."""
    sizes = {"softmax_key_size": SOFTMAX_KEYS, "softmax_value_size": SOFTMAX_VALUES, "chunk_size": CHUNK}
    with precision(dtype):
        state = NAtSLState.init(
            batch,
            HEADS,
            KEYS,
            VALUES,
            softmax_heads=HEADS * GROUP,
            capacity=capacity,
            dtype=dtype,
            cache_dtype=dtype,
            **sizes,
        )
        return jax.device_get(state)


@functools.cache
def earlier_state() -> Any:
    """The state of a stream of 15 tokens and of one of 6."""
    ids = np.where(np.arange(TOKENS) < [[15], [6]], 1, 0)
    return forward(draw_call(ids, state=fresh_state(), seed=7), "serial")[1]


def packed_call(ids):
    """A call that continues two streams of at most `MAX_DOCUMENTS` documents; no cotangents where no token waits."""
    call = draw_call(np.array(ids), state=earlier_state(), max_documents=MAX_DOCUMENTS)
    waiting = (
        np.arange(CHUNK) < np.array([left_open(*row) for row in zip(ids, call.state.filled, strict=True)])[:, None]
    )
    cotangent = dataclasses.replace(call.state, **dict(zip(FLOATS, call.state_cotangent, strict=True)))
    own = {name: np.where(waiting[..., None, None], getattr(cotangent, name), 0) for name in ("own_k", "own_v")}
    return call._replace(state_cotangent=floats(dataclasses.replace(cotangent, **own)))


def left_open(ids, filled):
    """Tokens that wait in the open chunk after a row."""
    found = documents(ids)
    if not found:
        return filled
    return (len(found[-1]) + (filled if len(found) == 1 else 0)) % CHUNK


def run_packed(call, implementation):
    """`evaluate` with room for `MAX_DOCUMENTS` documents."""
    return evaluate(call, implementation, max_documents=MAX_DOCUMENTS)


def token_chunks(row, filled=0):
    """The chunk of every token of a row of segment ids, -1 at padding; `filled` tokens wait in the first chunk."""
    chunk = np.full(len(row), -1)
    begun = 0
    for number, positions in enumerate(documents(row)):
        waiting = filled if number == 0 else 0
        chunk[positions] = begun + (waiting + np.arange(len(positions))) // CHUNK
        begun = chunk[positions[-1]] + 1
    return chunk


def definition(inputs, segment_ids):
    """Outputs of both branches for streams that begin, document by document."""
    outs = [np.zeros(inputs[name].shape) for name in ("v", "v_softmax")]
    for row, positions, _, one, choice in alone(inputs, segment_ids):
        for out, x in zip(outs, jax.jit(of_document)(one, choice), strict=True):
            out[row, positions] = x[: len(positions)]
    return tuple(outs)


def alone(inputs, segment_ids):
    """Yields row, positions, chunks, inputs and choice of every document.

    Inputs are filled up with zeros to `TOKENS` tokens, so that all documents share one compiled function.
    """
    for row, ids in enumerate(segment_ids):
        chunk = token_chunks(ids)
        for positions in documents(ids):
            chunks = slice(chunk[positions[0]], chunk[positions[-1]] + 1)
            one = {
                name: None if x is None else filled_up(np.asarray(x)[row, positions], TOKENS)
                for name, x in inputs.items()
                if name != "choice"
            }
            choice = filled_up(inputs["choice"][row, chunks], math.ceil(TOKENS / CHUNK))
            yield row, positions, chunks, one, choice


def filled_up(x, length):
    """Zeros after the first axis up to `length`."""
    return np.pad(x, [(0, length - len(x))] + [(0, 0)] * (x.ndim - 1))


def of_document(x, choice, *, rule="gated_delta", own_chunk="both", decay_through_softmax=True, detach_own_chunk=False):
    """Both branches of one document: x[name] [L, heads, size], choice [N, H, 2]."""
    length = len(x["q"])
    gates = [jnp.zeros((length, HEADS)) if x["log_decay"] is None else x["log_decay"]]
    gates.append(jnp.ones((length, HEADS)) if x["beta"] is None else x["beta"])
    linear = functools.partial(
        linear_branch, own=own_chunk != "softmax", erase=rule != "ssd", decay_through_softmax=decay_through_softmax
    )
    o_linear = jax.vmap(linear, 1, 1)(x["q"], x["k"], x["v"], *gates, choice[..., 1])
    softmax = functools.partial(softmax_branch, own=own_chunk != "linear", detach=detach_own_chunk)
    repeated = jnp.repeat(choice[..., 0], GROUP, axis=1)
    o_softmax = jax.vmap(softmax, 1, 1)(x["q_softmax"], x["k_softmax"], x["v_softmax"], repeated)
    return (1.0 if rule == "ssd" else x["q"].shape[-1] ** -0.5) * o_linear, o_softmax


def linear_branch(q, k, v, log_decay, beta, share, *, own, erase, decay_through_softmax):
    """One head token by token: a working copy of the state that the end of a chunk commits to the degree `share`."""
    place = np.arange(len(q))

    def token(carry, given):
        start, working, passed = carry
        q, k, v, log_decay, beta, share, closes = given
        working, passed = jnp.exp(log_decay) * working, passed + log_decay
        working = working + beta * jnp.outer(k, v - (working.T @ k if erase else 0))
        decayed = jnp.exp(passed) * start
        kept = decayed if decay_through_softmax else start
        out = (working if own else decayed).T @ q
        committed = (1 - share) * kept + share * working
        after = (committed, committed, jnp.zeros_like(passed))
        return tuple(jnp.where(closes, a, b) for a, b in zip(after, (start, working, passed), strict=True)), out

    zeros = jnp.zeros((q.shape[1], v.shape[1]))
    closes = place % CHUNK == CHUNK - 1
    tokens = (q, k, v, log_decay, beta, share[place // CHUNK], closes)
    return jax.lax.scan(token, (zeros, zeros, jnp.zeros(())), tokens)[1]


def softmax_branch(q, k, v, share, *, own, detach):
    """One head with all pairs of tokens; `share` [N] multiplies the terms of earlier chunks."""
    i, j = np.ogrid[: len(q), : len(q)]
    earlier, mine = j // CHUNK < i // CHUNK, (j // CHUNK == i // CHUNK) & (j <= i) & own
    logits = q @ k.T * q.shape[1] ** -0.5
    if detach:
        logits = jnp.where(mine, jax.lax.stop_gradient(logits), logits)
    terms = jnp.where(mine, 1, jnp.where(earlier, share[np.arange(len(q)) // CHUNK], 0)) * jnp.exp(logits)
    total = terms.sum(axis=1, keepdims=True)
    p = terms / jnp.where(total > 0, total, 1)
    return jnp.where(mine, 0, p) @ v + jnp.where(mine, p, 0) @ (jax.lax.stop_gradient(v) if detach else v)


@functools.partial(jax.jit, static_argnums=3)
def _differentiate_document(inputs, choice, cotangent, options):
    out, pull_back = jax.vjp(functools.partial(of_document, **dict(options)), inputs, choice)
    return out, *pull_back(cotangent)


def differentiate_definition(call: Call, **options):
    """Outputs of the definition and its gradients, that of the soft choice for both operations."""
    ids = np.ones(call.inputs["q"].shape[:2], int) if call.segment_ids is None else call.segment_ids
    inputs = cast(call, np.float64).inputs
    outs = tuple(np.zeros(x.shape) for x in call.out_cotangent)
    gradients = {name: None if x is None else np.zeros(x.shape) for name, x in inputs.items()}
    for row, places, chunks, one, choice in alone(inputs, ids):
        length = len(places)
        cotangent = tuple(filled_up(x[row, places], TOKENS) for x in call.out_cotangent)
        with precision():
            results, of_inputs, of_choice = jax.device_get(
                _differentiate_document(one, choice, cotangent, tuple(sorted(options.items())))
            )
        for out, x in zip(outs, results, strict=True):
            out[row, places] = x[:length]
        for name, x in of_inputs.items():
            if x is not None:
                gradients[name][row, places] = x[:length]
        gradients["choice"][row, chunks] = of_choice[: chunks.stop - chunks.start]
    return outs, gradients


def complete_chunks(call: Call):
    """Chunks whose every slot holds a token, bool [B, N]."""
    tokens = call.inputs["q"].shape[1]
    ids = np.ones((BATCH, tokens), int) if call.segment_ids is None else call.segment_ids
    filled = np.zeros(BATCH, int) if call.state is None else call.state.filled
    full = np.zeros(call.inputs["choice"].shape[:2], bool)
    for row in range(BATCH):
        chunk = token_chunks(ids[row], filled[row])
        counts = np.bincount(chunk[chunk >= 0], minlength=full.shape[1])
        counts[0] += filled[row]
        full[row] = counts[: full.shape[1]] == CHUNK
    return full


def cut(call: Call, part, state) -> Call:
    """The tokens of `part`, bool [B, T], with everything else NaN and padding, continuing `state`."""
    inputs = {
        name: x
        if x is None or name == "choice"
        else np.where(part.reshape(*part.shape, *[1] * (x.ndim - 2)), x, np.nan)
        for name, x in call.inputs.items()
    }
    ids = np.where(part, call.segment_ids, 0)
    choice = np.full_like(call.inputs["choice"], 0.5)
    for row, of_part, of_call in chunk_pairs(call, ids, state):
        choice[row, of_part] = call.inputs["choice"][row, of_call]
    cotangent = tuple(np.where(part[..., None, None], x, 1) for x in call.out_cotangent)
    return call._replace(inputs=inputs | {"choice": choice}, segment_ids=ids, state=state, out_cotangent=cotangent)


def chunk_pairs(call: Call, ids, state):
    """Rows, chunks of the part `ids`, and the chunks of the whole call that they are."""
    for row in range(BATCH):
        whole = token_chunks(call.segment_ids[row], call.state.filled[row])
        of_part = token_chunks(ids[row], state.filled[row])
        used = of_part >= 0
        yield row, of_part[used], whole[used]


def evaluate_parts(call: Call, parts, implementation, *, separate=False, **options) -> Evaluation:
    """The parts one after the other, the state handed on, and the chain rule back through them.

    Separate parts are documents: all but the first of each row begin anew.
    """
    state, pieces, begun = call.state, [], np.zeros(BATCH, bool)
    anew = []
    for part in parts:
        present = part.any(axis=1)
        anew.append(present & begun if separate else np.zeros(BATCH, bool))
        begun |= present
        state = cleared(state, anew[-1])
        pieces.append(cut(call, part, state))
        state = evaluate(pieces[-1], implementation, **options).state
    final, cotangent = state, call.state_cotangent
    out = [np.zeros_like(x) for x in call.out_cotangent]
    gradients = {name: None if x is None else np.zeros_like(x) for name, x in call.inputs.items()}
    for piece, fresh in zip(reversed(pieces), reversed(anew), strict=True):
        result = evaluate(piece._replace(state_cotangent=cotangent), implementation, **options)
        cotangent = cleared(result.state_gradient, fresh)
        out = [a + b for a, b in zip(out, result.out, strict=True)]
        for name in gradients.keys() - {"choice"}:
            if gradients[name] is not None:
                gradients[name] += result.gradients[name]
        for row, of_part, of_call in chunk_pairs(call, piece.segment_ids, piece.state):
            for one, other in sorted(set(zip(of_part.tolist(), of_call.tolist(), strict=True))):
                gradients["choice"][row, other] += result.gradients["choice"][row, one]
    return Evaluation(tuple(out), final, gradients, cotangent)


def cleared(tree, rows):
    """Arrays [B, ...] with some rows zero."""
    return jax.tree.map(lambda x: np.where(rows.reshape(-1, *[1] * (x.ndim - 1)), np.zeros_like(x), x), tree)


def chosen_only(gradient, choice, complete):
    """The router's gradient of natsl.md: that of the operation that each complete chunk chose."""
    return np.where((choice > 0) & complete[..., None, None], gradient, 0)


def capped_softmax_gradient(call: Call):
    """sum of min(exp(s - lse), 1) (do . v - do . o) over pairs of a chunk's tokens and later ones, [B, N, H]."""
    x, chunk = call.inputs, np.arange(TOKENS) // CHUNK
    out = np.zeros((BATCH, math.ceil(TOKENS / CHUNK), HEADS))
    for row in range(BATCH):
        for head in range(HEADS * GROUP):
            q, k, v = (x[f"{name}_softmax"][row, :, head] for name in "qkv")
            cotangent = call.out_cotangent[1][row, :, head]
            logits = q @ k.T * SOFTMAX_KEYS**-0.5
            kept = x["choice"][row, chunk, head // GROUP, 0] > 0
            earlier = chunk[:, None] > chunk
            seen = (earlier & kept) | ((chunk[:, None] == chunk) & np.tri(TOKENS, dtype=bool))
            terms = np.where(seen, np.exp(logits), 0)
            total = terms.sum(axis=1, keepdims=True)
            p = np.minimum(np.exp(logits) / total, 1)
            pull = np.where(earlier, p * (cotangent @ v.T - np.sum(cotangent * (terms / total @ v), 1)[:, None]), 0)
            np.add.at(out[row, :, head // GROUP], chunk, pull.sum(axis=0))
    return out
