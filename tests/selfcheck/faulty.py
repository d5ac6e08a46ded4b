"""The child process of a self check, with planted faults: PLANTED names what each kernel of the CPU does wrong."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.selfcheck.worker import main


def _changed(result: Any, at: Callable[[Any], Any]) -> Any:
    return (at(result[0]), *result[1:]) if isinstance(result, tuple) else at(result)


def wrong(result: Any) -> Any:
    """Change one number."""
    return _changed(result, lambda out: out.reshape(-1).at[3].add(1).reshape(out.shape))


def unfinished(result: Any) -> Any:
    """Leave out what is written to the pool."""
    return result[0], jax.tree.map(jnp.zeros_like, result[1])


def endless(result: Any) -> Any:
    """Never end."""
    return _changed(result, lambda out: out + jax.lax.while_loop(lambda x: x >= 0, lambda x: x * 0.5, 1.0))


def abort(result: Any) -> Any:
    """End the process as an assertion of a driver would."""
    return _changed(result, lambda out: jax.pure_callback(lambda _: os.abort(), out, out))


def slow_to_compile(result: Any) -> Any:
    """Take a minute to be traced."""
    time.sleep(60)
    return result


def broken(_: Any) -> Any:
    """Fail to compile."""
    raise NotImplementedError("there is no such instruction")


def planted(op: str, fault: str) -> tuple[Any, str, Callable[..., Any]]:
    """Return a module of kernels, the name of a kernel in it, and the kernel with a fault."""
    module = import_module(f"pallas_kernels.{op}.cpu")
    name = f"cpu_{op}"
    kernel, change = getattr(module, name), globals()[fault]
    return module, name, lambda *arguments, **settings: change(kernel(*arguments, **settings))


if __name__ == "__main__":
    for op, fault in json.loads(os.environ["PLANTED"]).items():
        setattr(*planted(op, fault))
    sys.exit(main())
