"""Attention over latents on a CPU: one kernel for decodes and prefills (`kernel.py`), called from JAX (`call.py`)."""

from .call import cpu_latent_attention, cpu_prepare, cpu_refusal, cpu_tiles

__all__ = ["cpu_latent_attention", "cpu_prepare", "cpu_refusal", "cpu_tiles"]
