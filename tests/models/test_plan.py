"""A plan's loops go through the layers in order, with few bodies for existing models."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from jaxllm.models.config import LayerSpec
from jaxllm.models.loop import walk
from jaxllm.models.plan import LayerPlan


def plan_of(kinds: str) -> LayerPlan:
    """Return a plan with a layer for each letter; equal letters are one kind."""
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

        def run(stream: int, kind: int, index: int, plan: LayerPlan = plan, passed: list[int] = passed) -> int:
            passed.append(plan.layers_of[kind][index])
            return stream + 1

        assert walk(plan, 0, run, loops=False) == len(kinds)
        assert passed == list(range(len(kinds)))


def test_a_layer_that_borrows_keys_and_values_has_no_place_in_the_cache_of_its_own() -> None:
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 2, "intermediate_size": 4, "scale": 1.0}
    sliding, full = LayerSpec(**sizes, window=8), LayerSpec(**sizes)
    lenders = [sliding, sliding, full, sliding, full]
    plan = LayerPlan((*lenders, *(replace(layer, borrows_kv=True) for layer in lenders)))
    assert list(plan.groups.values()) == [(0, 1, 3), (2, 4)]
    assert plan.lending_groups == set(plan.groups)
    assert plan.layers_of == ((0, 1, 3), (2, 4), (5, 6, 8), (7, 9))
    assert [plan.cache_layers(kind) for kind in range(4)] == [(0, (0, 1, 2)), (1, (0, 1)), (0, (2, 2, 2)), (1, (1, 1))]
    assert not LayerPlan(tuple(lenders)).lending_groups


def test_chunks_are_a_cache_group_of_their_own() -> None:
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 2, "intermediate_size": 4, "scale": 1.0}
    layers = [LayerSpec(**sizes, attention_chunk=8), LayerSpec(**sizes, window=8), LayerSpec(**sizes)]
    groups = LayerPlan((*layers, *layers)).groups
    assert [(group.window, group.attention_chunk) for group in groups] == [(None, 8), (8, None), (None, None)]
    with pytest.raises(ValueError, match="a window of 8 and chunks of 4"):
        LayerSpec(**sizes, window=8, attention_chunk=4)
