"""Print jaxllm's run-time packages with this environment's versions, without some packages and their dependencies."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from importlib.metadata import requires, version

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def main() -> None:
    """Print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without", nargs="*", default=[], metavar="PACKAGE")
    args = parser.parse_args()
    for name in sorted(needed(["jaxllm"]) - needed(args.without) - {"jaxllm"}):
        print(f"{name}=={version(name)}")


def needed(names: Iterable[str]) -> set[str]:
    """Return the packages and their dependencies without extras."""
    packages: set[str] = set()
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name not in packages:
            packages.add(name)
            wanted = [Requirement(line) for line in requires(name) or ()]
            waiting += [canonicalize_name(each.name) for each in wanted if is_wanted(each)]
    return packages


def is_wanted(requirement: Requirement) -> bool:
    """Return whether a requirement applies here without extras."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


if __name__ == "__main__":
    main()
