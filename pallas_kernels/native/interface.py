"""Check that XLA's foreign function interface has the structs that `handler.py` knows."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import jax

from .handler import METADATA, VERSION


class _Version(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    ]


class _Api(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("version", _Version)]


class _Metadata(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("version", _Version)]


class _Extension(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(_Metadata)),
    ]


class _Frame(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("extension", ctypes.POINTER(_Extension)), ("api", ctypes.POINTER(_Api))]


class _Probe:
    """A handler that XLA asks for its version, as it asks every registered handler."""

    def __init__(self) -> None:
        self.version: tuple[int, int] | None = None
        self.handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Frame))(self._answer)

    def _answer(self, frame: Any) -> None:
        frame = frame.contents
        if frame.api:
            version = frame.api.contents.version
            self.version = version.major, version.minor
        if frame.extension and frame.extension.contents.type == METADATA:
            stated = frame.extension.contents.metadata.contents.version
            stated.major, stated.minor = VERSION


@functools.cache
def refuse_interface() -> str | None:
    """Return why XLA cannot call the kernels, or None if it can."""
    jax.devices("cpu")  # until then XLA asks no handler for anything
    probe = _probe()
    try:
        capsule = jax.ffi.pycapsule(ctypes.cast(probe.handler, ctypes.c_void_p))
        jax.ffi.register_ffi_target("interface_version", capsule, platform="cpu", api_version=1)
    except jax.errors.JaxRuntimeError as error:
        return f"XLA refuses version {_text(VERSION)} of its foreign function interface: {error}"
    return refuse_version(probe.version)


def refuse_version(version: tuple[int, int] | None) -> str | None:
    """Return why a version's structs are not known, or None if they are.

    Structs only grow at their ends until the major version changes.
    """
    if version is not None and version[0] == VERSION[0] and version >= VERSION:
        return None
    known = "none" if version is None else _text(version)
    return f"the kernels know version {_text(VERSION)} of XLA's foreign function interface, and jaxlib has {known}"


@functools.cache
def _probe() -> _Probe:
    return _Probe()  # stays: XLA keeps the address


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
