"""The implementations of the op: what each can run, and on which platform."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from jax import Array

from .shape import LoraShape


class Implementation(NamedTuple):
    """One way of running the op."""

    load: Callable[[], Callable[..., Array]]
    """Import the function; it has the signature of `Lora.__call__`, and gets arrays that fit each other."""
    platform: str | None
    """The platform where it runs, or None for all."""
    refusal: Callable[[LoraShape], str | None] = lambda _: None
    """A function that says why it cannot take adapters, or None if it can."""
    prepare: Callable[[LoraShape, Path | None], None] = lambda _shape, _folder: None
    """See `Lora.prepare`."""


def _load_xla() -> Callable[..., Array]:
    from .xla import xla_lora

    return xla_lora


def _load_cpu() -> Callable[..., Array]:
    from .cpu import cpu_lora

    return cpu_lora


def _refuse_on_cpu(shape: LoraShape) -> str | None:
    from .cpu import cpu_refusal

    return cpu_refusal(shape)


def _prepare_cpu(shape: LoraShape, folder: Path | None) -> None:
    from .cpu import cpu_prepare

    cpu_prepare(shape, folder)


IMPLEMENTATIONS: Mapping[str, Implementation] = {
    "xla": Implementation(_load_xla, None),
    "cpu": Implementation(_load_cpu, "cpu", _refuse_on_cpu, _prepare_cpu),
}
