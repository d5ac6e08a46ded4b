"""The indexer on a CPU: a kernel (`kernel.py`) of scores (`scores.py`) and of their choice (`choice.py`)."""

from .call import cpu_indexer, cpu_prepare, cpu_refusal, cpu_tiles

__all__ = ["cpu_indexer", "cpu_prepare", "cpu_refusal", "cpu_tiles"]
