"""Paged attention on a CPU: one kernel for decodes and prefills (`kernel.py`, `spans.py`), called by `call.py`."""

from .call import cpu_paged_attention, cpu_prepare, cpu_refusal, cpu_tiles

__all__ = ["cpu_paged_attention", "cpu_prepare", "cpu_refusal", "cpu_tiles"]
