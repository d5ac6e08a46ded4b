"""scripts/compile/compiled_step.py finds the copies of adapters in a step, and nothing else, in compilers' HLO."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from compile.compiled_step import find_adapter_copies

from jaxllm.execution.mesh import make_mesh
from jaxllm.models.adapters import AdapterShape
from jaxllm.models.model import Model
from jaxllm.models.specs import ModelSpecs
from tests.models.running import build_model

pytestmark = pytest.mark.scripts

NUM_SLOTS, RANK = 3, 5
COLUMNS = NUM_SLOTS * RANK
"""The adapters of one parameter."""


@pytest.fixture(scope="module")
def compiler() -> Any:
    plain = build_model("llama3_tied")
    model = Model(ModelSpecs(plain.config, jnp.bfloat16, plain.specs.loop), adapter_shape=AdapterShape(NUM_SLOTS, RANK))
    return SimpleNamespace(model=model, mesh=make_mesh(jax.devices()[:1]))


def hlo(lines: str, inside: str = "") -> str:
    """Return a program whose entry has some lines, and whose only fusion has others inside."""
    return f"""HloModule jit_run_step

%fused_computation.1 (param_0: bf16[2,15,64]) -> bf16[64,15] {{
{inside}
}}

ENTRY %main (params: bf16[2,15,64]) -> bf16[64,15] {{
{lines}
  %fusion.1 = bf16[64,15]{{1,0}} fusion(%params), kind=kLoop, calls=%fused_computation.1
}}
"""


def test_copies_are_found(compiler: Any) -> None:
    config = compiler.model.config
    layers, hidden = len(config.layers), config.hidden_size
    assert COLUMNS * hidden not in (64 * COLUMNS, 64 * hidden), "an activation would count"
    stack, layer = f"bf16[{layers},{COLUMNS},{hidden}]", f"f32[{COLUMNS},{hidden}]"
    for line in (
        f"  %copy.1 = {stack}{{2,1,0}} copy(%params)",
        f"  %copy-start.1 = {stack}{{2,1,0}} copy-start(%params)",
        f"  %convert.1 = {layer}{{1,0}} convert(%params)",
        f"  %dynamic-slice.1 = {layer}{{1,0}} dynamic-slice(%params, %layer)",
        f"  ROOT %wide = {layer}{{1,0}} fusion(%params), kind=kLoop, calls=%fused_computation.2",
    ):
        assert find_adapter_copies(hlo(line), compiler) == [stack if stack in line else layer]


def test_what_goes_nowhere_is_no_copy(compiler: Any) -> None:
    config = compiler.model.config
    stack = f"bf16[{len(config.layers)},{COLUMNS},{config.hidden_size}]"
    layer = f"bf16[{COLUMNS},{config.hidden_size}]"
    inside = f"  %slice = {layer}{{1,0}} dynamic-slice(%param_0, %param_1)\n  ROOT %dot = bf16[64,15] dot(%slice)"
    lines = f"""  %params = {stack}{{2,1,0}} parameter(0)
  %bitcast = {layer}{{1,0}} bitcast(%params)
  %near = {layer}{{1,0:T(8,128)(2,1)S(1)}} dynamic-slice(%params)
  %activations = bf16[64,{config.hidden_size}]{{1,0}} copy(%x)"""
    assert find_adapter_copies(hlo(lines, inside), compiler) == []
