"""What tests in interpreters, which multiply with XLA:CPU, may expect of its rounding."""

from __future__ import annotations

from pallas_kernels.native.processor import host


def has_exact_matmuls() -> bool:
    """Return whether a row of XLA:CPU's matmuls has the same bits beside any rows, and small errors in float32.

    So it was on processors with AVX-512, but a Zen 5 rounds as those without.
    """
    return host().has_avx512 and host().cpu != "znver5"
