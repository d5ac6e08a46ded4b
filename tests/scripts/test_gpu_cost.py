"""scripts/compile/gpu_cost.py: the limits of an H100, by hand. scripts/lib/sheet.py: columns."""

from __future__ import annotations

import pytest
from compile.gpu_cost import cost, cost_sheet, occupancy
from compile.ptx import Kernel, Loop
from lib.sheet import print_sheet

pytestmark = pytest.mark.scripts

# 128 positions of K and V with h = 128 in bfloat16; 2 warpgroups that multiply 64 rows with them.
TILE = 2 * 128 * 128 * 2
PRODUCER, DECODE = Loop(TILE, 0, 0), Loop(0, 4 * 64 * 64 * 128, 34 * 128, 1000)
PREFILL = Loop(0, 4 * 64 * 128 * 128, 66 * 128)


def test_decode_waits_for_memory() -> None:
    figures = cost("paged_decode", Kernel(384, [DECODE, Loop(0, 0, 0), PRODUCER]))
    assert figures == {
        "tile_KiB": 64.0,
        "FLOP_per_byte": 64,
        "HBM_ns": 2581,  # 65,536 bytes at 3,352.32 / 132 bytes a ns
        "MMA_ns": 560,  # 4,194,304 at 989,400 / 132 FLOP a ns
        "exp_ns": 297,  # 8,704 at 16 x 1.83 a ns
        "ops_ns": 1093,  # 2 x 4 warps of 1,000 instructions, at 4 x 1.83 a ns
        "bound": "HBM",
    }


def test_prefill_shares_its_tiles() -> None:
    figures = cost("paged_prefill", Kernel(384, [PREFILL, PRODUCER]))
    assert (figures["MMA_ns"], figures["exp_ns"], figures["bound"]) == (1119, 577, "MMA")
    assert figures["reuse"] == 2.3  # 2,581 / 1,119
    many = cost("paged_prefill", Kernel(384, [PREFILL._replace(specials=200 * 128), PRODUCER]))
    assert (many["bound"], many["reuse"]) == ("exp", 1.5)


def test_a_loop_without_matmuls_works_for_itself() -> None:
    figures = cost("combine_splits", Kernel(128, [Loop(0, 0, 9 * 128), Loop(2048, 0, 5 * 128)]))
    assert (figures["HBM_ns"], figures["MMA_ns"], figures["exp_ns"]) == (81, 0, 22)
    with pytest.raises(ValueError, match="brings bytes"):
        cost("paged_decode", Kernel(384, [DECODE]))


@pytest.mark.parametrize(
    ("registers", "threads", "smem", "blocks"),
    [
        (168, 384, 0, 1),  # 64,512 of 65,536 registers
        (54, 128, 0, 9),  # 56 of a thread, as they are given out
        (12, 128, 4096, 16),  # 2,048 threads
        (12, 32, 0, 32),
        (12, 128, 100 * 1024, 2),
    ],
)
def test_occupancy(registers: int, threads: int, smem: int, blocks: int) -> None:
    assert occupancy(registers, threads, smem)["blocks_per_SM"] == blocks


def test_block_sizes_that_cost_the_same_are_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    def row(block: int, ns: int, kv: str = "bfloat16") -> dict[str, object]:
        kernels = {"kv_write": {"HBM_ns": ns, "bound": "HBM"}}
        return {"case": "tiny", "kernel": "write", "kv": kv, "block": block, "kernels": kernels}

    rows = [row(16, 5), row(64, 5), row(64, 5), row(128, 6), row(16, 5, "float8_e4m3fn"), {"missed": ["an error"]}]
    print_sheet([*cost_sheet(rows), {"case": "other", "reuse": 2.5}])
    assert capsys.readouterr().out.splitlines() == [
        "case   kernel    kv             block  HBM_ns  bound  reuse",
        "tiny   kv_write  bfloat16       16,64       5  HBM",
        "tiny   kv_write  bfloat16       128         6  HBM",
        "tiny   kv_write  float8_e4m3fn  16          5  HBM",
        "other                                                   2.5",
    ]
