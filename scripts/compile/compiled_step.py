"""Find a compiled step's copies, launches and waits for the host, in its HLO and the thunks of XLA:GPU."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

import jax

from jaxllm.execution.mesh import param_sharding
from jaxllm.execution.programs.compiler import StepCompiler
from jaxllm.models.params import array_specs

IN_VMEM = "S(1)"
"""The mark in a layout of a TPU's VMEM, where operands are copied ahead of their use."""


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
    """Return the arrays of a program that are as large as the weights of a layer's experts, such as a sliced layer.

    The kernels take the whole stack. No activation is as large as all experts of a layer.
    """
    arrays = array_specs(compiler.model.specs.param_specs()).values()
    experts = [spec for spec in arrays if spec.num_experts and spec.num_inputs]
    shapes = [param_sharding(compiler.mesh, spec).shard_shape(spec.shape) for spec in experts]
    sizes = {math.prod(shape[spec.stacked :]) for spec, shape in zip(experts, shapes, strict=True)}
    return [array for array, dims, _ in _computed(hlo) if math.prod(dims) in sizes]


def find_adapter_copies(hlo: str, compiler: StepCompiler) -> list[str]:
    """Return the arrays that a program writes to memory and that are as large as the adapters of a layer, or of all.

    The kernels take the whole stack, and no activation of a layer is as large.
    """
    specs = array_specs(compiler.model.specs.param_specs())
    sizes = set()
    for path, beside in compiler.model.adapter_specs().items():
        for spec in (beside.down, beside.up):
            shape = param_sharding(compiler.mesh, spec).shard_shape(spec.shape)
            sizes |= {math.prod(shape), math.prod(shape[specs[path].stacked :])}
    # Intermediate values of a fusion are not written to memory.
    inside = set(re.findall(r" fusion\(.*? calls=%([\w.-]+)", hlo))
    computations = re.split(r"\n(?=%|ENTRY )", hlo)
    written = [text for text in computations if text.split(" ", 1)[0].removeprefix("%") not in inside]
    computed = [each for text in written for each in _computed(text)]
    return [array for array, dims, layout in computed if math.prod(dims) in sizes and IN_VMEM not in layout]


def _computed(hlo: str) -> list[tuple[str, tuple[int, ...], str]]:
    """Return the arrays made by copying or changing others, with their shapes and layouts."""
    moved = "copy|copy-start|convert|dynamic-slice|fusion|transpose"
    arrays = re.findall(rf"= (\w+\[([\d,]+)\])(\S*) (?:{moved})\(", hlo)
    return [(array, tuple(map(int, dims.split(","))), layout) for array, dims, layout in arrays]


def find_scatters(hlo: str) -> list[str]:
    """Return the scatters of a program."""
    return re.findall(r"= (\S+) scatter\(", hlo)


def find_host_calls(hlo: str) -> list[str]:
    """Return the operations of a program that exchange data with the host or call it."""
    moves = re.findall(r"^.* ((?:infeed|outfeed)\(.*|(?:send|recv)\(.*is_host_transfer=true.*)$", hlo, re.MULTILINE)
    names = [move[: move.index("(")] for move in moves]
    return [*names, *re.findall(r'custom_call_target="([^"]*callback[^"]*)"', hlo, re.IGNORECASE)]


def read_thunks(folder: Path) -> str:
    """Return the thunks that XLA:GPU runs for the step, one per line, indented by nesting."""
    files = sorted(folder.glob("*thunk_sequence*.txt"), key=lambda file: file.stat().st_size)
    if not files:
        raise SystemExit(f"XLA wrote no thunk sequence, only {[file.name for file in folder.iterdir()]}")
    return files[-1].read_text()


def count_thunks(listing: str) -> dict[str, int]:
    """Count the thunks of the outermost sequence by kind."""
    return dict(Counter(re.findall(r"^\d+: (k\w+)", listing, re.MULTILINE)))


def count_nodes(listing: str) -> int:
    """Count the launches, in command buffers or not; a loop's body counts once."""
    return len(re.findall(r"^ *\d+: k(?!CommandBuffer|While)", listing, re.MULTILINE))


def count_loops(listing: str) -> int:
    """Count the loops and branches, which the host drives outside of command buffers."""
    return len(re.findall(r"^ *\d+: k(?:While|Conditional)", listing, re.MULTILINE))


def find_host_predicates(listing: str, hlo: str) -> list[str]:
    """Return the branches and loops for which XLA:GPU copies the predicate to the host; counted loops do without."""
    branches = re.findall(r"^\d+: (kConditional.*)", listing, re.MULTILINE)
    loops = re.findall(r"^ *(%while\S*) = .* while\((?!.*known_trip_count)", hlo, re.MULTILINE)
    return [*branches, *(loops if listing else ())]
