"""Generation: continue prompts token by token with a model's state, in constant memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

# Prompts are padded to a multiple of this, so that prompts of similar lengths share one compilation.
_PREFILL_MULTIPLE = 64


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn. The filters apply in the order temperature, top_k, top_p.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: only the k most likely tokens; None for all.
        top_p: only the fewest most likely tokens whose probabilities add up to p or more; None for all.

    Raises:
        ValueError: if a number is out of its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature: expected a finite number of at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k: expected at least 1 or None, got {self.top_k}")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p: expected a number in (0, 1] or None, got {self.top_p}")


def filter_logits(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """The logits that a token is drawn from, -inf where it may not be drawn.

    Tokens as likely as the last one that is let in are let in too.

    Args:
        logits: [..., V].
        sampling: temperature above 0.

    Returns:
        [..., V] float32.

    Source of top_p: Holtzman et al., "The Curious Case of Neural Text Degeneration", arXiv 1904.09751.
    """
    logits = logits.astype(jnp.float32) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, sampling.top_k)[0][..., -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p is not None and sampling.top_p < 1.0:
        descending = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
        probabilities = jax.nn.softmax(descending, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        least = jnp.min(jnp.where(before < sampling.top_p, descending, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits


def sample(logits: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """Draws a token for each row.

    Args:
        logits: [B, V].
        key: of jax.random; not used at temperature 0.
        sampling: how.

    Returns:
        int32 [B].
    """
    if sampling.temperature == 0.0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, filter_logits(logits, sampling), axis=-1).astype(jnp.int32)


def stream(
    model: nnx.Module, prompts: Sequence[np.ndarray], *, sampling: Sampling | None = None, seed: int = 0
) -> Iterator[np.ndarray]:
    """Continues prompts for ever, one token of each at a time.

    The prompts go through one full pass, padded on the left with segment id 0 to one length; after that every token
    is one call of the same compiled step, which carries the model's state and nothing that grows.

    Args:
        model: (tokens, segment_ids=, state=) -> (logits [B, T, V], state), with init_state(batch_size).
        prompts: ids of each prompt, int [tokens], at least one token each.
        sampling: how tokens are drawn; temperature 1 by default.
        seed: of the draws.

    Yields:
        The next token of each prompt, int32 [B].

    Raises:
        ValueError: if there is no prompt or an empty one.
    """
    sampling = sampling or Sampling()
    tokens, segment_ids = _pad_left(prompts)
    structure, variables = nnx.split(model)
    key = jax.random.key(seed)
    state = model.init_state(len(prompts))  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    token, state = _prefill(variables, tokens, segment_ids, state, key, structure=structure, sampling=sampling)
    for index in range(1, 2**31):
        yield np.asarray(token)
        token, state = _decode(variables, token, state, key, index, structure=structure, sampling=sampling)


def generate(
    model: nnx.Module,
    prompts: Sequence[np.ndarray],
    *,
    max_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
) -> list[np.ndarray]:
    """Continues prompts.

    Args:
        model: see `stream`.
        prompts: ids of each prompt.
        max_tokens: the most tokens added to a prompt.
        sampling: how tokens are drawn.
        seed: of the draws.
        stop_ids: ids that end a continuation; they are not part of it.

    Returns:
        The continuation of each prompt, int32 [tokens], without the prompt.

    Raises:
        ValueError: if there is no prompt, an empty one, or `max_tokens` is below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens: expected at least 1, got {max_tokens}")
    drawn: list[np.ndarray] = []
    running = np.ones(len(prompts), bool)
    for token in stream(model, prompts, sampling=sampling, seed=seed):
        drawn.append(token)
        running &= ~np.isin(token, stop_ids)
        if len(drawn) == max_tokens or not running.any():
            break
    columns = np.stack(drawn, axis=1)
    stopped = np.isin(columns, stop_ids)
    lengths = np.where(stopped.any(axis=1), stopped.argmax(axis=1), columns.shape[1])
    return [row[:length] for row, length in zip(columns, lengths, strict=True)]


def _pad_left(prompts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    if not prompts:
        raise ValueError("prompts: expected at least one, got none")
    lengths = [len(prompt) for prompt in prompts]
    if min(lengths) < 1:
        raise ValueError(f"prompts: expected at least one token in each, got lengths {lengths}")
    padded = -(-max(lengths) // _PREFILL_MULTIPLE) * _PREFILL_MULTIPLE
    tokens, segment_ids = (np.zeros((len(prompts), padded), np.int32) for _ in range(2))
    for row, prompt in enumerate(prompts):
        tokens[row, padded - len(prompt) :] = prompt
        segment_ids[row, padded - len(prompt) :] = 1
    return tokens, segment_ids


@partial(jax.jit, static_argnames=("structure", "sampling"))
def _prefill(
    variables: Any,
    tokens: jax.Array,
    segment_ids: jax.Array,
    state: Any,
    key: jax.Array,
    *,
    structure: Any,
    sampling: Sampling,
) -> tuple[jax.Array, Any]:
    model = nnx.merge(structure, variables)
    logits, state = model(tokens, segment_ids=segment_ids, state=state)
    return sample(logits[:, -1], jax.random.fold_in(key, 0), sampling), state


@partial(jax.jit, static_argnames=("structure", "sampling"), donate_argnames="state")
def _decode(
    variables: Any, token: jax.Array, state: Any, key: jax.Array, index: int, *, structure: Any, sampling: Sampling
) -> tuple[jax.Array, Any]:
    model = nnx.merge(structure, variables)
    logits, state = model(token[:, None], state=state)
    return sample(logits[:, 0], jax.random.fold_in(key, index), sampling), state
