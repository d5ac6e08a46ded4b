"""The tables of implementations name functions that exist."""

from __future__ import annotations

import pytest

from pallas_kernels import grouped_matmul, implementations
from pallas_kernels.grouped_matmul import cpu, gpu, tpu
from pallas_kernels.implementations import GROUPED_MATMUL, Implementation, load

TABLES = {name: table for name, table in vars(implementations).items() if name.isupper()}


@pytest.mark.parametrize(("table", "key"), [(name, key) for name, table in TABLES.items() for key in table])
def test_names_lead_to_functions(table: str, key: str):
    entry: Implementation = TABLES[table][key]
    names = entry.function, entry.refuses, entry.prepare, entry.pool_spec, entry.tiles
    assert all(callable(load(name)) for name in names if name is not None)


def test_every_op_is_there():
    assert len(TABLES) == 12


def test_groups_start_where_kernels_want_them():
    modules = {"cpu": cpu.ROW_ALIGNMENT, "gpu": gpu.ROW_SLAB, "tpu": tpu.ROW_SLAB}
    assert {name: GROUPED_MATMUL[name].row_alignment for name in modules} == modules
    assert grouped_matmul.pick([], "cpu")[0].row_alignment == cpu.ROW_ALIGNMENT
