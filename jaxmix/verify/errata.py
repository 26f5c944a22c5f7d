"""Three faults of the HLA paper, shown in numbers.

The operators here are transcribed as printed and are wrong on purpose; numpy float64, one head, one decay a per token.
Source: Zhang, Qin, Wang, Gu, "Higher-order Linear Attention", arXiv 2510.27258.

1. Sections 4.2 and 4.3: the decayed concatenation of HLA2 is not associative and does not give the printed recurrence;
   the printed recurrence in turn is not a masked product.
2. Section 6.2: the decayed concatenation of AHLA decays the moment R, so that E counts the decay twice.
3. Theorem 7.1: the streaming kernel of the third order (Algorithm 3) is not the masked product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxmix.verify import explicit
from jaxmix.verify.errata_interdomain import interdomain_rows
from jaxmix.verify.report import Row, relative_error

Float64 = NDArray[np.float64]

LENGTH, KEY_SIZE, VALUE_SIZE, DECAY = 9, 4, 3, 0.9
EXACT = 1e-12
VISIBLE = 1e-2


class HLA2Moments(NamedTuple):
    """S = sum k k^T, C = sum q v^T, G the correction; X the extra matrix of the corrected operator; rho the decay."""

    S: Float64
    C: Float64
    G: Float64
    X: Float64
    rho: float


class AHLAMoments(NamedTuple):
    """R = sum k q^T, P = sum k v^T, E the second-order moment; rho the decay."""

    R: Float64
    P: Float64
    E: Float64
    rho: float


def printed_hla2_combine(a: HLA2Moments, b: HLA2Moments) -> HLA2Moments:
    """Section 4.2 as printed: G = rB GA + GB + SB (rB CA)."""
    return HLA2Moments(
        S=b.rho * a.S + b.S,
        C=b.rho * a.C + b.C,
        G=b.rho * a.G + b.G + b.S @ (b.rho * a.C),
        X=b.rho * a.X + a.rho * b.X,
        rho=a.rho * b.rho,
    )


def corrected_printed_hla2_combine(a: HLA2Moments, b: HLA2Moments) -> HLA2Moments:
    """An associative operator for the printed recurrence: G = rB GA + GB + XB CA."""
    return printed_hla2_combine(a, b)._replace(G=b.rho * a.G + b.G + b.X @ a.C)


def masked_hla2_combine(a: HLA2Moments, b: HLA2Moments) -> HLA2Moments:
    """The operator of the masked product: G = rB^2 GA + GB + rB SB CA."""
    return printed_hla2_combine(a, b)._replace(G=b.rho**2 * a.G + b.G + b.rho * b.S @ a.C)


def printed_ahla_combine(a: AHLAMoments, b: AHLAMoments) -> AHLAMoments:
    """Section 6.2 as printed: R = rB RA + RB, and E = rB EA + EB + rB RB PA on top of it."""
    return flat_ahla_combine(a, b)._replace(R=b.rho * a.R + b.R)


def flat_ahla_combine(a: AHLAMoments, b: AHLAMoments) -> AHLAMoments:
    """The associative operator: the same E, with R = RA + RB never decayed."""
    return AHLAMoments(
        R=a.R + b.R,
        P=b.rho * a.P + b.P,
        E=b.rho * a.E + b.E + b.rho * b.R @ a.P,
        rho=a.rho * b.rho,
    )


def hla2_tokens(q: Float64, k: Float64, v: Float64, decay: float) -> list[HLA2Moments]:
    """Single-token summaries; q, k [T, D], v [T, E]."""
    zero = np.zeros((q.shape[1], v.shape[1]))
    return [
        HLA2Moments(np.outer(kt, kt), np.outer(qt, vt), zero, np.outer(kt, kt), decay)
        for qt, kt, vt in zip(q, k, v, strict=True)
    ]


def ahla_tokens(q: Float64, k: Float64, v: Float64, decay: float) -> list[AHLAMoments]:
    """Single-token summaries; q, k [T, D], v [T, E]."""
    return [
        AHLAMoments(np.outer(kt, qt), np.outer(kt, vt), np.outer(kt, vt) * (qt @ kt), decay)
        for qt, kt, vt in zip(q, k, v, strict=True)
    ]


def hla2_recurrence(
    q: Float64, k: Float64, v: Float64, decay: float, *, form: Literal["masked", "printed"]
) -> tuple[Float64, Float64]:
    """Token by token: S, C as usual, G = a G + k (k^T C_prev) (printed) or a^2 G + a k (k^T C_prev) (masked).

    Returns:
        Outputs [T, E], o_t = q_t^T (S_t C_t - G_t), and the final G [D, E].
    """
    S = np.zeros((q.shape[1], q.shape[1]))
    C = np.zeros((q.shape[1], v.shape[1]))
    G = np.zeros_like(C)
    outputs = []
    for qt, kt, vt in zip(q, k, v, strict=True):
        update = np.outer(kt, kt @ C)
        G = decay * G + update if form == "printed" else decay**2 * G + decay * update
        S = decay * S + np.outer(kt, kt)
        C = decay * C + np.outer(qt, vt)
        outputs.append(qt @ (S @ C - G))
    return np.stack(outputs), G


def ahla_recurrence(q: Float64, k: Float64, v: Float64, decay: float) -> tuple[Float64, Float64]:
    """Token by token: P = a P + k v^T, E = a E + k (q^T P).

    Returns:
        Outputs [T, E], o_t = q_t^T E_t, and the final E [D, E].
    """
    P = np.zeros((q.shape[1], v.shape[1]))
    E = np.zeros_like(P)
    outputs = []
    for qt, kt, vt in zip(q, k, v, strict=True):
        P = decay * P + np.outer(kt, vt)
        E = decay * E + np.outer(kt, qt @ P)
        outputs.append(qt @ E)
    return np.stack(outputs), E


def hla3_printed_recurrence(q: Float64, k: Float64, v: Float64) -> Float64:
    """Algorithm 3 as printed, without decay; returns outputs [T, E].

    F = F + S_prev q q^T k v^T + k k^T Q_prev k v^T + k k^T q q^T P_prev + k k^T q q^T k v^T, o_t = q_t^T F_t.
    """
    S = np.zeros((q.shape[1], q.shape[1]))
    Q = np.zeros_like(S)
    P = np.zeros((q.shape[1], v.shape[1]))
    F = np.zeros_like(P)
    outputs = []
    for qt, kt, vt in zip(q, k, v, strict=True):
        KK, QQ, KV = np.outer(kt, kt), np.outer(qt, qt), np.outer(kt, vt)
        F = F + S @ QQ @ KV + KK @ Q @ KV + KK @ QQ @ P + KK @ QQ @ KV
        S, Q, P = S + KK, Q + QQ, P + KV
        outputs.append(qt @ F)
    return np.stack(outputs)


def left_fold[S](combine: Callable[[S, S], S], summaries: Sequence[S]) -> S:
    """((s1 s2) s3) ... ."""
    return functools.reduce(combine, summaries)


def right_fold[S](combine: Callable[[S, S], S], summaries: Sequence[S]) -> S:
    """s1 (s2 (s3 ...))."""
    return functools.reduce(lambda later, earlier: combine(earlier, later), reversed(summaries))


def errata_rows(*, seed: int = 0) -> list[Row]:
    """Rows that pass when each printed formula fails as documented and its correction holds.

    Those of interdomain attention are about choices that its paper leaves open.

    Args:
        seed: Seed of the random tokens (9 tokens, key size 4, value size 3, decay 0.9).
    """
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, LENGTH, KEY_SIZE))
    v = rng.normal(size=(LENGTH, VALUE_SIZE))
    return [*_hla2_rows(q, k, v), *_ahla_rows(q, k, v), *_hla3_rows(q, k, v), *interdomain_rows(q, k, v)]


def _hla2_rows(q: Float64, k: Float64, v: Float64) -> list[Row]:
    row = functools.partial(_row, "hla2")
    tokens, undecayed = hla2_tokens(q, k, v, DECAY), hla2_tokens(q, k, v, 1.0)
    left, right = (fold(printed_hla2_combine, tokens).G for fold in (left_fold, right_fold))
    flat_left, flat_right = (fold(printed_hla2_combine, undecayed).G for fold in (left_fold, right_fold))
    fixed_left, fixed_right = (fold(corrected_printed_hla2_combine, tokens).G for fold in (left_fold, right_fold))
    masked_left, masked_right = (fold(masked_hla2_combine, tokens).G for fold in (left_fold, right_fold))
    printed_out, printed_state = hla2_recurrence(q, k, v, DECAY, form="printed")
    masked_out, masked_state = hla2_recurrence(q, k, v, DECAY, form="masked")
    product = _explicit(explicit.hla2, q, k, v, DECAY)
    return [
        row("printed concatenation, a = 1: left fold against right fold", flat_left, flat_right),
        row(
            "printed concatenation, a = 0.9: left fold against right fold",
            left,
            right,
            fault="the printed decayed concatenation is not associative, as documented",
        ),
        row(
            "printed concatenation, a = 0.9: left fold against the printed recurrence",
            left,
            printed_state,
            fault="the printed decayed concatenation does not give the printed recurrence, as documented",
        ),
        row(
            "printed recurrence, a = 0.9: outputs against the masked product",
            printed_out,
            product,
            fault="with decay the printed recurrence is not a masked product, as documented",
        ),
        row("operator with X, a = 0.9: left fold against the printed recurrence", fixed_left, printed_state),
        row("operator with X, a = 0.9: left fold against right fold", fixed_left, fixed_right),
        row("G decayed by a^2: outputs against the masked product", masked_out, product),
        row("operator with rB^2 GA: left fold against the recurrence", masked_left, masked_state),
        row("operator with rB^2 GA: left fold against right fold", masked_left, masked_right),
    ]


def _ahla_rows(q: Float64, k: Float64, v: Float64) -> list[Row]:
    row = functools.partial(_row, "ahla")
    tokens, undecayed = ahla_tokens(q, k, v, DECAY), ahla_tokens(q, k, v, 1.0)
    left, right = (fold(printed_ahla_combine, tokens).E for fold in (left_fold, right_fold))
    flat_left, flat_right = (fold(printed_ahla_combine, undecayed).E for fold in (left_fold, right_fold))
    ours_left, ours_right = (fold(flat_ahla_combine, tokens).E for fold in (left_fold, right_fold))
    outputs, state = ahla_recurrence(q, k, v, DECAY)
    product = _explicit(explicit.ahla, q, k, v, DECAY)
    return [
        row("printed concatenation, a = 1: left fold against right fold", flat_left, flat_right),
        row(
            "printed concatenation (R decayed), a = 0.9: left fold against right fold",
            left,
            right,
            fault="the printed decayed concatenation is not associative, as documented",
        ),
        row(
            "printed concatenation (R decayed), a = 0.9: right fold against the recurrence",
            right,
            state,
            fault="with R decayed, E counts the decay twice, as documented",
        ),
        row("recurrence, a = 0.9: outputs against the masked product", outputs, product),
        row("operator with flat R, a = 0.9: left fold against the recurrence", ours_left, state),
        row("operator with flat R, a = 0.9: left fold against right fold", ours_left, ours_right),
    ]


def _hla3_rows(q: Float64, k: Float64, v: Float64) -> list[Row]:
    outputs = hla3_printed_recurrence(q, k, v)
    product = _explicit(explicit.hla3, q, k, v, 1.0)
    triples = _explicit(functools.partial(explicit.hla3, mask="printed"), q, k, v, 1.0)
    return [
        _row(
            "hla3",
            "Algorithm 3: outputs against the masked product",
            outputs,
            product,
            fault="the printed third order is not the masked product, as documented",
        ),
        _row("hla3", "Algorithm 3: outputs against the triples whose maximum is reached twice", outputs, triples),
    ]


def _row(mixer: str, case: str, actual: Float64, reference: Float64, *, fault: str = "") -> Row:
    """A comparison that must agree or, when `fault` names a fault of the paper, must visibly differ."""
    return Row(
        mixer=mixer,
        option="as printed" if fault else "corrected",
        check="errata",
        case=case,
        error=relative_error(actual, reference),
        tolerance=VISIBLE if fault else EXACT,
        expect="above" if fault else "below",
        note=fault,
    )


def _explicit(mixer: Callable[..., Float64], q: Float64, k: Float64, v: Float64, decay: float) -> Float64:
    heads = (x[None, :, None, :] for x in (q, k, v))
    return mixer(*heads, np.log([decay]))[0, :, 0]
