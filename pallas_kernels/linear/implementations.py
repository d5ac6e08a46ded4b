"""The implementations of the op: what each can run, and on which platform."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from jax import Array

from pallas_kernels.targets import hopper_refusal

from .shape import LinearShape


class Implementation(NamedTuple):
    """One way of running the op."""

    load: Callable[[], Callable[..., Array]]
    """Import the function; it has the signature of `Linear.__call__`, with `out_dtype` and `interpret`, and gets arrays
    that fit each other."""
    platform: str | None
    """The platform where it runs, or None for all. A CPU interprets what belongs elsewhere, slowly."""
    refusal: Callable[[LinearShape], str | None] = lambda _: None
    """A function that says why it cannot run a matmul, or None if it can."""
    prepare: Callable[[LinearShape, Path | None], None] = lambda _shape, _folder: None
    """See `Linear.prepare`."""
    device_refusal: Callable[[str | None], str | None] = lambda _: None
    """A function that says why it cannot run on a device of its platform, by the architecture, or None if it can."""


def _load_xla() -> Callable[..., Array]:
    from .xla import xla_linear

    return xla_linear


def _load_cpu() -> Callable[..., Array]:
    from .cpu import cpu_linear

    return cpu_linear


def _refuse_on_cpu(shape: LinearShape) -> str | None:
    from .cpu import cpu_refusal

    return cpu_refusal(shape)


def _prepare_cpu(shape: LinearShape, folder: Path | None) -> None:
    from .cpu import cpu_prepare

    cpu_prepare(shape, folder)


def _load_cpu_int8() -> Callable[..., Array]:
    from .cpu import cpu_linear

    return partial(cpu_linear, rounds=True)


def _prepare_cpu_int8(shape: LinearShape, folder: Path | None) -> None:
    from .cpu import cpu_prepare

    cpu_prepare(shape, folder, rounds=True)


def _load_tpu() -> Callable[..., Array]:
    from .tpu import tpu_linear

    return tpu_linear


def _refuse_on_tpu(shape: LinearShape) -> str | None:
    from .tpu.sizes import refusal

    return refusal(shape)


def _load_gpu() -> Callable[..., Array]:
    from .gpu import gpu_linear

    return gpu_linear


def _refuse_on_gpu(shape: LinearShape) -> str | None:
    from .gpu.sizes import refusal

    return refusal(shape)


# "cpu_int8" rounds x to 8 bits where `rounding_refusal` has nothing against it, and is "cpu" elsewhere.
IMPLEMENTATIONS: Mapping[str, Implementation] = {
    "xla": Implementation(_load_xla, None),
    "cpu": Implementation(_load_cpu, "cpu", _refuse_on_cpu, _prepare_cpu),
    "cpu_int8": Implementation(_load_cpu_int8, "cpu", _refuse_on_cpu, _prepare_cpu_int8),
    "tpu": Implementation(_load_tpu, "tpu", _refuse_on_tpu),
    "gpu": Implementation(_load_gpu, "gpu", _refuse_on_gpu, device_refusal=hopper_refusal),
}
