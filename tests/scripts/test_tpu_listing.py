"""Loops of a TPU's listing: those without a known number of trips are counted apart, and clearing keeps other files."""

from __future__ import annotations

from pathlib import Path

from compile.tpu_listing import clear, read_loops

LISTING = """
   0 : { %s1 = start  /* Start region 9 */ }
 0x1 LB: { nop  /* Start region 1 */ }
 0x2 LB: { nop  /* Start region 2 */ }
 0x3 : { %p1 = scmp.ge.s32.totalorder %s4, 5 /* loop exit test */ }
 0x4 : { sbr.rel (!%p1) target = $region2 }
 0x5 LB: { nop  /* Start region 3 */ }
 0x6 : { %p2 = scmp.ge.s32.totalorder %s5, %s6 /* loop exit test */ }
 0x7 : { sbr.rel (!%p2) target = $region3 }
 0x8 : { %p3 = scmp.ge.s32.totalorder %s7, 3 /* loop exit test */ }
 0x9 : { sbr.rel (!%p3) target = $region1 }
 0xa : { nop }
"""
USAGE = "units\nMATMUL, OTHER\nUTILIZATION\n" + "1 0\n" * 11


def test_loops_without_known_trips(tmp_path: Path):
    (tmp_path / "1-kernel-80-final_bundles.txt").write_text(LISTING)
    (tmp_path / "1-kernel-81-final_hlo-static-per-bundle-utilization.txt").write_text(USAGE)
    kernel = read_loops(tmp_path, "kernel")
    [outer] = kernel.inside
    assert [(loop.first, loop.last, loop.trips) for loop in outer] == [(1, 9, 3), (2, 4, 5), (5, 7, None)]
    assert (outer.bundles_of_one_trip, outer.num_unknown) == (3 + 5 * 3, 1)
    assert (kernel.bundles_of_one_trip, kernel.num_unknown) == (2 + 3 * 18, 1)


def test_clearing_keeps_other_files(tmp_path: Path):
    for name in ("1700000-kernel-80-final_bundles.txt", "1700000-kernel.html", "notes.txt", "0x.md"):
        (tmp_path / name).write_text("x")
    clear(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "0x.md"}
