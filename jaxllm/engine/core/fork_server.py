"""The main function of a process that imports what cores need, and then forks one core for each order.

Orders come through a socket that is its standard input; the process ends when that closes. It opens no device and has
no threads of its own, so that a fork is whole.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import warnings
from pathlib import Path

from jaxllm.engine.core.core_process import follow_order

PID_BYTES = SIZE_BYTES = 8


def main() -> int:
    """Fork cores until the socket closes; return the exit status, in a fork that of its core."""
    with socket.socket(fileno=os.dup(0)) as orders:
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        _import_all()
        while order := _next_order(orders):
            if _fork(orders):
                break
    return follow_order(order) if order else 0


def _import_all() -> None:
    """Import what the starts of most cores import, so that forks share its memory, and digest the code as it is now:
    cores find compiled programs by that.
    """
    import tokenizers  # noqa: F401

    import jaxllm.engine.core.startup  # noqa: F401
    import pallas_kernels.layer_norm.kernel
    import pallas_kernels.linear.cpu.kernel
    import pallas_kernels.paged_attention.cpu
    import pallas_kernels.rms_norm.kernel  # noqa: F401
    from jaxllm.execution.programs.cache import code_digest
    from jaxllm.models.registry import supported_architectures
    from pallas_kernels.native.compiling import source_digest

    supported_architectures()  # imports the families
    code_digest()
    for name, module in sys.modules.items():
        if name.startswith("pallas_kernels.") and module.__file__ is not None:
            source_digest(Path(module.__file__).parent)
    gc.freeze()
    # JAX and Python warn of forks with threads. Only numpy's BLAS has some, and ends them before a fork.
    warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)


def _next_order(orders: socket.socket) -> bytes:
    """Return the next order, empty if there is none."""
    size = orders.recv(SIZE_BYTES, socket.MSG_WAITALL)
    return orders.recv(int.from_bytes(size), socket.MSG_WAITALL) if len(size) == SIZE_BYTES else b""


def _fork(orders: socket.socket) -> bool:
    """Fork a child of the process that has started this one, and tell it the id; return True in the child.

    A process whose parent has ended is adopted by the next ancestor that adopts orphans: here that one. The child goes
    on only once its new parent knows it.
    """
    told, tell = os.pipe()
    waits, go = os.pipe()
    middle = os.fork()
    if not middle:
        child = os.fork()
        if child:
            os.write(tell, child.to_bytes(PID_BYTES))
            os._exit(0)
        os.setpgid(0, 0)  # Ctrl-C in a terminal comes to the front end alone, which decides
        for fd in (told, tell, go):
            os.close(fd)
        if not os.read(waits, 1):
            os._exit(1)
        os.close(waits)
        return True
    for fd in (tell, waits):
        os.close(fd)
    os.waitpid(middle, 0)
    with open(told, "rb") as file:
        orders.sendall(file.read(PID_BYTES))
    os.write(go, b"1")
    os.close(go)
    return False


if __name__ == "__main__":
    sys.exit(main())
