"""Timings of the mixers on the machine at hand: medians of interleaved runs in one process."""

from jaxmix.bench.environment import environment
from jaxmix.bench.report import Row, to_json, to_markdown
from jaxmix.bench.suites import SUITES, BenchOptions, run_suites
from jaxmix.bench.timing import Timing, measure

__all__ = ["SUITES", "BenchOptions", "Row", "Timing", "environment", "measure", "run_suites", "to_json", "to_markdown"]
