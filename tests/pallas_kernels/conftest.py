"""What kernels are compared with, and their interpreters, are compiled quickly: each shape runs once."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_compilation() -> Iterator[None]:
    """Half the time of these tests would go into optimizing."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
