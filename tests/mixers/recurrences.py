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
