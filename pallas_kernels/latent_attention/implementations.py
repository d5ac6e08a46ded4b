"""There are several ways of running the op; this says what each can do, and which one a platform gets.

TPUs and GPUs have no kernel of their own yet and get plain XLA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jax import Array

from pallas_kernels.paged_attention.implementations import Implementation
from pallas_kernels.paged_attention.tiles import XLA_TILES

from .layout import latent_pool_spec


def _load_xla(_: str | None) -> Callable[..., tuple[Array, Any]]:
    from .xla import xla_latent_attention

    return xla_latent_attention


IMPLEMENTATIONS: Mapping[str, Implementation] = {
    "xla": Implementation(
        _load_xla, None, latent_pool_spec, lambda _shape, _architecture: XLA_TILES, 1, lambda _: None
    ),
}
