"""One token of every operator, stated once for all backends: each state matrix is walked over once.

A matrix moves as X' = keep X + x y^T. What a step reads from it, it reads from X in the same pass, and makes what X'
would give of it, w^T X' = keep w^T X + (w . x) y. So no matrix is met twice, and products of the matrices of a state
become products of a vector with one matrix after the other.

Dimension letters: B batch, G groups of query heads that share states, R query heads of a group, D key size, E value
size.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


class Vector(NamedTuple):
    """A vector in two forms.

    Attributes:
        row: its numbers, which go along the columns of a matrix.
        column: what `Tiles.advance` takes to weigh or fill the rows of a matrix.
    """

    row: Any
    column: Any


class Tiles(Protocol):
    """Inputs, states and outputs of one sequence and one group of heads, float32.

    Attributes:
        decay: a, a number in [0, 1].
        q: queries, one a head of the group; for `advance`.
        k: key.
        v: value, a row.
    """

    decay: Any
    q: Sequence[Vector]
    k: Vector
    v: Any

    def dot(self, x: Any, y: Any) -> Any:
        """x . y of two rows, a number."""
        ...

    def stand(self, row: Any) -> Vector:
        """A row [D] as a vector that can weigh the rows of a matrix."""
        ...

    def read(self, name: str, head: Any = 0) -> Any:
        """A state vector [D] before the token, as a row. `head` is 0 where the group shares it."""
        ...

    def write(self, name: str, row: Any, head: Any = 0) -> None:
        """Replaces a state vector."""
        ...

    def advance(
        self,
        name: str,
        keep: Any,
        x: Vector,
        y: Any,
        *,
        left: Sequence[Vector] = (),
        right: Sequence[Vector] = (),
        head: Any = 0,
    ) -> list[Any]:
        """Replaces a state matrix X by keep X + x y^T.

        Returns:
            w^T X for every w of `left`, then X w for every w of `right`, of the matrix before the token, as rows.
        """
        ...

    def each_head(self, step: Callable[..., None], *reads: Sequence[Any]) -> None:
        """Calls step(head, q, *rows) for every query head, with its row of every one of `reads`."""
        ...

    def emit(self, head: Any, numerator: Any, denominator: Any) -> None:
        """Writes the outputs of a query head: a row [E] and a number."""
        ...


def _linear_attention(t: Tiles) -> None:
    a, k = t.decay, t.k
    m = a * t.read("m") + k.row
    t.write("m", m)

    def of_head(r: Any, q: Vector, qp: Any) -> None:
        t.emit(r, a * qp + t.dot(q.row, k.row) * t.v, t.dot(q.row, m))

    t.each_head(of_head, t.advance("P", a, k, t.v, left=t.q))


def _hla2(t: Tiles, *, ridge: float, masked: bool) -> None:
    """u = (S + ridge)^T q, o = u^T C - q^T G, den = u . m - q . h, all of them with the token."""
    a, k, v = t.decay, t.k, t.v
    squared = a * a

    def of_head(r: Any, q: Vector, qs: Any) -> None:
        qk = t.dot(q.row, k.row)
        u = a * qs + qk * k.row
        if ridge:
            u = u + ridge * q.row
        m, h = t.read("m", r), t.read("h", r)
        h = squared * h + (a * t.dot(k.row, m)) * k.row
        m = a * m + q.row
        t.write("m", m, r)
        t.write("h", h, r)
        kc, uc = t.advance("C", a, q, v, left=(k, t.stand(u)), head=r)
        kc = a * kc
        numerator, denominator = a * uc + t.dot(u, q.row) * v, t.dot(u, m)
        if masked:
            (qg,) = t.advance("G", squared, k, kc, left=(q,), head=r)
            numerator = numerator - (squared * qg + qk * kc)
            denominator = denominator - t.dot(q.row, h)
        else:
            t.advance("G", squared, k, kc, head=r)
        t.emit(r, numerator, denominator)

    t.each_head(of_head, t.advance("S", a, k, k.row, left=t.q))


def _ahla(t: Tiles) -> None:
    a, k, v = t.decay, t.k, t.v
    m = a * t.read("m") + k.row
    t.write("m", m)

    def of_head(r: Any, q: Vector, qp: Any) -> None:
        qk = t.dot(q.row, k.row)
        qp = a * qp + qk * v
        n = a * t.read("n", r) + t.dot(q.row, m) * k.row
        t.write("n", n, r)
        (qe,) = t.advance("E", a, k, qp, left=(q,), head=r)
        t.emit(r, a * qe + qk * qp, t.dot(q.row, n))

    t.each_head(of_head, t.advance("P", a, k, v, left=t.q))


def _hla3(t: Tiles) -> None:
    a, k, v = t.decay, t.k, t.v
    cubed = a * a * a
    m = a * t.read("m") + k.row
    t.write("m", m)

    def of_head(r: Any, q: Vector, sq: Any, qp: Any) -> None:
        qk = t.dot(q.row, k.row)
        sq, qp = a * sq + qk * k.row, a * qp + qk * v
        f = cubed * t.read("f", r) + t.dot(q.row, m) * sq
        t.write("f", f, r)
        t.advance("Q", a, q, q.row, head=r)
        (qf,) = t.advance("F", cubed, t.stand(sq), qp, left=(q,), head=r)
        t.emit(r, cubed * qf + t.dot(q.row, sq) * qp, t.dot(q.row, f))

    sqs = t.advance("S", a, k, k.row, right=t.q)
    t.each_head(of_head, sqs, t.advance("P", a, k, v, left=t.q))


class Operator(NamedTuple):
    """An operator's step, and the fields of its state in their order, each with the letters of its axes.

    The first field is shared by the query heads of a group.
    """

    step: Callable[..., None]
    fields: dict[str, str]


OPERATORS = {
    "linear_attention": Operator(_linear_attention, {"P": "DE", "m": "D"}),
    "hla2": Operator(_hla2, {"S": "DD", "C": "DE", "m": "D", "G": "DE", "h": "D"}),
    "ahla": Operator(_ahla, {"P": "DE", "m": "D", "E": "DE", "n": "D"}),
    "hla3": Operator(_hla3, {"S": "DD", "Q": "DD", "P": "DE", "m": "D", "F": "DE", "f": "D"}),
}
"""By the name of the mixer."""
