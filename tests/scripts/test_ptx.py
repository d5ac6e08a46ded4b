"""scripts/compile/ptx.py: loops in the PTX of Mosaic GPU, and the counts of their work."""

from __future__ import annotations

import pytest
from compile.ptx import Kernel, Loop, read_kernels

pytestmark = pytest.mark.scripts

WGMMA = (
    "{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
    "{%r8,%r9}, %rd4, %rd5, p, 1, 1, 0, 0; }"
)
WAIT = """\t{
\t.reg .pred P1;
\tLAB_WAIT:
\tmbarrier.try_wait.parity.shared.b64 P1, [%r1], %r2, %r3;
\t@P1 bra.uni DONE;
\tbra.uni LAB_WAIT;
\tDONE:
\t}"""


def entry(*lines: str, name: str = "some_mosaic_gpu_kernel", threads: int = 384) -> str:
    body = "\n".join(line if line.startswith(("$", "\t")) else f"\t{line}" for line in lines)
    return f"""
.visible .entry {name}(
\t.param .u64 .ptr .align 256 {name}_param_0
)
.maxntid {threads}, 1, 1
.minnctapersm 1
{{
\t.reg .pred \t%p<63>;
{body}
\tret;
$L__func_end0:

}}
"""


def loop(*lines: str) -> Loop:
    """Return the counted work of a loop of these lines."""
    text = entry("mov.b32 %r1, 16;", "$L__BB0_1:", *lines, "@%p1 bra $L__BB0_1;")
    (only,) = read_kernels(text)["some"].loops
    return only


def expect(register: str) -> str:
    return f"mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%rd1], {register};"


def test_warpgroups_have_loops_of_their_own() -> None:
    text = entry(
        "mov.b32 %r7, 64;",
        "@%p1 bra $L__BB0_4;",
        "bra.uni $L__BB0_2;",
        "$L__BB0_1:",  # the consumers' loop is entered in its middle
        WGMMA,
        "@!%p2 bra $L__BB0_3;",
        "$L__BB0_2:",
        WAIT,
        WGMMA,
        "ex2.approx.ftz.f32 %r5, %r6;",
        "bra.uni $L__BB0_1;",
        "$L__BB0_3:",
        "ex2.approx.ftz.f32 %r5, %r6;",  # after it
        "bra.uni $L__BB0_7;",
        "$L__BB0_4:",
        expect("%r7"),  # queries: in the loop over items, not in that over tiles
        "$L__BB0_5:",
        expect("%r7"),
        expect("%r7"),
        "@%p3 bra $L__BB0_5;",
        "@%p4 bra $L__BB0_4;",
        "$L__BB0_7:",
    )
    consumer = Loop(0, 2 * 2 * 64 * 128 * 16, 128, 6)
    assert read_kernels(text) == {"some": Kernel(384, [consumer, Loop(2 * 64 * 128, 0, 0, 3)])}


def test_kernels_stand_between_other_text() -> None:
    one = entry("ld.global.b32 %r1, [%rd1];", threads=128, name="first_mosaic_gpu_kernel")
    two = entry("mov.b32 %r1, 8;", expect("%r1"), WGMMA, name="second_mosaic_gpu_kernel", threads=256)
    kernels = read_kernels(f"// LLVM\n{one}ptxas info    : Used 12 registers\n{two}ptxas info    : Used 40 registers")
    # Without a loop, a kernel is one.
    assert kernels == {
        "first": Kernel(128, [Loop(0, 0, 0, 2)]),
        "second": Kernel(256, [Loop(1024, 2 * 64 * 128 * 16, 0, 3)]),
    }


@pytest.mark.parametrize(("second", "branches"), [("gt.s32 %p3, %r4, 63", 1), ("gt.s32 %p3, %r4, 64", 2)])
def test_of_several_ways_the_longest_possible_counts(second: str, branches: int) -> None:
    """The loop reads keys, and then values: in one way or, where there are fewer than 64, in another."""
    counted = loop(
        expect("%r1"),
        "setp.lt.s32 %p2, %r4, 64;",
        "@%p2 bra $L__BB0_2;",
        expect("%r1"),
        "$L__BB0_2:",
        f"setp.{second};",
        "@%p3 bra $L__BB0_3;",
        expect("%r1"),
        "$L__BB0_3:",
    )
    assert counted.num_bytes == (1 + branches) * 16 * 128


def test_a_condition_does_not_change_on_the_way() -> None:
    skips = ["@%p2 bra $L__BB0_2;", expect("%r1"), "$L__BB0_2:", "@!%p2 bra $L__BB0_3;", expect("%r1"), "$L__BB0_3:"]
    assert loop(*skips).num_bytes == 16 * 128


def test_bytes_are_expected_by_all_threads_or_by_one() -> None:
    assert loop(expect("%r1")).num_bytes == 16 * 128
    assert loop("selp.b32 %r2, 192, 0, %p5;", expect("%r2")).num_bytes == 192
    old_form = "mbarrier.arrive.expect_tx.shared.b64 %rd9, [__dynamic_shmem__0+2048], %r1;"
    assert loop(old_form).num_bytes == 16 * 128


@pytest.mark.parametrize(
    "lines",
    [
        ["add.s32 %r2, %r3, 4;", expect("%r2")],
        ["mov.b32 %r2, 4;", "mov.b32 %r2, 5;", expect("%r2")],
        [f"@%p1 {expect('%r1')}"],
    ],
)
def test_unknown_bytes_are_refused(lines: list[str]) -> None:
    with pytest.raises(ValueError, match="how many bytes"):
        loop(*lines)


def test_threads_load_each_its_own_or_all_the_same() -> None:
    address = ["mov.u32 %r5, %tid.x;", "mul.wide.u32 %rd2, %r5, 4;", "add.s64 %rd3, %rd2, %rd1;"]
    assert loop(*address, "ld.global.b32 %r6, [%rd3];").num_bytes == 4 * 128
    assert loop(*address, "ld.global.v2.b32 {%r6, %r7}, [%rd3+16];").num_bytes == 8 * 128
    assert loop(*address, "ld.global.b32 %r6, [%rd1];").num_bytes == 0
    warp = ["mov.u32 %r5, %tid.x;", "shfl.sync.idx.b32 %r8, %r5, 0, 31, -1;", "cvt.u64.u32 %rd3, %r8;"]
    assert loop(*warp, "ld.global.b32 %r6, [%rd3];").num_bytes == 0


def test_special_functions() -> None:
    assert loop("ex2.approx.f32 %r5, %r6;", "rsqrt.approx.f32 %r5, %r6;", "add.f32 %r5, %r6, %r7;").specials == 2 * 128
    assert loop("div.full.f32 %r5, %r6, %r7;", "lg2.approx.ftz.f32 %r5, %r6;").specials == 2 * 128
