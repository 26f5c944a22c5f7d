"""The serial recurrences as printed in the design, in numpy: states are dictionaries, one head, one token at a time."""

import numpy as np


def linear_attention_step(state, q, k, v, a):
    """P = a P + k v^T ; m = a m + k."""
    P, m = a * state["P"] + np.outer(k, v), a * state["m"] + k
    return q @ P, {"P": P, "m": m}


def hla2_step(state, q, k, v, a, *, masked=True, decay_form="masked", ridge=0.0):
    """S, C, m as usual; G = a^2 G + a k (k^T C_prev), or a G + k (k^T C_prev) as printed; o = q^T (S C - G)."""
    own, joint = (a, 1.0) if decay_form == "printed" else (a**2, a)
    G = own * state["G"] + joint * np.outer(k, k @ state["C"])
    h = own * state["h"] + joint * k * (k @ state["m"])
    S, C, m = a * state["S"] + np.outer(k, k), a * state["C"] + np.outer(q, v), a * state["m"] + q
    effective = S + ridge * np.eye(len(q))
    return q @ (effective @ C - masked * G), {"S": S, "C": C, "m": m, "G": G, "h": h}


def ahla_step(state, q, k, v, a):
    """P = a P + k v^T ; m = a m + k ; E = a E + k (q^T P) ; n = a n + k (q^T m)."""
    P, m = a * state["P"] + np.outer(k, v), a * state["m"] + k
    E, n = a * state["E"] + np.outer(k, q @ P), a * state["n"] + k * (q @ m)
    return q @ E, {"P": P, "m": m, "E": E, "n": n}


def hla3_step(state, q, k, v, a, *, mask="exact"):
    """S, Q, P, m as usual; F = a^3 F + (S q)(q^T P), or the four printed terms with the moments before the token."""
    S, Q = a * state["S"] + np.outer(k, k), a * state["Q"] + np.outer(q, q)
    P, m = a * state["P"] + np.outer(k, v), a * state["m"] + k
    if mask == "exact":
        F, f = a**3 * state["F"] + np.outer(S @ q, q @ P), a**3 * state["f"] + (S @ q) * (q @ m)
    else:
        kk, qq = np.outer(k, k), np.outer(q, q)
        terms = state["S"] @ qq + kk @ state["Q"] + kk @ qq
        F = state["F"] + terms @ np.outer(k, v) + kk @ qq @ state["P"]
        f = state["f"] + terms @ k + kk @ qq @ state["m"]
    return q @ F, {"S": S, "Q": Q, "P": P, "m": m, "F": F, "f": f}


def run(step, q, k, v, log_decay, state, **options):
    """Runs one head over [T, ...] arrays and returns the outputs and the final state."""
    outputs = []
    for token in zip(q, k, v, np.exp(log_decay), strict=True):
        out, state = step(state, *token, **options)
        outputs.append(out)
    return np.stack(outputs), state


def gated_delta_rule(
    q, k, v, log_decay, beta, S, segment_ids, *, scale, write_mask=None, decay_masked=True, chunk_size=64
):
    """S = a S ; S = S + beta k (v - S^T k)^T ; o = scale S^T q, and after chunk c: S = base + m_c (S - base).

    The base is the state as the chunk would leave it without writing: its start, decayed if `decay_masked`.
    """
    out, document = np.zeros((len(q), v.shape[1])), None
    for start in range(0, len(q), chunk_size):
        base = S
        for t in range(start, min(start + chunk_size, len(q))):
            if segment_ids[t] == 0:
                continue
            if document not in (None, segment_ids[t]):
                S, base = np.zeros_like(S), np.zeros_like(S)
            document, a = segment_ids[t], np.exp(log_decay[t])
            base = a * base if decay_masked else base
            S = a * S
            S = S + beta[t] * np.outer(k[t], v[t] - S.T @ k[t])
            out[t] = scale * S.T @ q[t]
        if write_mask is not None:
            S = base + write_mask[start // chunk_size] * (S - base)
    return out, S
