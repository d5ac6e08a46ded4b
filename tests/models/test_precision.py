"""Matmuls of float32 request full precision: by default a GPU rounds operands to 11 bits, and a TPU to 8."""

from __future__ import annotations

import re

import pytest

from tests.models.running import Runner, build_model, load
from tests.models.tiny import read_tensors

pytestmark = pytest.mark.models

CASES = ("deepseek_v3", "gemma3", "gpt_oss", "granite4", "lfm2", "llama4", "mistral4", "nemotron_h", "opt", "qwen3_5")
MATMUL = re.compile(r".*stablehlo\.dot_general.*tensor<[\dx]*xf32>.*")


@pytest.mark.parametrize("case", CASES)
def test_no_bit_of_float32_is_dropped(case: str) -> None:
    model = build_model(case)
    matmuls = MATMUL.findall(Runner(model, load(model, read_tensors(case))).lowered.as_text())
    assert matmuls
    assert [line for line in matmuls if "precision = [HIGHEST, HIGHEST]" not in line] == []
