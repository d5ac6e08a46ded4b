"""Translate GGUF's RoPE scaling keys and tensors into HF's `rope_scaling`."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxllm.loading.gguf.dequant import dequantize
from jaxllm.loading.gguf.file import GGUFFile

ROPE_FACTORS_NAME = "rope_freqs.weight"
LONGROPE_NAMES = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
"""The tensors that hold HF's lists of divisors."""


def rope_scaling(file: GGUFFile, arch: str) -> dict[str, Any] | None:
    """Return HF's rope_scaling, or None for plain RoPE. Raises ValueError for an unsupported kind."""
    if ROPE_FACTORS_NAME in file.tensors:
        return _from_factors(file, arch)
    prefix = f"{arch}.rope.scaling."
    if all(name in file.tensors for name in LONGROPE_NAMES.values()):
        factors = {ours: _values(file, name).tolist() for ours, name in LONGROPE_NAMES.items()}
        attention_factor = file.value(f"{prefix}attn_factor", (int, float))
        return {"rope_type": "longrope", "attention_factor": attention_factor, **factors}
    kind = file.value(f"{prefix}type", str, "none")
    factor = file.value(f"{prefix}factor", (int, float))
    if factor is None and kind == "none":
        # Older files, from before scaling had a type.
        factor = file.value(f"{arch}.rope.scale_linear", (int, float))
        kind = "none" if factor is None else "linear"
    if kind == "none" or factor in (None, 0, 1):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    if kind != "yarn":
        raise ValueError(f"RoPE scaling of type {kind!r} is not supported; linear, yarn and Llama 3's are")
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": float(factor)}
    original = file.value(f"{prefix}original_context_length", int)
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    for theirs, ours in {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}.items():
        value = file.value(f"{prefix}{theirs}", (int, float))
        if value is not None:
            scaling[ours] = float(value)
    attention_factor = file.value(f"{prefix}attn_factor", (int, float))
    if attention_factor is not None and arch == "olmo2":
        scaling["attention_factor"] = float(attention_factor)
    return scaling


def _values(file: GGUFFile, name: str) -> np.ndarray:
    return dequantize(file.tensors[name].type, file.data(name)).reshape(-1).astype(np.float64)


def rope_factors(file: GGUFFile) -> np.ndarray:
    """Return the file's frequency divisors, one per pair of dimensions."""
    return _values(file, ROPE_FACTORS_NAME)


def _from_factors(file: GGUFFile, arch: str) -> dict[str, Any]:
    """Recover Llama 3's scaling from the tensor of frequency divisors, one per pair of dimensions."""
    factors = rope_factors(file)
    theta = float(file.value(f"{arch}.rope.freq_base", (int, float), 10000.0))
    if not np.isfinite(factors).all() or (factors < 1).any() or theta <= 1:
        raise ValueError(f"{ROPE_FACTORS_NAME} holds divisors that are not finite numbers from 1")
    wavelengths = 2 * np.pi * theta ** (np.arange(len(factors)) / len(factors))
    factor = float(factors.max())
    usual = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for candidate in (usual, usual | {"high_freq_factor": 1.0}, _fit(factors, wavelengths, factor)):
        if candidate and np.allclose(_llama3_factors(wavelengths, candidate), factors, rtol=1e-4):
            return candidate
    raise ValueError(f"{ROPE_FACTORS_NAME} does not follow Llama 3's RoPE scaling, so it is not supported")


def _llama3_factors(wavelengths: np.ndarray, scaling: dict[str, Any]) -> np.ndarray:
    """Return the divisor of each frequency: 1 for short waves, `factor` for long ones, smooth in between."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    trained = scaling["original_max_position_embeddings"]
    smooth = (trained / wavelengths - low) / (high - low) if high > low else wavelengths <= trained / low
    smooth = np.clip(smooth, 0, 1)
    return 1 / ((1 - smooth) / scaling["factor"] + smooth)


def _fit(factors: np.ndarray, wavelengths: np.ndarray, factor: float) -> dict[str, Any] | None:
    """Fit the smooth part, a line over 1/wavelength. The context length is free: any gives the same line."""
    middle = (factors > 1 + 1e-6) & (factors < factor * (1 - 1e-6))
    if middle.sum() < 2:
        return None
    smooth = (1 / factors[middle] - 1 / factor) / (1 - 1 / factor)
    slope, offset = np.polyfit(1 / wavelengths[middle], smooth, 1)
    width = 8192 / slope
    low = -offset * width
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": float(low),
        "high_freq_factor": float(low + width),
        "original_max_position_embeddings": 8192,
    }
