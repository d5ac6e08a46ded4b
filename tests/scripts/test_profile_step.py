"""scripts/bench.py step: a real step's operations are sorted by the scopes that the model names."""

from __future__ import annotations

import re
from collections.abc import Iterator

import jax
import pytest
from bench.step import REST, decode_program, part_of, parts_by_operation

from jaxllm.models import LayerLoop
from tests.execution.support import make_runner


@pytest.fixture
def _names_are_new() -> Iterator[None]:
    """Keep JAX's cache out: a program from it would have the names that it was compiled with."""
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    yield
    jax.config.update("jax_compilation_cache_include_metadata_in_key", False)


@pytest.mark.device
@pytest.mark.usefixtures("_names_are_new")
@pytest.mark.parametrize("loop", [LayerLoop.SCAN, LayerLoop.SWITCH, LayerLoop.IN_PLACE])
def test_every_matmul_of_a_step_belongs_to_a_part(loop: LayerLoop) -> None:
    program = decode_program(make_runner(loop=loop), num_seqs=2)
    assert set(parts_by_operation(program).values()) == {"layers' matmuls", "attention", "output head", REST}
    parts = parts_by_operation(program)
    pattern = r'^\s*(?:ROOT )?%?([\w.-]+) = .*(?:custom_call_target="linear_|op_name="[^"]*dot_general")'
    matmuls = re.findall(pattern, program, re.MULTILINE)
    assert len(matmuls) > 5
    assert REST not in [parts[name] for name in matmuls if name in parts]


@pytest.mark.scripts
def test_only_matmuls_count_as_matmuls() -> None:
    path = "jit(run_step)/while/body/cond/branch_3_fun/jit(finish)/finish/"
    assert part_of(path + "ti,oi->to/dot_general") == "layers' matmuls"
    assert part_of(path + "ffi_call", "linear_bfloat16_bfloat16") == "layers' matmuls"
    assert part_of(path + "ffi_call", "rms_norm_bfloat16") == REST
    assert part_of(path + "rsqrt") == REST
    assert part_of("jit(run_step)/while/body/attend/while/body/exp") == "attention"
    assert part_of("jit(run_step)/sin") == REST
