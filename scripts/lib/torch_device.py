"""Describe and time torch's device, for scripts that measure other libraries where torch is installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from lib.machine import describe_sources, gpu_facts, versions


def describe_torch() -> dict[str, Any]:
    """Return torch's device and the versions that its figures depend on."""
    import torch

    has_gpu = torch.cuda.is_available()
    return describe_sources() | {
        "device": torch.cuda.get_device_name() if has_gpu else "cpu",
        "versions": versions("torch", "transformers"),
        "runtime": f"cuda {torch.version.cuda}, cudnn {torch.backends.cudnn.version()}",
        "gpu": gpu_facts() if has_gpu else None,
    }


def missing(*packages: str) -> str | None:
    """Return a sentence that names a package that is not installed, or None."""
    absent = [package for package in packages if find_spec(package) is None]
    return f"{' and '.join(absent)} not installed" if absent else None


def busy_seconds(run: Callable[[], Any], repeats: int) -> float:
    """Return the seconds that one call's kernels take on the device, or the CPU without one, by torch's profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    has_gpu = torch.cuda.is_available()
    wait = torch.cuda.synchronize if has_gpu else (lambda: None)
    for _ in range(2):
        run()
    wait()
    with profile(activities=[ProfilerActivity.CUDA if has_gpu else ProfilerActivity.CPU]) as seen:
        for _ in range(repeats):
            run()
        wait()
    events = seen.key_averages()
    microseconds = sum(each.self_device_time_total if has_gpu else each.self_cpu_time_total for each in events)
    return microseconds * 1e-6 / repeats
