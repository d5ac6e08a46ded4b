"""Compare the tensors that a model needs with those in a checkpoint, before any of them is read."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.checkpoint import Checkpoint

if TYPE_CHECKING:  # the hub is read without jax
    from jaxllm.models.params import ParamSpec

FLOAT_DTYPES = ("float32", "float64", "float16", "bfloat16")
_INT_DTYPES = ("int32", "int64")


def check_names(specs: Mapping[str, ParamSpec], checkpoint: Checkpoint, *, ignored: Collection[str] = ()) -> None:
    """Raise one VLLMValidationError that lists all missing, misshapen and unexpected tensors.

    `ignored` are glob patterns of tensors that the model does not use, such as those of sentence-transformers' modules.
    """
    wanted = {source: spec for spec in specs.values() for source in spec.sources}
    tensors = checkpoint.tensors
    problems: list[str] = []
    problems += _listed("missing", (name for name in wanted if name not in tensors))
    wrong = (_mismatch(name, spec, checkpoint) for name, spec in wanted.items() if name in tensors)
    problems += _listed("wrong", (text for text in wrong if text))
    modules = () if checkpoint.sentence_files is None else checkpoint.sentence_files.tensor_prefixes
    expected = {*wanted, *checkpoint.spare}
    extra = (name for name in tensors if name not in expected and not name.startswith(modules))
    problems += _listed("unexpected", (name for name in extra if not any(fnmatchcase(name, p) for p in ignored)))
    if problems:
        raise VLLMValidationError(
            f"{checkpoint.source}: its tensors do not fit the model that its config describes "
            f"({', '.join(checkpoint.config.get('architectures') or ['no architecture'])}):\n  "
            + "\n  ".join(problems)
            + "\nCheck that config and weights belong together, and that the download is complete.",
            parameter="model",
            value=checkpoint.source,
        )


def _mismatch(name: str, spec: ParamSpec, checkpoint: Checkpoint) -> str:
    """Return how the tensor differs from the spec; "" if it does not."""
    info = checkpoint.tensors[name]
    if tuple(info.shape) != tuple(spec.hf_shape):
        return f"{name} has shape {list(info.shape)}, the model needs {list(spec.hf_shape)}"
    dtypes = _INT_DTYPES if np.issubdtype(spec.dtype, np.integer) else FLOAT_DTYPES
    if info.dtype not in dtypes:
        return f"{name} has dtype {info.dtype}, the model needs one of {', '.join(dtypes)}"
    return ""


def _listed(label: str, names: Iterable[str]) -> list[str]:
    """Return one line for all names that differ only in their first number, as layers do."""
    groups: dict[tuple[str, str], list[int]] = {}
    lines: list[str] = []
    for name in names:
        match = re.search(r"\.(\d+)\.", name)
        if match:
            groups.setdefault((name[: match.start(1)], name[match.end(1) :]), []).append(int(match[1]))
        else:
            lines.append(f"{label}: {name}")
    return lines + [f"{label}: {before}{_runs(numbers)}{after}" for (before, after), numbers in groups.items()]


def _runs(numbers: list[int]) -> str:
    """Write numbers as "7", or as "{0-3,5}"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return text if len(numbers) == 1 else f"{{{text}}}"
