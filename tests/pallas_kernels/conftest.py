"""The tests of kernels share this."""

from collections.abc import Iterator

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.native import processor


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Compile without most of XLA's optimizing: for interpreters, whose large programs run once and are nobody's."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def tpu_interpreter() -> Iterator[None]:
    """Run a TPU's kernels in Pallas' interpreter, which looks for races."""
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield
    pltpu.reset_tpu_interpret_mode_state()


@pytest.fixture
def few_tiles_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tiles of short steps be more than are taken at once, so that states pass through the pool between."""
    monkeypatch.setattr("pallas_kernels.recurrent_state.chunks.MOST_TILES", 3)


@pytest.fixture
def avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile the CPU's kernels for AVX2, on a processor that has more."""
    restrict("avx2", monkeypatch)


@pytest.fixture(params=processor.LESSER.get(processor.host().name, ())[:-1])
def lesser_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile the CPU's kernels for each set that is less than the processor's, but the plain one."""
    restrict(request.param, monkeypatch)


def restrict(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processor have no more than an instruction set; skip where it has less."""
    if name not in (processor.host().name, *processor.LESSER.get(processor.host().name, ())):
        pytest.skip(f"the processor has no {name}")
    own = processor.restricted(processor.host(), name)
    monkeypatch.setattr("pallas_kernels.native.processor.current", lambda: own)
