"""Collectives are counted as a program runs them: by hand for texts in XLA's form."""

from __future__ import annotations

import pytest

from jaxllm.check.hlo import count_collectives

LOOP = """HloModule jit_run_step, is_scheduled=true

%add.2 (x.1: bf16[], y.1: bf16[]) -> bf16[] {
  %x.1 = bf16[]{:T(512)} parameter(0)
  %y.1 = bf16[]{:T(512)} parameter(1)
  ROOT %add.3 = bf16[]{:T(512)} add(%x.1, %y.1)
}

%body.1 (p.1: (s32[], bf16[256,2048])) -> (s32[], bf16[256,2048]) {
  %p.1 = (s32[]{:T(128)}, bf16[256,2048]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %g.1 = bf16[256,2048]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%p.1), index=1
  %all-reduce.1 = bf16[256,2048]{1,0:T(8,128)(2,1)S(1)} all-reduce(%g.1), channel_id=3, to_apply=%add.2
  %fusion.1 = bf16[256,2048]{1,0} fusion(%all-reduce.1), kind=kCustom, calls=%fused.1
  ROOT %tuple.1 = (s32[], bf16[256,2048]{1,0}) tuple(%g.1, %fusion.1)
}

%fused.1 (q.1: bf16[256,2048]) -> bf16[256,2048] {
  %q.1 = bf16[256,2048]{1,0} parameter(0)
  ROOT %all-reduce.2 = bf16[256,2048]{1,0} all-reduce(%q.1), channel_id=4, to_apply=%add.2
}

%condition.1 (p.2: (s32[], bf16[256,2048])) -> pred[] {
  %constant.9 = s32[]{:T(128)} constant(0)
  CONSTANT
  %p.2 = (s32[]{:T(128)}, bf16[256,2048]{1,0:T(8,128)(2,1)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.2), index=0
  ROOT %lt.1 = pred[]{:T(512)} compare(%i.1, %limit.1), direction=LT, metadata={op_name="jit(f)/while/cond/lt"}
}

ENTRY %main.1 (a.1: bf16[256,2048]) -> bf16[256,2048] {
  %a.1 = bf16[256,2048]{1,0} parameter(0)
  %w.1 = (s32[], bf16[256,2048]{1,0}) while(%a.1), condition=%condition.1, body=%body.1, metadata={op_name="x"}
  ROOT %all-reduce.5 = bf16[256,2048]{1,0} all-reduce(%w.1), channel_id=1, replica_groups={{0,1}}, to_apply=%add.2
}
"""
ARRAY = 256 * 2048 * 2
CONSTANT, COMPUTED = "%limit.1 = s32[]{:T(128)} constant(16)", "%limit.1 = s32[] get-tuple-element(%p.2), index=2"


def found(hlo: str) -> list[tuple[str, int, int, bool]]:
    return [(each.kind, each.count, each.bytes, each.repeated) for each in count_collectives(hlo)]


def test_a_loop_counts_as_often_as_it_runs():
    assert found(LOOP.replace("CONSTANT", CONSTANT)) == [("all-reduce", 33, 33 * ARRAY, False)]


def test_what_xla_notes_of_a_loop_comes_first():
    noted = LOOP.replace("CONSTANT", COMPUTED).replace(
        'body=%body.1, metadata={op_name="x"}', 'body=%body.1, backend_config={"known_trip_count":{"n":"5"},"x":1}'
    )
    assert found(noted) == [("all-reduce", 11, 11 * ARRAY, False)]


def test_a_loop_of_unknown_length_is_kept_apart():
    hlo = LOOP.replace("CONSTANT", COMPUTED)
    assert found(hlo) == [("all-reduce", 1, ARRAY, False), ("all-reduce", 2, 2 * ARRAY, True)]


ENTRY = """%cheap (p: f32[64]) -> f32[64] {{
  ROOT %r.1 = f32[64]{{0}} all-reduce(%p), to_apply=%add
}}

%dear (p: f32[64]) -> f32[64] {{
  ROOT %r.2 = (f32[64]{{0}}, /*index=1*/f32[64,5]{{1,0}}) all-reduce(%p, %p), to_apply=%add
}}

ENTRY %main (p: f32[64]) -> f32[64] {{
  %p = f32[64]{{0}} parameter(0)
  {}
}}
"""


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            "%c = f32[64]{0} conditional(%i, %p, %p), branch_computations={%cheap, %dear}",
            ("all-reduce", 1, 64 * 4 + 320 * 4, False),
        ),
        (
            "%c = f32[64]{0} conditional(%i, %p, %p), true_computation=%cheap, false_computation=%dear",
            ("all-reduce", 1, 64 * 4 + 320 * 4, False),
        ),
        (
            "%s = (f32[64,8]{1,0:T(8)}, f32[64,32]) all-gather-start(%p)\n  %d = f32[64,32] all-gather-done(%s)",
            ("all-gather", 1, 64 * 32 * 4, False),
        ),
        (
            "%s = (s8[7], s8[7], u32[], u32[]) collective-permute-start(%p)\n  %d = s8[7] collective-permute-done(%s)",
            ("collective-permute", 1, 7, False),
        ),
        ("%s = ((f32[64]), f32[64], u32[]) async-start(%p), calls=%cheap", ("all-reduce", 1, 256, False)),
        ("%r = pred[3]{0} reduce-scatter(%p), to_apply=%add", ("reduce-scatter", 1, 3, False)),
    ],
)
def test_kinds(lines: str, expected: tuple[str, int, int, bool]):
    assert found(ENTRY.format(lines)) == [expected]


def test_a_program_without_collectives():
    assert found(ENTRY.format("ROOT %r = f32[64]{0} add(%p, %p)")) == []
