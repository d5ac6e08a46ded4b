"""What a compiled step copies, launches and asks the host, read from its HLO and the thunks of XLA:GPU."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

import jax

from jaxllm.execution.compiler import StepCompiler
from jaxllm.execution.mesh import param_sharding
from jaxllm.models.params import array_specs

IN_VMEM = "S(1)"
"""A layout's mark of a TPU's VMEM, where operands are brought ahead of their use."""


def shard_shape(spec: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """Return the shape of an array's part on one device."""
    assert spec.sharding is not None
    return spec.sharding.shard_shape(spec.shape)


def find_copies(hlo: str, compiler: StepCompiler, num_blocks: int) -> list[str]:
    """Return the copies in a program that are as large as a parameter of 1 MiB or more, or as the pool."""
    specs = array_specs(compiler.model.specs.param_specs()).values()
    shapes = [param_sharding(compiler.mesh, spec).shard_shape(spec.shape) for spec in specs]
    shapes += map(shard_shape, jax.tree.leaves([compiler.caches.specs(num_blocks), compiler.adapters_spec()]))
    sizes = {math.prod(shape) for shape in shapes}
    # A copy-start gives target and source.
    results = re.findall(r" = (\S+|\(.*?\)) copy(?:-start)?\(", hlo)
    arrays = [array for array in results if not (array.startswith("(") and IN_VMEM in array)]
    copies = [tuple(map(int, dims.split(","))) for array in arrays for dims in re.findall(r"\[([\d,]+)\]", array)[:1]]
    # Weights of the same rows that are put side by side in each step, to be one matmul.
    joined = re.findall(r"= (\w+\[\S+\])\S* fusion\(%params\w+\S*, %params[^)]*\),.* calls=%fused_concatenate", hlo)
    return [str(shape) for shape in copies if math.prod(shape) in sizes and math.prod(shape) >= 2**20] + joined


def find_expert_copies(hlo: str, compiler: StepCompiler) -> list[str]:
    """Return what a program computes that is as large as the weights of a layer's experts, as a layer cut from a stack.

    The kernels take the stack as it is. No activation is as large, by its bytes, as all experts of a layer are.
    """
    arrays = array_specs(compiler.model.specs.param_specs()).values()
    experts = [spec for spec in arrays if spec.num_experts and spec.num_inputs]
    shapes = [param_sharding(compiler.mesh, spec).shard_shape(spec.shape) for spec in experts]
    sizes = {math.prod(shape[spec.stacked :]) for spec, shape in zip(experts, shapes, strict=True)}
    return [array for array, dims, _ in _computed(hlo) if math.prod(dims) in sizes]


def find_adapter_copies(hlo: str, compiler: StepCompiler) -> list[str]:
    """Return what a program writes to memory that is as large as the adapters of a layer, or of all.

    The kernels take the stack as it is, and no activation of a layer is as large.
    """
    specs = array_specs(compiler.model.specs.param_specs())
    sizes = set()
    for path, beside in compiler.model.adapter_specs().items():
        for spec in (beside.down, beside.up):
            shape = param_sharding(compiler.mesh, spec).shard_shape(spec.shape)
            sizes |= {math.prod(shape), math.prod(shape[specs[path].stacked :])}
    # What a fusion computes on the way to its result goes nowhere.
    inside = set(re.findall(r" fusion\(.*? calls=%([\w.-]+)", hlo))
    computations = re.split(r"\n(?=%|ENTRY )", hlo)
    written = [text for text in computations if text.split(" ", 1)[0].removeprefix("%") not in inside]
    computed = [each for text in written for each in _computed(text)]
    return [array for array, dims, layout in computed if math.prod(dims) in sizes and IN_VMEM not in layout]


def _computed(hlo: str) -> list[tuple[str, tuple[int, ...], str]]:
    """Return the arrays that come of moving or changing others, with their shapes and layouts."""
    moved = "copy|copy-start|convert|dynamic-slice|fusion|transpose"
    arrays = re.findall(rf"= (\w+\[([\d,]+)\])(\S*) (?:{moved})\(", hlo)
    return [(array, tuple(map(int, dims.split(","))), layout) for array, dims, layout in arrays]


def read_thunks(folder: Path) -> str:
    """Return what XLA:GPU will run for the step, one line per thunk, indented in what holds it."""
    files = sorted(folder.glob("*thunk_sequence*.txt"), key=lambda file: file.stat().st_size)
    if not files:
        raise SystemExit(f"XLA wrote no thunk sequence, only {[file.name for file in folder.iterdir()]}")
    return files[-1].read_text()


def count_thunks(listing: str) -> dict[str, int]:
    """Count the thunks of the outermost sequence by kind."""
    return dict(Counter(re.findall(r"^\d+: (k\w+)", listing, re.MULTILINE)))


def count_nodes(listing: str) -> int:
    """Count what is launched, in command buffers or not; a loop's body once."""
    return len(re.findall(r"^ *\d+: k(?!CommandBuffer|While)", listing, re.MULTILINE))


def find_host_predicates(listing: str, hlo: str) -> list[str]:
    """Return the branches and loops of which XLA:GPU brings the predicate to the host; of counted loops it need not."""
    branches = re.findall(r"^\d+: (kConditional.*)", listing, re.MULTILINE)
    loops = re.findall(r"^ *(%while\S*) = .* while\((?!.*known_trip_count)", hlo, re.MULTILINE)
    return [*branches, *(loops if listing else ())]
