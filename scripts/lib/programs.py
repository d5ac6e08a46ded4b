"""Run the programs of a folder by name, under any Python from 3.11: some programs run in a peer's environment."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1]


def run(folder: str) -> None:
    """Run the program that the command line names with the arguments behind its name; without a name, list them."""
    sys.path.append(str(SCRIPTS.parent))
    programs = find_programs(folder)
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in programs:
        print(f"usage: scripts/{folder}.py PROGRAM [ARGUMENT...]\n")
        print(*(f"  {name:24} {summary(path)}" for name, path in programs.items()), sep="\n")
        sys.exit(0 if name in ("-h", "--help") else f"\nthere is no program {name}")
    del sys.argv[1]
    try:
        runpy.run_module(f"{folder}.{name}", run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        # A module of the project's own that is missing is an error of the program.
        package = (error.name or "").partition(".")[0]
        is_ours = any((folder / package).is_dir() for folder in (SCRIPTS, SCRIPTS.parent))
        if is_ours or not {"-h", "--help"} & set(sys.argv):
            raise
        print(docstring(programs[name]), f"\nIts options cannot be shown in this environment: {error}.", sep="\n")


def find_programs(folder: str) -> dict[str, Path]:
    """Return the files of a folder that are programs, by name: those that do something when they are run."""
    files = {path.stem: path for path in (SCRIPTS / folder).glob("*.py")}
    files |= {path.parent.name: path for path in (SCRIPTS / folder).glob("*/__main__.py")}
    return {name: path for name, path in sorted(files.items()) if '__name__ == "__main__"' in path.read_text()}


def summary(path: Path) -> str:
    """Return the first line of a program's docstring."""
    return docstring(path).partition("\n")[0]


def docstring(path: Path) -> str:
    """Return a program's docstring."""
    return ast.get_docstring(ast.parse(path.read_text())) or ""
