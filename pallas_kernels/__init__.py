"""Attention and related kernels for TPU, GPU and CPU. Stands alone: imports jax and numpy only."""
