"""The kinds of check, one function each: `check(subject) -> rows`."""

from jaxmix.verify.checks.causality import causality
from jaxmix.verify.checks.forms import forms
from jaxmix.verify.checks.gradients import gradients
from jaxmix.verify.checks.operator import operator
from jaxmix.verify.checks.packed import packed
from jaxmix.verify.checks.split import split

__all__ = ["causality", "forms", "gradients", "operator", "packed", "split"]
