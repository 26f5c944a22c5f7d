"""The three faults of the HLA paper, each shown by the printed formula failing where ours holds."""

import functools

import numpy as np

from tests.mixers import brute_force
from tests.mixers.recurrences import ahla_step, hla2_step, hla3_step, run
from tests.tolerances import BRUTE_FORCE, rms_ratio

LENGTH, GAMMA = 9, 0.9


def arrays():
    """q, k, v of one head and a constant decay."""
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(LENGTH, 4)), rng.normal(size=(LENGTH, 4)), rng.normal(size=(LENGTH, 3))
    return q, k, v, np.full(LENGTH, np.log(GAMMA))


def both_folds(combine, items):
    """The left and the right fold of one operator."""
    left = functools.reduce(combine, items)
    right = functools.reduce(lambda later, earlier: combine(earlier, later), reversed(items))
    return left, right


def hla2_token(q, k, v, a):
    return {"S": np.outer(k, k), "C": np.outer(q, v), "G": np.zeros((len(k), len(v))), "rho": a}


def hla2_combine(a, b, printed):
    """Section 4.2 of the paper as printed, or with G decayed by the square."""
    own, joint = (b["rho"], b["rho"]) if printed else (b["rho"] ** 2, b["rho"])
    return {
        "S": b["rho"] * a["S"] + b["S"],
        "C": b["rho"] * a["C"] + b["C"],
        "G": own * a["G"] + b["G"] + joint * b["S"] @ a["C"],
        "rho": a["rho"] * b["rho"],
    }


def hla2_printed_corrected(a, b):
    """The printed recurrence needs one more matrix X, whose token is k k^T."""
    return {
        "S": b["rho"] * a["S"] + b["S"],
        "C": b["rho"] * a["C"] + b["C"],
        "X": b["rho"] * a["X"] + a["rho"] * b["X"],
        "G": b["rho"] * a["G"] + b["G"] + b["X"] @ a["C"],
        "rho": a["rho"] * b["rho"],
    }


def ahla_token(q, k, v, a):
    kv = np.outer(k, v)
    return {"R": np.outer(k, q), "P": kv, "E": (q @ k) * kv, "rho": a}


def ahla_combine(a, b, printed):
    """Section 6.2 of the paper as printed (R decays), or with R flat."""
    return {
        "R": (b["rho"] if printed else 1.0) * a["R"] + b["R"],
        "P": b["rho"] * a["P"] + b["P"],
        "E": b["rho"] * a["E"] + b["E"] + b["rho"] * b["R"] @ a["P"],
        "rho": a["rho"] * b["rho"],
    }


def zeros(*names, key=4, value=3):
    """An empty state of one head."""
    shapes = {"S": (key, key), "Q": (key, key), "m": (key,), "n": (key,), "h": (key,), "f": (key,)}
    return {name: np.zeros(shapes.get(name, (key, value))) for name in names}


def token_list(token, extra=()):
    q, k, v, log_decay = arrays()
    items = [token(*given) for given in zip(q, k, v, np.exp(log_decay), strict=True)]
    for name, source in extra:
        for item in items:
            item[name] = item[source]
    return items


class TestDecayedSecondOrder:
    def test_the_printed_operator_is_not_associative_and_misses_the_printed_recurrence(self):
        left, right = both_folds(functools.partial(hla2_combine, printed=True), token_list(hla2_token))
        _, serial = run(hla2_step, *arrays(), zeros("S", "C", "m", "G", "h"), decay_form="printed")
        assert rms_ratio(right["G"], left["G"]) > 0.01
        assert rms_ratio(left["G"], serial["G"]) > 0.01
        assert rms_ratio(right["G"], serial["G"]) > 0.01

    def test_the_printed_operator_holds_without_decay(self):
        items = [item | {"rho": 1.0} for item in token_list(hla2_token)]
        left, right = both_folds(functools.partial(hla2_combine, printed=True), items)
        assert rms_ratio(right["G"], left["G"]) <= BRUTE_FORCE

    def test_decaying_by_the_square_is_associative_and_is_the_masked_product(self):
        left, right = both_folds(functools.partial(hla2_combine, printed=False), token_list(hla2_token))
        assert rms_ratio(right["G"], left["G"]) <= BRUTE_FORCE
        q, k, v, log_decay = arrays()
        masked = brute_force.hla2(q, k, v, log_decay)
        assert rms_ratio(q[-1] @ (left["S"] @ left["C"] - left["G"]), masked[-1]) <= BRUTE_FORCE

    def test_the_printed_recurrence_is_not_the_masked_product(self):
        out, _ = run(hla2_step, *arrays(), zeros("S", "C", "m", "G", "h"), decay_form="printed")
        assert rms_ratio(out, brute_force.hla2(*arrays())) > 0.01
        assert rms_ratio(out, brute_force.hla2(*arrays(), decay_form="printed")) <= BRUTE_FORCE

    def test_one_more_matrix_makes_the_printed_recurrence_associative(self):
        left, right = both_folds(hla2_printed_corrected, token_list(hla2_token, extra=[("X", "S")]))
        _, serial = run(hla2_step, *arrays(), zeros("S", "C", "m", "G", "h"), decay_form="printed")
        assert rms_ratio(right["G"], left["G"]) <= BRUTE_FORCE
        assert rms_ratio(left["G"], serial["G"]) <= BRUTE_FORCE


class TestDecayedAsymmetric:
    def test_the_printed_operator_is_not_associative_and_misses_the_recurrence(self):
        left, right = both_folds(functools.partial(ahla_combine, printed=True), token_list(ahla_token))
        _, serial = run(ahla_step, *arrays(), zeros("P", "m", "E", "n"))
        assert rms_ratio(right["E"], left["E"]) > 0.01
        assert rms_ratio(right["E"], serial["E"]) > 0.01

    def test_with_a_flat_moment_it_is_associative_and_is_the_recurrence(self):
        left, right = both_folds(functools.partial(ahla_combine, printed=False), token_list(ahla_token))
        _, serial = run(ahla_step, *arrays(), zeros("P", "m", "E", "n"))
        assert rms_ratio(right["E"], left["E"]) <= BRUTE_FORCE
        assert rms_ratio(left["E"], serial["E"]) <= BRUTE_FORCE


class TestPrintedThirdOrder:
    def test_the_printed_recurrence_is_not_the_masked_product(self):
        q, k, v, _ = arrays()
        undecayed = np.zeros(LENGTH)
        printed, _ = run(hla3_step, q, k, v, undecayed, zeros("S", "Q", "P", "m", "F", "f"), mask="printed")
        exact, _ = run(hla3_step, q, k, v, undecayed, zeros("S", "Q", "P", "m", "F", "f"))
        matrix = np.tril(q @ k.T)
        product = np.tril(matrix @ matrix.T) @ matrix @ v
        assert rms_ratio(exact, product) <= BRUTE_FORCE
        assert rms_ratio(printed, product) > 0.01

    def test_the_printed_recurrence_keeps_triples_whose_maximum_is_reached_twice(self):
        q, k, v, _ = arrays()
        undecayed = np.zeros(LENGTH)
        printed, _ = run(hla3_step, q, k, v, undecayed, zeros("S", "Q", "P", "m", "F", "f"), mask="printed")
        assert rms_ratio(printed, brute_force.hla3(q, k, v, undecayed, mask="printed")) <= BRUTE_FORCE
