"""What a compiled program does, read from its text."""

import dataclasses
import math
import re

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.+?) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"^\(?\w+\[([\d,]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: of its result.
        shape: its result's dtype, sizes and layout.
        operation: "copy", "fusion", ...
        operands: names of what it takes.
        rest: everything after the opening parenthesis.
        is_root: whether it is the result of the computation.
    """

    name: str
    shape: str
    operation: str
    operands: tuple[str, ...]
    rest: str
    is_root: bool

    @property
    def entries(self) -> int:
        """Entries of the array that it gives; 0 for a tuple."""
        found = _SHAPE.match(self.shape)
        if found is None or self.shape.startswith("("):
            return 0
        return math.prod(int(n) for n in found[1].split(",") if n)

    @property
    def layout(self) -> str:
        """Order of the axes in memory, as "{1,0}"."""
        found = _SHAPE.match(self.shape)
        return re.sub(r":.*(?=\})", "", found[2]) if found and found[2] else ""


def computations(text: str) -> dict[str, list[Instruction]]:
    """The instructions of every computation of a compiled program's text (`compiled.as_text()`)."""
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] | None = None
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = found.setdefault(header[1], [])
        elif line.startswith("}"):
            current = None
        elif current is not None and (match := _INSTRUCTION.match(line)):
            root, name, shape, operation, rest = match.groups()
            operands = tuple(_NAME.findall(rest.split(")", 1)[0]))
            current.append(Instruction(name, shape, operation, operands, rest, root is not None))
    return found


def loop_bodies(text: str) -> dict[str, list[Instruction]]:
    """The computations that are bodies of loops."""
    names = set(re.findall(r"body=%?([\w.\-]+)", text))
    return {name: lines for name, lines in computations(text).items() if name in names}


def carry_copies(text: str, *, at_least: int) -> list[str]:
    """Names of the copies that exist only because a loop carries an array.

    These copy, without a change of layout, either something that the body was given or something that it hands to its
    next turn. Copies within a mixer, to transpose an array, are not counted.

    Args:
        text: of a compiled program.
        at_least: entries of the smallest array that counts.
    """
    every = computations(text)
    found = []
    for lines in loop_bodies(text).values():
        made = {line.name: line for line in lines}
        handed = {name for line in lines if line.is_root for name in line.operands}
        for line in lines:
            if line.entries < at_least or not _is_copy(line, every):
                continue
            source = made.get(line.operands[0]) if line.operands else None
            if source is not None and source.layout != line.layout:
                continue
            given = source is not None and source.operation in ("parameter", "get-tuple-element")
            if line.name in handed or (given and _comes_from_parameter(source, made)):
                found.append(line.name)
    return found


def custom_calls(text: str) -> list[str]:
    """Targets of the custom calls of a program, each once: which library or kernel serves it."""
    return sorted(set(_TARGET.findall(text)))


def _is_copy(line: Instruction, every: dict[str, list[Instruction]]) -> bool:
    """Whether an instruction is a copy, also as the only thing inside a fusion or a call."""
    if line.operation in ("copy", "copy-done"):
        return True
    called = re.search(r"(?:calls|to_apply)=%?([\w.\-]+)", line.rest)
    if line.operation not in ("fusion", "call") or called is None:
        return False
    inner = [x for x in every.get(called[1], []) if x.operation not in ("parameter", "bitcast")]
    return bool(inner) and all(_is_copy(x, every) for x in inner)


def _comes_from_parameter(line: Instruction | None, made: dict[str, Instruction]) -> bool:
    while line is not None and line.operation in ("get-tuple-element", "bitcast"):
        line = made.get(line.operands[0]) if line.operands else None
    return line is not None and line.operation == "parameter"
