"""Fixtures of the kernel tests."""

from collections.abc import Iterator

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.native import processor


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Compile without most of XLA's optimizations, for the interpreters: their programs are large and run once."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def tpu_interpreter() -> Iterator[None]:
    """Run the TPU's kernels in Pallas' interpreter, which detects races."""
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield
    pltpu.reset_tpu_interpret_mode_state()


@pytest.fixture
def few_tiles_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take fewer tiles at once than short steps have, so that states pass through the pool in between."""
    monkeypatch.setattr("pallas_kernels.recurrent_state.chunks.MOST_TILES", 3)


@pytest.fixture
def avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile the CPU's kernels for AVX2, also on a processor with a better set."""
    restrict("avx2", monkeypatch)


@pytest.fixture(params=processor.LESSER.get(processor.host().name, ())[:-1])
def lesser_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile the CPU's kernels for each lesser set than the processor's, except the plain one."""
    restrict(request.param, monkeypatch)


def restrict(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restrict the processor to an instruction set; skip the test where it is no lesser one."""
    if name not in (processor.host().name, *processor.LESSER.get(processor.host().name, ())):
        pytest.skip(f"the processor has no {name}")
    restricted = processor.restricted(processor.host(), name)
    monkeypatch.setattr("pallas_kernels.native.processor.current", lambda: restricted)
