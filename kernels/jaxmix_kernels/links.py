"""The higher orders as chains of linear attentions with the same queries: what one gives, the next takes."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Link:
    """One linear attention of a chain.

    Attributes:
        keys: "k", or the result of a link before.
        values: "k", "v", or the result of a link before.
        result: its name; the last link's is "out".
        power: exponent of the decays.
    """

    keys: str
    values: str
    result: str
    power: int = 1


Links = tuple[Link, ...]

HLA2: Links = (Link("k", "k", "kt"), Link("kt", "v", "out", power=2))
AHLA: Links = (Link("k", "v", "vt"), Link("k", "vt", "out"))
HLA3: Links = (Link("k", "k", "kt"), Link("k", "v", "vt"), Link("kt", "vt", "out", power=3))
"""The exact mask."""
HLA3_TAIL: Links = (Link("k", "k", "kt"), Link("kt", "v", "out", power=3))
"""What is left of it once vt is known, which takes the place of v."""


def values_first(links: Links) -> tuple[int, Links] | None:
    """A chain in two parts: the link that makes the values of the last one of inputs alone, and all others.

    Returns:
        The number of that link, and a chain of two links or more for which its result takes the place of v; None where
        there are no such parts.
    """
    *others, last = links
    for number, link in enumerate(others):
        if link.result == last.values and link.keys == "k" and link.values == "v" and len(others) > 1:
            return number, (*others[:number], *others[number + 1 :], dataclasses.replace(last, values="v"))
    return None


def follow(
    links: Links, k: Any, v: Any, initials: Sequence[Any], attend: Callable[..., tuple[Any, Any]]
) -> tuple[Any, tuple[Any, ...]]:
    """The links one after the other.

    Args:
        links: the chain.
        k: keys.
        v: values.
        initials: the state that every link starts from.
        attend: a function of a link, its keys, values and initial state, which gives its result and final state.

    Returns:
        The result of the last link, and the final states of all.
    """
    known, finals = {"k": k, "v": v}, []
    for link, initial in zip(links, initials, strict=True):
        known[link.result], final = attend(link, known[link.keys], known[link.values], initial)
        finals.append(final)
    return known[links[-1].result], tuple(finals)
