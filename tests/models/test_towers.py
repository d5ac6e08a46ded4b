"""Vision towers equal HF in float32, whatever is in the padding and beside an item."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.media.processors import cut_patches
from jaxllm.models import LayerLoop, ModelSpecs, get_family
from jaxllm.models.params import array_specs, unflatten
from jaxllm.models.towers.layout import (
    PatchBatch,
    count_outputs,
    count_rows,
    count_slots,
    empty_batch,
    make_batch,
)
from jaxllm.models.towers.settings import Grid, TowerSettings
from jaxllm.models.towers.tower import Tower
from tests.models.random_weights import draw_pixels, draw_weights
from tests.models.running import load
from tests.quick import QUICK_COMPILE

pytestmark = pytest.mark.models

FOLDER = Path(__file__).parents[1] / "data" / "towers"
CASES = tuple(sorted(path.stem for path in FOLDER.iterdir()))
TOLERANCE = 1e-4
NUM_SLOTS = 256
"""The slots of the programs; no case has as many patches."""
TILED = ("llava_next", "llava_onevision")
"""Cases whose grids are those of one image."""
BOUNDED = ("gemma3", "internvl", "qwen2_5_vl")
"""Cases with patches alone, with class tokens, and with windows, whose segments have a most length."""
LOOP_CASES = ("qwen2_5_vl", "qwen3_vl")
"""Cases with two kinds of layers, and with tapped layers."""


@dataclass(frozen=True)
class Case:
    """A tower, its patches and HF's rows."""

    config: dict[str, Any]
    shapes: dict[str, list[int]]
    module_names: list[str]
    grids: list[Grid]
    pixels: np.ndarray
    rows: np.ndarray
    size: tuple[int, int]
    """The height and width of an image in tiles."""

    def make_tower(
        self, loop: LayerLoop = LayerLoop.SCAN, dtype: Any = jnp.float32, quantization: str | None = None
    ) -> Tower:
        family = get_family(self.config["architectures"][0])
        vision = family.read_config(self.config).encoder
        assert vision is not None
        settings: Any = {"family": family.vision, "tensor_names": self.shapes, "quantization": quantization}
        return Tower(ModelSpecs(vision, dtype, loop, **settings))

    def flatten(self, settings: TowerSettings) -> np.ndarray:
        """Return the flattened patches of all grids."""
        return self.pixels if self.pixels.ndim == 2 else cut_patches(self.pixels, settings.patch_size[0])


@cache
def read_case(name: str) -> Case:
    with np.load(FOLDER / f"{name}.npz") as arrays:
        case, rows = json.loads(str(arrays["case"])), arrays["rows"]
    grids = [Grid(*grid) for grid in case["grids"]]
    pixels, size = draw_pixels(case["pixels"], 0), tuple(case.get("size", (0, 0)))
    return Case(case["config"], case["shapes"], case["module_names"], grids, pixels, rows, size)


class Runner:
    """A compiled tower with its parameters."""

    def __init__(self, case: Case, loop: LayerLoop, quantization: str | None = None) -> None:
        self.case, self.tower = case, case.make_tower(loop, quantization=quantization)
        self.settings = self.tower.settings
        self.params = load(self.tower, draw_weights(case.shapes, 0, "tower"))
        self.patches = case.flatten(self.settings)
        encode = jax.jit(self.tower.encode).lower(self.params, self.batch(case.grids, self.patches))
        self.encode = encode.compile(compiler_options=dict(QUICK_COMPILE))

    def batch(self, grids: list[Grid], patches: np.ndarray) -> PatchBatch:
        """Return the inputs for some grids, with NaN in all patches of padding."""
        batch = make_batch(self.settings, grids, patches, NUM_SLOTS, size=self.case.size)
        batch.patches_pc[int(batch.num_slots) :] = np.nan
        return batch

    def rows(self, grids: list[Grid], patches: np.ndarray) -> np.ndarray:
        """Return the rows of some grids."""
        rows = np.asarray(self.encode(self.params, self.batch(grids, patches)))
        assert np.isfinite(rows).all()
        return rows[: len(self.case.rows) if self.settings.tiling else count_rows(self.settings, grids)]


@cache
def runner(name: str, loop: LayerLoop = LayerLoop.SCAN) -> Runner:
    return Runner(read_case(name), loop)


@pytest.mark.parametrize("name", CASES)
def test_rows_match_hf(name: str) -> None:
    run = runner(name)
    rows = run.rows(run.case.grids, run.patches)
    assert rows.shape == run.case.rows.shape
    np.testing.assert_allclose(rows, run.case.rows, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("loop", [LayerLoop.UNROLL, LayerLoop.SWITCH, LayerLoop.IN_PLACE])
@pytest.mark.parametrize("name", LOOP_CASES)
def test_all_loops_match_hf(name: str, loop: LayerLoop) -> None:
    run = runner(name, loop)
    np.testing.assert_allclose(run.rows(run.case.grids, run.patches), run.case.rows, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", [name for name in CASES if name not in TILED])
def test_an_item_alone_has_the_rows_that_it_has_beside_others(name: str) -> None:
    run = runner(name)
    patch = row = 0
    for grid in run.case.grids:
        num_patches, num_rows = grid.t * grid.h * grid.w, count_rows(run.settings, [grid])
        rows = run.rows([grid], run.patches[patch : patch + num_patches])
        np.testing.assert_allclose(rows, run.case.rows[row : row + num_rows], rtol=0, atol=TOLERANCE)
        patch, row = patch + num_patches, row + num_rows


def test_rows_are_the_same_in_a_bucket_without_padding() -> None:
    run = runner("qwen2_5_vl")
    batch = make_batch(run.settings, run.case.grids, run.patches)
    assert len(batch.patches_pc) == batch.num_slots < NUM_SLOTS
    encode = jax.jit(run.tower.encode).lower(run.params, batch).compile(compiler_options=dict(QUICK_COMPILE))
    np.testing.assert_allclose(encode(run.params, batch), run.case.rows, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_tensors_are_read_under_both_names(name: str) -> None:
    """A checkpoint has the names of the hub, or those of HF's modules; a tensor that is left over is listed."""
    case = read_case(name)
    specs = case.make_tower().specs
    # Published SigLIPs and CLIPs have one more module in their names.
    published = [name.replace("vision_tower.", "vision_tower.vision_model.") for name in case.shapes]
    has_more = name in ("gemma3", "llava", *TILED)
    for names in (list(case.shapes), case.module_names, *([published] if has_more else [])):
        sources = {source for spec in specs.param_specs(names).values() for source in spec.sources}
        assert sources <= set(names)
        left = set(names) - sources
        assert [name for name in left if not any(fnmatch(name, pattern) for pattern in specs.ignored_tensors)] == []
    shapes = {source: spec.hf_shape for spec in specs.param_specs().values() for source in spec.sources}
    assert {source: list(shape) for source, shape in shapes.items()} == {
        source: case.shapes[source] for source in shapes
    }


def test_slots_are_counted() -> None:
    for name in CASES:
        run = runner(name)
        assert int(run.batch(run.case.grids, run.patches).num_slots) == count_slots(run.settings, run.case.grids)


@pytest.mark.parametrize("name", BOUNDED)
def test_no_segment_is_longer_than_its_tower_allows(name: str) -> None:
    """Counted loops of attention go no further."""
    case = read_case(name)
    tower = case.make_tower()
    batch = make_batch(tower.settings, case.grids, case.flatten(tower.settings), NUM_SLOTS, size=case.size)
    lengths_ap, bounds = np.asarray(batch.ends_ap) - np.asarray(batch.starts_ap), []
    for spec in tower.plan.kinds:
        if (longest := tower._longest_segment(spec)) is not None:
            bounds.append(longest)
            assert lengths_ap[0 if spec.attention_chunk is None else 1].max() <= longest
    assert len(bounds) == 1


@pytest.mark.parametrize("loop", LayerLoop)
@pytest.mark.parametrize("name", CASES)
def test_bfloat16_stays_bfloat16(name: str, loop: LayerLoop) -> None:
    case = read_case(name)
    tower = case.make_tower(loop, jnp.bfloat16)
    shapes = {
        path: jax.ShapeDtypeStruct(a.shape, a.dtype) for path, a in array_specs(tower.specs.param_specs()).items()
    }
    batch = empty_batch(tower.settings, NUM_SLOTS)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        rows = jax.eval_shape(tower.encode, unflatten(shapes), batch)
    assert (rows.dtype, rows.shape) == (jnp.bfloat16, (count_outputs(tower.settings, NUM_SLOTS), case.rows.shape[1]))


def test_quantized_rows_are_near() -> None:
    run = Runner(read_case("gemma3"), LayerLoop.IN_PLACE, "int8")
    error = np.abs(run.rows(run.case.grids, run.patches) - run.case.rows).mean()
    assert 0 < error < 0.05 * np.abs(run.case.rows).mean()
