"""Read the listings that libtpu leaves of a kernel: its loops, and how many bundles and matmuls they have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_BUNDLES, _UTILIZATION = "final_bundles.txt", "final_hlo-static-per-bundle-utilization.txt"
"""The ends of the names of a kernel's listings."""
_LISTING = r"\d+-.+\.(txt|html)"
"""The names of all listings of libtpu, with the times that they were written at."""


@dataclass
class Loop:
    """A loop of the listing: its first and last bundle, the loops inside, and what its bundles occupy."""

    first: int
    last: int
    uses: dict[str, int]
    trips: int | None = 1
    """The number of times that its body runs; None if the listing does not have it."""
    inside: list[Loop] = field(default_factory=list)
    stretches: list[Loop] = field(default_factory=list)
    """The straight pieces of code with matmuls that run under a condition and are in no inner loop."""

    def __len__(self) -> int:
        return self.last - self.first + 1

    @property
    def own_bundles(self) -> int:
        """Count the bundles that are in no inner loop."""
        return len(self) - sum(map(len, self.inside))

    @property
    def bundles_of_one_trip(self) -> int:
        """Count the bundles with those of inner loops, without the loops that `num_unknown` counts."""
        known = ((loop.trips, loop.bundles_of_one_trip) for loop in self.inside)
        return self.own_bundles + sum(trips * bundles for trips, bundles in known if trips is not None)

    @property
    def num_unknown(self) -> int:
        """Count the inner loops whose number of trips is not known, without the loops inside them."""
        return sum(1 if loop.trips is None else loop.num_unknown for loop in self.inside)

    @property
    def matmuls(self) -> int:
        """Count the slots that hold a matmul, by the name that this libtpu gives the unit."""
        return self.uses["MATMUL" if "MATMUL" in self.uses else "MXU"]

    @property
    def own_matmuls(self) -> int:
        """Count the matmuls that are in no inner loop."""
        return self.matmuls - sum(loop.matmuls for loop in self.inside)

    def busiest(self) -> Loop:
        """Return the inner loop that has the most matmuls."""
        return max(self.inside, key=lambda loop: loop.matmuls)

    def __iter__(self) -> Iterator[Loop]:
        yield self
        for loop in self.inside:
            yield from loop


def read_loops(folder: Path, kernel: str) -> Loop:
    """Return a kernel as a loop, with its loops inside, from the listings that libtpu left in a folder."""
    listing = next(x for x in folder.glob(f"*{kernel}*{_BUNDLES}") if "schedule" not in x.name)
    usage = next(folder.glob(f"*{kernel}*{_UTILIZATION}")).read_text().splitlines()
    units = [unit.strip() for unit in usage[1].split(",")]
    start = next(i for i, line in enumerate(usage) if "UTILIZATION" in line) + 1
    uses = [[int(x) for x in line.split()] for line in usage[start:] if line.strip()]

    def make(first: int, last: int, trips: int | None = 1) -> Loop:
        totals = (sum(column) for column in zip(*uses[first : last + 1], strict=True))
        return Loop(first, last, dict(zip(units, totals, strict=True)), trips)

    trips = None
    heads: dict[str, int] = {}
    begins: dict[str, int] = {}
    regions: list[Loop] = []
    loops = [make(0, len(uses) - 1)]
    for line in listing.read_text().splitlines():
        address = re.match(r"\s*(0x[0-9a-f]+|0)\s+(LB)?.*?\{", line)
        if address is None:
            continue
        bundle = int(address[1], 16)
        begins |= dict.fromkeys(re.findall(r"Start region (\d+)", line), bundle)
        regions += [make(begins[end], bundle) for end in re.findall(r"End region (\d+)", line) if end in begins]
        if address[2]:  # the body of a loop begins
            heads |= dict.fromkeys(re.findall(r"Start region (\d+)", line), bundle)
        if exit_test := re.search(r"scmp\.\w+\S* %s\w+, (\S+) /\* loop exit test", line):
            trips = int(exit_test[1]) if exit_test[1].isdigit() else None
        back = re.search(r"sbr\.rel.*target = \$region(\d+)", line)
        if back and back[1] in heads:
            loops.append(make(heads[back[1]], bundle, trips))
            trips = None
    loops.sort(key=len)
    for i, loop in enumerate(loops[:-1]):
        outer = next(x for x in loops[i + 1 :] if x.first <= loop.first and loop.last <= x.last)
        outer.inside.append(loop)
    stretches: list[Loop] = []
    for region in sorted((x for x in regions if x.matmuls), key=len):  # the smallest ones hold no other
        if all(x.last < region.first or region.last < x.first for x in stretches):
            stretches.append(region)
    for stretch in sorted(stretches, key=lambda x: x.first):
        next(x for x in loops if x.first <= stretch.first and stretch.last <= x.last).stretches.append(stretch)
    return loops[-1]


def clear(folder: Path) -> None:
    """Remove the listings of earlier programs from a folder; other files stay."""
    for path in folder.iterdir():
        if re.fullmatch(_LISTING, path.name):
            path.unlink()
