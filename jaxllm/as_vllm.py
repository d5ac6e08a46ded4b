"""Run a program that imports vLLM on jaxllm, unchanged:

    python -m jaxllm.as_vllm -m lm_eval --model vllm --model_args pretrained=MODEL --tasks ...
    python -m jaxllm.as_vllm program.py ARGUMENTS

`vllm` and `vllm.a.b` are then the modules `jaxllm` and `jaxllm.a.b`, and the installed version of "vllm" is the one
that jaxllm's API follows. What jaxllm does not have stays missing, with Python's own error. A program may call
`install()` itself before it imports vLLM. A real vLLM in the same environment is hidden. `vllm.__version__` is
jaxllm's, and a child that `multiprocessing` spawns has to call `install()` again.
"""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from os import PathLike
from pathlib import Path
from types import ModuleType

VLLM_VERSION = "0.33.0"
"""The version of vLLM that jaxllm's names and behaviour follow."""
_OURS, _THEIRS = "jaxllm", "vllm"


def install() -> None:
    """Let `import vllm` give jaxllm in this process. Raises RuntimeError if vLLM itself has been imported already."""
    loaded = sys.modules.get(_THEIRS)
    if loaded is not None and loaded is not sys.modules.get(_OURS):
        raise RuntimeError("vllm is imported already: call jaxllm.as_vllm.install() before anything imports it.")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(DistributionFinder):
    """Finds vLLM's modules and its distribution for the import system."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Return the spec of a module of vLLM; None for other modules, and for those that jaxllm lacks."""
        if fullname != _THEIRS and not fullname.startswith(f"{_THEIRS}."):
            return None
        ours = importlib.util.find_spec(_OURS + fullname.removeprefix(_THEIRS))
        if ours is None:
            return None
        return ModuleSpec(fullname, _Loader(ours.name), is_package=ours.submodule_search_locations is not None)

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        """Return vLLM's distribution if it, or every distribution, is requested."""
        return [_Distribution()] if context is None or context.name in (None, _THEIRS) else []


class _Loader(Loader):
    """Loads the jaxllm module that stands for one of vLLM."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002
        """Return jaxllm's module object itself, so that its classes are the same under both names."""
        module = importlib.import_module(self._name)
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec: it has already run, and keeps jaxllm's name."""
        module.__spec__ = self._own


class _Distribution(Distribution):
    """The metadata of the installed "vLLM"."""

    def read_text(self, filename: str) -> str | None:
        """Return the metadata, the only file of the distribution."""
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: {_THEIRS}\nVersion: {VLLM_VERSION}\n"

    def locate_file(self, path: str | PathLike[str]) -> Path:
        """Raise an error: there are no files of vLLM."""
        raise FileNotFoundError(f"{path}: vllm stands for jaxllm here and has no files of its own.")


def main(words: Sequence[str]) -> None:
    """Run the module or the program that a command line names, as Python itself does."""
    if not words or (words[0] == "-m" and len(words) < 2):
        sys.exit("usage: python -m jaxllm.as_vllm (-m MODULE | PROGRAM) [ARGUMENTS...]")
    install()
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        if not sys.flags.safe_path:
            sys.path[0] = str(Path(words[0]).resolve().parent)  # the folder of the program's own modules
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
