"""Reading traced and compiled programs: which primitives, which array sizes, which collectives."""

import re

import jax

SHAPE = re.compile(r"\b(?:f64|f32|bf16|f16|s32|u32|s8|u8|pred)\[([\d,]*)\]")
COLLECTIVE = re.compile(
    r"= (?P<shapes>[^=]*?)\b(?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def primitives(jaxpr):
    """Yields every equation of a traced function, those of its inner functions included."""
    core = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in core.eqns:
        yield equation
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                yield from primitives(value)


def elements(shape: str) -> int:
    """Number of elements of "2,24,5"."""
    product = 1
    for size in filter(None, shape.split(",")):
        product *= int(size)
    return product


def largest_array(text: str) -> int:
    """Number of elements of the largest array that a compiled program names."""
    return max(elements(shape) for shape in SHAPE.findall(text))


def largest_collective(text: str) -> int:
    """Number of elements of the largest array that a compiled program moves between devices; 0 if it moves none."""
    results = (match["shapes"] for match in COLLECTIVE.finditer(text))
    return max((elements(shape) for result in results for shape in SHAPE.findall(result)), default=0)
