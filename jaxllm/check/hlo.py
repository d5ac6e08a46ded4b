"""Count the collectives of a compiled step in XLA's own text of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxllm.check.report import Collective

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*->.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s([a-z][a-z0-9\-]*)\(")
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\]")
_CALLS = re.compile(r"\b(?:calls|to_apply)=%?([\w.\-]+)")
_BODY = re.compile(r"\bcondition=%?([\w.\-]+), body=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations=\{([^}]*)\}|true_computation=(\S+), false_computation=(\S+))")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_COMPARE = re.compile(r"compare\(([^)]*)\), direction=LT")
_CONSTANT = re.compile(r"\bconstant\((\d+)\)")

type _Key = tuple[str, bool]
"""The kind of a collective, and whether it is in a loop whose length is not known."""
type _Tally = Mapping[_Key, tuple[int, int]]
"""Count and bytes of each kind of collective."""


@dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    result: str
    opcode: str
    text: str


def count_collectives(hlo: str) -> list[Collective]:
    """Return the collectives that one run of a program does, by kind; `hlo` is the text of a compiled module."""
    computations, entry = _parse(hlo)
    tally = _tally(entry, computations, {})
    return [
        Collective(kind=kind, count=count, bytes=size, repeated=repeated)
        for (kind, repeated), (count, size) in sorted(tally.items(), key=lambda item: (item[0][1], item[0][0]))
    ]


def _parse(hlo: str) -> tuple[dict[str, list[_Instruction]], str]:
    """Return the computations by name, and the entry's name."""
    computations: dict[str, list[_Instruction]] = {}
    entry, current = "", []
    for line in hlo.splitlines():
        header = _HEADER.match(line)
        if header:
            current = computations[header[2]] = []
            entry = header[2] if header[1] else entry
            continue
        match = _INSTRUCTION.match(line)
        opcode = _OPCODE.search(match[2]) if match else None
        if match and opcode:
            current.append(_Instruction(match[1], match[2][: opcode.start()], opcode[1], match[2]))
    return computations, entry


def _tally(name: str, computations: Mapping[str, Sequence[_Instruction]], known: dict[str, _Tally]) -> _Tally:
    """Add up what a computation does, what it calls included."""
    if name not in known:
        counts: Counter[_Key] = Counter()
        sizes: Counter[_Key] = Counter()
        for instruction in computations.get(name, ()):
            for key, (count, size) in _tally_one(instruction, computations, known).items():
                counts[key] += count
                sizes[key] += size
        known[name] = {key: (counts[key], sizes[key]) for key in counts}
    return known[name]


def _tally_one(
    instruction: _Instruction, computations: Mapping[str, Sequence[_Instruction]], known: dict[str, _Tally]
) -> _Tally:
    kind = instruction.opcode.removesuffix("-start")
    if kind in KINDS:
        return {(kind, False): (1, _result_bytes(instruction))}
    if instruction.opcode == "while":
        loop = _BODY.search(instruction.text)
        if loop is None:
            return {}
        trips = _count_trips(instruction, computations.get(loop[1], ()))
        body = _tally(loop[2], computations, known)
        return _repeat(body, trips)
    if instruction.opcode == "conditional":
        match = _BRANCHES.search(instruction.text)
        names = [part.strip(" %,") for group in (match.groups() if match else ()) if group for part in group.split(",")]
        branches = [_tally(name, computations, known) for name in names]
        return max(branches, key=lambda tally: sum(size for _, size in tally.values()), default={})
    if instruction.opcode in ("call", "fusion", "async-start"):
        called = _CALLS.search(instruction.text)
        return _tally(called[1], computations, known) if called else {}
    return {}


def _repeat(body: _Tally, trips: int | None) -> _Tally:
    """Multiply what a loop's body does; where the number of passes is not known, mark it."""
    if trips is not None:
        return {key: (count * trips, size * trips) for key, (count, size) in body.items()}
    marked: dict[_Key, tuple[int, int]] = {}
    for (kind, _), (count, size) in body.items():
        before = marked.get((kind, True), (0, 0))
        marked[kind, True] = (before[0] + count, before[1] + size)
    return marked


def _count_trips(loop: _Instruction, condition: Sequence[_Instruction]) -> int | None:
    """Return the number of passes of a loop: as XLA states it, or the constant that its counter is compared with."""
    noted = _TRIPS.search(loop.text)
    if noted:
        return int(noted[1])
    constants = {
        each.name: int(value[1])
        for each in condition
        if each.opcode == "constant" and (value := _CONSTANT.search(each.text))
    }
    compared = next((match for each in condition if (match := _COMPARE.search(each.text))), None)
    if compared is None:
        return None
    limit = compared[1].split(",")[-1].split("%")[-1].strip()
    return constants.get(limit)


def _result_bytes(collective: _Instruction) -> int:
    """Return the bytes of a collective's results on one device; asynchronous ones name their operands first."""
    sizes = [_array_bytes(*array) for array in _ARRAY.findall(collective.result)]
    if collective.opcode in ("all-gather-start", "collective-permute-start"):
        return sizes[1] if len(sizes) > 1 else sum(sizes)
    return sum(sizes)


def _array_bytes(dtype: str, dims: str) -> int:
    count = int(np.prod([int(size) for size in dims.split(",") if size], dtype=np.int64))
    bits = re.search(r"\d+", dtype)
    return count * (1 if dtype == "pred" or bits is None else max(1, int(bits[0]) // 8))
