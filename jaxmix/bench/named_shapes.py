"""The suites of named shapes: what is timed where, one row at a time, none of which can stop the others."""

import dataclasses
import functools
import gc
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from jaxmix.arrays import fail
from jaxmix.bench.ceilings import Ceilings, CeilingSizes, measure_ceilings
from jaxmix.bench.costs import PASSES, Pass, cost
from jaxmix.bench.gate import Work
from jaxmix.bench.jax_cases import (
    Case,
    Measurement,
    cached_softmax_case,
    dot_product_attention,
    jax_case,
    mixer_case,
    xla_softmax_case,
)
from jaxmix.bench.loop import LoopOptions
from jaxmix.bench.report import Row
from jaxmix.bench.shapes import SHAPES, Shape
from jaxmix.mixers.dispatch import KERNELS

Peers = Callable[[str, str], Mapping[str, Case]]
"""(mixer, suite) to more rows of it by title."""


@dataclasses.dataclass(frozen=True)
class NamedOptions:
    """What to time of the suites of named shapes.

    Attributes:
        suites: names from SHAPES.
        passes: of the suites over sequences; "streams" has one pass of its own.
        match: a regular expression; only rows in whose titles it is found.
        seconds: start no row after this many seconds; None for no limit.
        loop: how long to measure a row.
        ceilings: sizes of the copy and of the matrix product.
    """

    suites: tuple[str, ...] = tuple(SHAPES)
    passes: tuple[Pass, ...] = PASSES
    match: str = ""
    seconds: float | None = None
    loop: LoopOptions = dataclasses.field(default_factory=LoopOptions)
    ceilings: CeilingSizes = dataclasses.field(default_factory=CeilingSizes)


class RowToBe(Protocol):
    """Something that gives one row."""

    @property
    def title(self) -> str:
        """What `match` looks into."""
        ...

    def measure(self, loop: LoopOptions, ceilings: Ceilings) -> Row:
        """The row; raises what went wrong."""
        ...

    def failed(self, why: str) -> Row:
        """The row without values."""
        ...


@dataclasses.dataclass(frozen=True)
class Entry:
    """A case at a shape.

    Attributes:
        suite: its suite.
        case: title of what runs, with the pass.
        work: what is computed.
        run: measures it.
    """

    suite: str
    case: str
    work: Work
    run: Case

    @property
    def title(self) -> str:
        """Suite, case and shape."""
        return f"{self.suite}: {self.case}, {self.work.shape}"

    def measure(self, loop: LoopOptions, ceilings: Ceilings) -> Row:
        """A measurement with what it is compared with."""
        return measured_row(self, self.run(self.work, loop), ceilings)

    def failed(self, why: str) -> Row:
        """The row that says why there is nothing."""
        return Row(self.suite, self.case, str(self.work.shape), {}, why)


def mixer_cases(mixer: str, suite: str) -> dict[str, Case]:
    """Rows of a mixer and of its peers in JAX, by title."""
    if mixer == "softmax_attention":
        cudnn, xla = "softmax_attention, jax.nn cuDNN", "softmax_attention, jax.nn XLA"
        if suite == "streams":
            peers = {cudnn: cached_softmax_case("cudnn"), xla: cached_softmax_case("xla")}
            return {"softmax_attention": mixer_case(mixer)} | peers
        return {
            cudnn: jax_case(functools.partial(dot_product_attention, implementation="cudnn")),
            xla: xla_softmax_case(),
        }
    cases = {mixer: mixer_case(mixer)}
    if suite == "anchors":
        cases[f"{mixer}, scan"] = mixer_case(mixer, implementation="scan")
    if suite == "streams" and mixer in KERNELS:
        cases[f"{mixer}, kernel"] = mixer_case(mixer, implementation="pallas")
    return cases


def entries(options: NamedOptions, peers: Peers | None = None) -> list[Entry]:
    """All rows of the suites that match, in the order in which they run.

    Args:
        options: suites, passes and what titles must match.
        peers: rows of other libraries.

    Raises:
        ValueError: for an unknown suite or pass, or a bad regular expression.
    """
    for name in options.suites:
        if name not in SHAPES:
            fail("suites", f"names from {', '.join(SHAPES)}", repr(name))
    for name in options.passes:
        if name not in PASSES:
            fail("passes", f"names from {', '.join(PASSES)}", repr(name))
    found = []
    for suite in options.suites:
        passes: Sequence[Pass] = ("decode",) if suite == "streams" else options.passes
        for shape in SHAPES[suite]:
            found += [entry for part in passes for entry in _shape_entries(suite, shape, part, peers)]
    return matching(found, options.match)


def matching[T: RowToBe](found: Iterable[T], pattern: str) -> list[T]:
    """Those in whose titles a regular expression is found.

    Raises:
        ValueError: for a bad expression.
    """
    try:
        expression = re.compile(pattern)
    except re.error as error:
        fail("match", f"a regular expression ({error})", repr(pattern))
    return [entry for entry in found if expression.search(entry.title)]


def _shape_entries(suite: str, shape: Shape, part: Pass, peers: Peers | None) -> Iterator[Entry]:
    for mixer in shape.mixers:
        cases = mixer_cases(mixer, suite) | dict(peers(mixer, suite) if peers else {})
        for title, run in cases.items():
            yield Entry(suite, f"{title}, {part}", Work(mixer, shape, part), run)


def run_entries(found: Iterable[RowToBe], options: NamedOptions) -> Iterator[Row]:
    """Measures the ceilings, then every entry, giving each row as soon as it is there.

    A row that fails says why in its note; rows that time did not suffice for say so too.
    """
    start = time.monotonic()
    ceilings = measure_ceilings(options.loop, options.ceilings)
    yield from ceiling_rows(ceilings)
    for entry in found:
        if options.seconds is not None and time.monotonic() - start > options.seconds:
            yield entry.failed(f"not started: {options.seconds:g} s were over")
            continue
        try:
            row = entry.measure(options.loop, ceilings)
        except Exception as error:
            row = entry.failed(describe(error))
        gc.collect()  # arrays that only a cycle of objects still holds
        yield row


def ceiling_rows(ceilings: Ceilings) -> list[Row]:
    """What the other rows are compared with."""
    return [
        Row("ceilings", "copy", "float32 x + 1", {"TB/s": ceilings.copy / 1e12}),
        Row("ceilings", "matrix product", "bfloat16", {"TFLOP/s": ceilings.matmul / 1e12}),
        Row("ceilings", "a call that does nothing", "128 numbers", {"microseconds": ceilings.empty * 1e6}),
    ]


def measured_row(entry: Entry, found: Measurement, ceilings: Ceilings) -> Row:
    """A measurement with what it is compared with."""
    shape, needed = entry.work.shape, cost(entry.work.mixer, entry.work.shape, entry.work.part)
    tokens = shape.batch * (1 if entry.work.part == "decode" else shape.length)
    floor, timing = needed.floor(ceilings.copy, ceilings.matmul), found.timing
    values = {
        "milliseconds": timing.median * 1e3,
        "lower quartile": timing.lower * 1e3,
        "upper quartile": timing.upper * 1e3,
        "runs": timing.repeats,
        "calls a run": found.calls,
        "ns/token": timing.median / tokens * 1e9,
        "MB": needed.nbytes / 1e6,
        "GFLOP": needed.flops / 1e9,
        "floor ms": floor * 1e3,
        "roofline share": floor / timing.median,
        "error": found.error,
    }
    if found.peak is not None:
        values["peak MB"] = found.peak / 1e6
    return Row(entry.suite, entry.case, str(shape), values, "; ".join(found.notes))


def describe(error: BaseException, *, longest: int = 300) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:longest]}{'...' if len(text) > longest else ''}"
