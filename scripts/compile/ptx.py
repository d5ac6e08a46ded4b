"""Count the work of an iteration of a kernel's loops in its PTX: bytes, matmuls, special functions and instructions.

An iteration with several paths counts as the greatest path; paths with contradicting conditions, such as `x >= 64` and
then `x < 64`, are left out.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

WARPGROUP = 128
"""The number of threads that execute each instruction of these kernels."""
_RESULT = re.compile(r"(?:@\S+ )?(?!bar\b)[a-z][\w.:]*\s+(\{[^}]*\}|%[\w|%]+), (.*);")
"""Matches an instruction with a result, and its operands."""
_SPECIAL = re.compile(r"(?:ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh)\.approx|div\.(?:approx|full)")
"""Matches an instruction of the special function unit."""


class Loop(NamedTuple):
    """The work of a warpgroup in an iteration."""

    num_bytes: int
    """Bytes loaded from global memory."""
    flops: int
    """Floating-point operations of matmuls."""
    specials: int
    """Special functions of all threads, exp2 above all."""
    instructions: int = 0
    """The instructions of a thread; ptxas makes other ones of them, mostly fewer."""


class Kernel(NamedTuple):
    """A kernel as compiled."""

    threads: int
    """The size of a thread block."""
    loops: list[Loop]
    """The innermost loops; a kernel without loops counts as one."""


def read_kernels(text: str) -> dict[str, Kernel]:
    """Return the kernels by name; other text may stand between them. Raises ValueError for unknown PTX."""
    kernels = {}
    for part in text.split(".visible .entry ")[1:]:
        name, (head, _, rest) = part[: part.index("(")], part.partition("\n{")
        threads = re.search(r"\.maxntid (\d+), (\d+), (\d+)", head)
        if threads is None:
            raise ValueError(f"PTX does not say how many threads {name} has")
        lines = [line.strip() for line in rest.partition("\n}")[0].splitlines()]
        kernels[name.removesuffix("_mosaic_gpu_kernel")] = Kernel(math.prod(map(int, threads.groups())), _loops(lines))
    return kernels


def _loops(lines: list[str]) -> list[Loop]:
    registers, blocks = _Registers(lines), _cut(lines)
    regions = _innermost(blocks) or {0: set(range(len(blocks)))}
    measures: list[Callable[[str], int]] = [registers.bytes_brought, _flops, _specials, _instructions]
    weights = [[sum(map(measure, block.lines)) for block in blocks] for measure in measures]
    return [
        Loop(*(_most(blocks, weight, region, header, header, {}) for weight in weights))
        for header, region in regions.items()
    ]


def _flops(line: str) -> int:
    shape = re.search(r"wgmma\.mma_async\S*\.m(\d+)n(\d+)k(\d+)\.", line)
    return 2 * math.prod(map(int, shape.groups())) if shape else 0


def _specials(line: str) -> int:
    return WARPGROUP if _SPECIAL.match(line) else 0


def _instructions(line: str) -> int:
    return bool(re.match(r"(@\S+ )?[a-z]", line))


class _Registers:
    """The instructions that write each register, and the registers that differ between threads."""

    def __init__(self, lines: list[str]) -> None:
        self._writers: defaultdict[str, list[str]] = defaultdict(list)
        reads: list[tuple[list[str], set[str]]] = []
        for line in lines:
            if instruction := _RESULT.match(line):
                results = re.findall(r"%\w+", instruction[1])
                for result in results:
                    self._writers[result].append(line)
                if not line.startswith("shfl"):  # from lane 0, so that all lanes have the same number
                    reads.append((results, set(re.findall(r"%[\w.]+", instruction[2]))))
        self._varying, before = {"%tid.x", "%laneid"}, 0
        while before != len(self._varying):
            before = len(self._varying)
            self._varying.update(*(results for results, operands in reads if operands & self._varying))

    def bytes_brought(self, line: str) -> int:
        """Return the bytes that a TMA's barrier expects, or that threads load, each its own; otherwise 0."""
        if "expect_tx" in line:
            return self._expected(line)
        load = re.match(r"(?:@\S+ )?ld\.global\S*?(?:\.v(\d))?\.[bfsu](\d+)\s.*\[(%\w+)", line)
        if load is None or load[3] not in self._varying:
            return 0
        return int(load[1] or 1) * int(load[2]) // 8 * WARPGROUP

    def _expected(self, line: str) -> int:
        """Return the bytes that all threads together expect: each thread the same, or one thread all."""
        operand = re.match(r"mbarrier\.arrive\.expect_tx\S* .*\], (%\w+);", line)
        writers = self._writers[operand[1]] if operand else []
        number = re.match(r"(mov|selp)\.\w+\s+%\w+, (\d+)(?:;|, 0, )", writers[0]) if len(writers) == 1 else None
        if number is None:
            raise ValueError(f"not known how many bytes are expected: {line} {writers}")
        return int(number[2]) * (WARPGROUP if number[1] == "mov" else 1)


class _Fact(NamedTuple):
    """The fact that `register < threshold`, or that it is not. A predicate counts as 0 or 1."""

    register: str
    threshold: int
    holds: bool


class _Block(NamedTuple):
    """A basic block: lines that run together, and their successors with conditions."""

    lines: list[str]
    exits: list[tuple[int, _Fact | None]]


def _cut(lines: Sequence[str]) -> list[_Block]:
    """Return the basic blocks. Small loops that wait for barriers are no blocks of their own: their labels differ."""
    parts: list[list[str]] = [[]]
    labels: dict[str, int] = {}
    comparisons: dict[str, _Fact] = {}
    for line in lines:
        if label := re.match(r"(\$L__BB\w+):", line):
            labels[label[1]] = len(parts)
            parts.append([])
            continue
        parts[-1].append(line)
        if re.match(r"(@\S+ )?bra\S*\s+\$L__BB|ret;", line):
            parts.append([])
        if compared := re.match(r"setp\.(lt|le|gt|ge)\.\w+\s+(%\w+), (%\w+), (-?\d+);", line):
            threshold = int(compared[4]) + (compared[1] in ("le", "gt"))
            comparisons[compared[2]] = _Fact(compared[3], threshold, compared[1] in ("lt", "le"))
    return [_Block(part, _exits(part, number, labels, comparisons)) for number, part in enumerate(parts[:-1])]


def _exits(
    lines: list[str], number: int, labels: dict[str, int], comparisons: dict[str, _Fact]
) -> list[tuple[int, _Fact | None]]:
    last = lines[-1] if lines else ""
    if last == "ret;":
        return []
    branch = re.match(r"(?:@(!?)(%\w+) )?bra\S*\s+(\$L\w+);", last)
    if branch is None:
        return [(number + 1, None)]
    if branch[2] is None:
        return [(labels[branch[3]], None)]
    true = comparisons.get(branch[2], _Fact(branch[2], 1, holds=False))
    false = true._replace(holds=not true.holds)
    taken, passed = (false, true) if branch[1] else (true, false)
    return [(labels[branch[3]], taken), (number + 1, passed)]


def _innermost(blocks: list[_Block]) -> dict[int, set[int]]:
    """Return the blocks of each innermost loop, by the block that enters it."""
    followers = {i: {target for target, _ in block.exits} for i, block in enumerate(blocks)}
    leaders = {i: {j for j in followers if i in followers[j]} for i in followers}
    alive = _reached(followers, 0, without=None)
    regions: defaultdict[int, set[int]] = defaultdict(set)
    for last in alive:
        for first in followers[last]:
            if last not in _reached(followers, 0, without=first):  # no other entry: it is a loop
                regions[first] |= {first} | (_reached(leaders, last, without=first) & alive)
    return {first: region for first, region in regions.items() if region & regions.keys() == {first}}


def _reached(edges: dict[int, set[int]], start: int, without: int | None) -> set[int]:
    reached, ahead = set(), [start]
    while ahead:
        block = ahead.pop()
        if block != without and block not in reached:
            reached.add(block)
            ahead += edges[block]
    return reached


def _most(
    blocks: list[_Block],
    weights: list[int],
    region: set[int],
    header: int,
    at: int,
    bounds: dict[str, tuple[float, float]],
) -> int:
    """Return the greatest weight of the paths through a region from a block on; `bounds` are the known facts there.

    Facts stay true: a loop's registers change only at its end.
    """
    ways = [0]
    for target, fact in blocks[at].exits:
        if target == header or target not in region:
            continue
        narrower = bounds
        if fact is not None:
            low, high = bounds.get(fact.register, (-math.inf, math.inf))
            low, high = (low, min(high, fact.threshold)) if fact.holds else (max(low, fact.threshold), high)
            if low >= high:
                continue
            narrower = bounds | {fact.register: (low, high)}
        ways.append(_most(blocks, weights, region, header, target, narrower))
    return weights[at] + max(ways)
