"""The definitions as explicit sums over pairs and triples of tokens, in float64 numpy, for one head and one document.

Sums are written as arrays with one axis per summed token; `keep` says which terms belong to the sum. Notation:
    w[t, i] = q_t . k_i        c[s, t] = a_{s+1} ... a_t for s <= t, else 0
"""

from collections.abc import Callable, Iterator

import numpy as np


def decay_products(log_decay) -> np.ndarray:
    """c[s, t], each the product of its decays."""
    tokens = len(log_decay)
    c = np.eye(tokens)
    for s in range(tokens):
        for t in range(s + 1, tokens):
            c[s, t] = c[s, t - 1] * np.exp(log_decay[t])
    return c


def linear_attention(q, k, v, log_decay) -> np.ndarray:
    """o_t = sum_{j <= t} c(j, t) (q_t . k_j) v_j."""
    c, w = decay_products(log_decay), q @ k.T
    t, j = np.ogrid[: len(q), : len(q)]
    return np.where(j <= t, c[j, t] * w[t, j], 0) @ v


def hla2(q, k, v, log_decay, *, masked=True, decay_form="masked", ridge=0.0) -> np.ndarray:
    """o_t = sum_{i <= j <= t} c(i,t) c(j,t) (q_t . k_i) (q_j . k_i) v_j.

    Unmasked, i and j run to t independently. The printed recurrence takes from that sum the terms j < i with
    c(i, t) c(j, i-1) in place of their own decays. The ridge adds lambda sum_{j <= t} c(j, t) (q_t . q_j) v_j.
    """
    c, w = decay_products(log_decay), q @ k.T
    t, j, i = np.ogrid[: len(q), : len(q), : len(q)]
    both_sums = np.where((i <= t) & (j <= t), c[i, t] * c[j, t] * w[t, i] * w[j, i], 0)
    if not masked:
        terms = both_sums
    elif decay_form == "printed":
        subtracted = (j < i) & (i <= t)
        terms = both_sums - np.where(subtracted, c[i, t] * c[j, np.maximum(i - 1, 0)] * w[t, i] * w[j, i], 0)
    else:
        terms = np.where(i <= j, both_sums, 0)
    return terms.sum(axis=2) @ v + ridge * linear_attention(q, q, v, log_decay)


def ahla(q, k, v, log_decay) -> np.ndarray:
    """o_t = sum_{j <= i <= t} c(j,t) (q_t . k_i) (q_i . k_j) v_j."""
    c, w = decay_products(log_decay), q @ k.T
    t, j, i = np.ogrid[: len(q), : len(q), : len(q)]
    keep = (j <= i) & (i <= t)
    return np.where(keep, c[j, t] * w[t, i] * w[i, j], 0).sum(axis=2) @ v


def hla3(q, k, v, log_decay, *, mask="exact") -> np.ndarray:
    """o_t = sum over triples of c(i,t) c(u,t) c(j,t) (q_t . k_i) (q_u . k_i) (q_u . k_j) v_j.

    The exact mask keeps i <= u and j <= u <= t; the printed one keeps the triples up to t whose maximum is
    reached at least twice.
    """
    c, w = decay_products(log_decay), q @ k.T
    t, j, i, u = np.ogrid[: len(q), : len(q), : len(q), : len(q)]
    if mask == "exact":
        keep = (i <= u) & (j <= u) & (u <= t)
    else:
        top = np.maximum(np.maximum(i, u), j)
        reached = (i == top).astype(int) + (u == top) + (j == top)
        keep = (top <= t) & (reached >= 2)
    decays = c[i, t] * c[u, t] * c[j, t]
    return np.where(keep, decays * w[t, i] * w[u, i] * w[u, j], 0).sum(axis=(2, 3)) @ v


def delta_rule(q, k, v, log_decay, beta, *, scale) -> np.ndarray:
    """o_t = scale sum_{j <= t} beta_j (q_t . M_t ... M_{j+1} k_j) v_j with M_i = a_i (I - beta_i k_i k_i^T)."""
    forget = [np.exp(g) * (np.eye(len(x)) - b * np.outer(x, x)) for x, g, b in zip(k, log_decay, beta, strict=True)]
    out = np.zeros((len(q), v.shape[1]))
    for t in range(len(q)):
        for j in range(t + 1):
            stored = beta[j] * k[j]
            for i in range(j + 1, t + 1):
                stored = forget[i] @ stored
            out[t] += scale * (q[t] @ stored) * v[j]
    return out


def by_document(one_head: Callable[..., np.ndarray], inputs, segment_ids, *, normalize=False, eps=1e-6, **options):
    """Applies a definition to each document of each head; normalised, divides by the same sums of v = 1 plus eps."""
    q, v = inputs["q"], inputs["v"]
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for row, head, tokens, terms in documents(inputs, segment_ids):
        numerator = one_head(*terms, **options)
        if normalize:
            ones = np.ones((len(tokens), 1))
            numerator = numerator / (one_head(terms[0], terms[1], ones, terms[3], **options) + eps)
        out[row, tokens, head] = numerator
    return out


def documents(inputs, segment_ids) -> Iterator[tuple[int, int, np.ndarray, tuple]]:
    """Yields (row, query head, token positions, (q, k, v, log_decay)) of every document, padding left out."""
    q, k, v, log_decay = expanded(**inputs)
    for row, names in enumerate(np.asarray(segment_ids)):
        real = np.flatnonzero(names)
        borders = np.flatnonzero(np.diff(names[real])) + 1
        for tokens in filter(len, np.split(real, borders)):
            for head in range(q.shape[2]):
                yield row, head, tokens, tuple(x[row, tokens, head] for x in (q, k, v, log_decay))


def expanded(q, k, v, log_decay=None):
    """Repeats shared heads, so that query head h reads key/value head h // (H // G), and writes out the decay."""
    heads = q.shape[2]
    k, v = (np.repeat(x, heads // x.shape[2], axis=2) for x in (k, v))
    if log_decay is None:
        return q, k, v, np.zeros(q.shape[:3])
    log_decay = np.broadcast_to(log_decay, (*q.shape[:2], np.shape(log_decay)[-1]))
    return q, k, v, np.repeat(log_decay, heads // log_decay.shape[2], axis=2)
