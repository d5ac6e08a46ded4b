"""The tests of kernels share this."""

from collections.abc import Iterator

import jax
import pytest

from pallas_kernels.native import processor


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Compile without most of XLA's optimizing: for interpreters, whose large programs run once and are nobody's."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile the CPU's kernels for AVX2, on a processor that has more."""
    if processor.host().name == "neon":
        pytest.skip("the processor has no AVX2")
    own = processor.restricted(processor.host(), "avx2")
    monkeypatch.setattr("pallas_kernels.native.processor.current", lambda: own)
