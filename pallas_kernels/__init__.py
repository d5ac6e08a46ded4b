"""Kernels for CPU, GPU and TPU: attention, matmuls and recurrent states. Imports nothing of `jaxllm` or `models`."""
