"""The tests of kernels share this."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Compile without most of XLA's optimizing: for interpreters, whose large programs run once and are nobody's."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
