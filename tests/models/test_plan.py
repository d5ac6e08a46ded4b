"""A plan's loops go through the layers in order, with few bodies for the models there are."""

from __future__ import annotations

import random

import pytest

from jaxllm.models.config import LayerSpec
from jaxllm.models.loop import walk
from jaxllm.models.plan import LayerPlan


def plan_of(kinds: str) -> LayerPlan:
    """Return the plan of layers whose kinds are letters."""
    return LayerPlan(
        tuple(
            LayerSpec(num_heads=1, num_kv_heads=1, head_dim=2, intermediate_size=ord(kind), scale=1.0) for kind in kinds
        )
    )


def num_bodies(plan: LayerPlan) -> int:
    return sum(len(segment.pattern) for segment in plan.segments)


@pytest.mark.parametrize(
    ("kinds", "bodies"),
    [
        ("a" * 32, 1),
        ("ab" * 12, 2),  # gpt-oss
        (("a" * 5 + "b") * 4 + "aa", 3),  # Gemma 3 1B
        (("a" * 3 + "b") * 8, 2),  # Qwen3.5
        ("a" + "b" * 60, 2),  # DeepSeek
        ("a", 1),
        ("abcab", 5),
    ],
)
def test_few_bodies_are_compiled(kinds: str, bodies: int) -> None:
    assert num_bodies(plan_of(kinds)) == bodies


def test_every_layer_is_passed_once_in_order() -> None:
    source = random.Random(0)
    for _ in range(300):
        kinds = "".join(source.choices("abc", k=source.randint(1, 12))) * source.randint(1, 4)
        plan, passed = plan_of(kinds), []

        def run(stream: int, kind: int, place: int, plan: LayerPlan = plan, passed: list[int] = passed) -> int:
            passed.append(plan.layers_of[kind][place])
            return stream + 1

        assert walk(plan, 0, run, loops=False) == len(kinds)
        assert passed == list(range(len(kinds)))
