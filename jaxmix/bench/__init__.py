"""Timings of the mixers: on the machine at hand, and at named shapes on accelerators, with peers and ceilings."""

from jaxmix.bench.environment import environment
from jaxmix.bench.report import Row, from_json, to_json, to_markdown, write_reports
from jaxmix.bench.suites import SUITES, BenchOptions, run_suites
from jaxmix.bench.timing import Timing, measure

__all__ = [
    "SUITES",
    "BenchOptions",
    "Row",
    "Timing",
    "environment",
    "from_json",
    "measure",
    "run_suites",
    "to_json",
    "to_markdown",
    "write_reports",
]
