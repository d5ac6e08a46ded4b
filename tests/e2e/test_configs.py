"""A random configuration of each family through `LLM`: log-probabilities in float32 equal HF's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.random_cases import largest_error, read_case
from tests.e2e.test_families import TOLERANCE

pytestmark = [pytest.mark.families, pytest.mark.usefixtures("quick_compile")]

CASES = sorted((Path(__file__).parents[1] / "data" / "configs").glob("*.json"))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_random_configuration(path: Path, tmp_path: Path):
    """More of them are drawn and compared by scripts/check.py configs."""
    assert largest_error(read_case(path), tmp_path) <= TOLERANCE


def test_there_is_one_of_each_family():
    assert len(CASES) >= 32
