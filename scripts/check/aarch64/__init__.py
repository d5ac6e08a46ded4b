"""The kernels of a CPU, compiled for AArch64 and run under emulation."""
