"""Quantized matrices for the tests, stored as the formats say: random codes of all values, and scales near the limits.

Nothing here shares code with the readers. A matrix comes with the numbers that it stands for, worked out in float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

MODULE = "model.layers.0.mlp.up_proj"
NAME = f"{MODULE}.weight"
E4M3 = ml_dtypes.float8_e4m3fn
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True)
class Sample:
    """A config's quantization, a module's tensors by the ends of their names, and the matrix that they are."""

    quantization: Mapping[str, Any]
    tensors: Mapping[str, np.ndarray]
    numbers: np.ndarray
    is_kept: bool = True
    """Its rows are whole groups, so that it has a format."""

    @property
    def named(self) -> dict[str, np.ndarray]:
        """Return the tensors by their whole names."""
        return {MODULE + end: tensor for end, tensor in self.tensors.items()}


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return rows of codes as int32 words, through integers of any length."""
    rows = []
    for row in codes.tolist():
        stream = sum(code << (place * bits) for place, code in enumerate(row))
        length = -(-len(row) * bits // 32) * 4
        rows.append(np.frombuffer(stream.to_bytes(length, "little"), "<i4"))
    return np.stack(rows).astype(np.int32)


def scales_of(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return scales with the least, the largest, zero and negative ones among them."""
    scales = rng.standard_normal(shape).astype(dtype)
    info = ml_dtypes.finfo(np.dtype(dtype))
    extremes = np.array([0, float(info.smallest_subnormal), float(info.max) / 1024, -1.0]).astype(dtype)
    scales.reshape(-1)[: min(4, scales.size)] = extremes[: scales.size]
    return scales


def spread(entries: np.ndarray, num_inputs: int, group: int) -> np.ndarray:
    """Return an entry for each input, where the last group may be a partial one."""
    return np.repeat(entries.astype(np.float64), group, axis=-1)[..., :num_inputs]


def float32(numbers: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return numbers.astype(np.float32)


def awq(out: int = 24, inputs: int = 96, group: int = 32, dtype: Any = np.float16) -> Sample:
    rng = np.random.default_rng(0)
    num_groups = -(-inputs // group)
    codes, zeros = rng.integers(0, 16, (inputs, out)), rng.integers(0, 16, (num_groups, out))
    scales = scales_of(rng, (num_groups, out), dtype)
    turned = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {
        ".qweight": words(codes.reshape(inputs, -1, 8)[..., turned].reshape(inputs, out), 4),
        ".qzeros": words(zeros.reshape(num_groups, -1, 8)[..., turned].reshape(num_groups, out), 4),
        ".scales": scales,
    }
    numbers = (codes.T - spread(zeros.T, inputs, group)) * spread(scales.T, inputs, group)
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "GEMM", "zero_point": True}
    return Sample(config, tensors, float32(numbers), inputs % min(group, inputs) == 0)


def gptq(
    bits: int = 4,
    *,
    is_symmetric: bool = True,
    is_ordered: bool = False,
    is_v1: bool = True,
    out: int = 32,
    inputs: int = 96,
    group: int = 32,
) -> Sample:
    rng = np.random.default_rng(bits)
    size = inputs if group == -1 else group
    num_groups, most = -(-inputs // size), 2**bits - 1
    codes = rng.integers(0, most + 1, (out, inputs))
    low = 1 if is_v1 else 0
    zeros = rng.integers(low, most + 1, (out, num_groups))
    if is_symmetric:
        zeros[:] = (most + 1) // 2
    scales = scales_of(rng, (out, num_groups), np.float16)
    of_input = np.arange(inputs) // size
    if is_ordered:
        of_input = rng.permutation(of_input)
    tensors = {
        ".qweight": np.ascontiguousarray(words(codes, bits).T),
        ".qzeros": words((zeros - low).T, bits),
        ".scales": np.ascontiguousarray(scales.T),
        ".g_idx": of_input.astype(np.int32),
    }
    numbers = (codes - zeros[:, of_input]) * scales.astype(np.float64)[:, of_input]
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": is_symmetric,
        "desc_act": is_ordered,
        "checkpoint_format": "gptq" if is_v1 else "gptq_v2",
    }
    return Sample(config, tensors, float32(numbers), inputs % size == 0)


def compressed(kind: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return a quantization_config of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*gate$"],
    }


def packed(bits: int, *, is_symmetric: bool = True, is_ordered: bool = False, out: int = 21, group: int = 32) -> Sample:
    """Return "pack-quantized"; a group of 0 is a scale for each row."""
    rng = np.random.default_rng(bits)
    inputs = 96
    size = group or inputs
    codes, zeros = rng.integers(0, 2**bits, (out, inputs)), rng.integers(0, 2**bits, (out, inputs // size))
    if is_symmetric:
        zeros[:] = 2 ** (bits - 1)
    scales = scales_of(rng, zeros.shape, ml_dtypes.bfloat16)
    of_input = np.arange(inputs) // size
    if is_ordered:
        of_input = rng.permutation(of_input)
    tensors = {
        ".weight_packed": words(codes, bits),
        ".weight_scale": scales,
        ".weight_shape": np.array([out, inputs], np.int64),
    }
    if not is_symmetric:
        tensors[".weight_zero_point"] = np.ascontiguousarray(words(zeros.T, bits).T)
    if is_ordered:
        tensors[".weight_g_idx"] = of_input.astype(np.int32)
    weights = {"num_bits": bits, "type": "int", "symmetric": is_symmetric, "actorder": "group" if is_ordered else None}
    weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    numbers = (codes - zeros[:, of_input]) * scales.astype(np.float64)[:, of_input]
    return Sample(compressed("pack-quantized", weights), tensors, float32(numbers))


def whole_bytes(dtype: Any, strategy: str, *, is_symmetric: bool = True) -> Sample:
    """Return "int-quantized" or "float-quantized"."""
    rng = np.random.default_rng(3)
    out, inputs, group = 40, 96, {"group": 32, "block": 16}.get(strategy, 96)
    codes = e4m3_of(rng, (out, inputs)) if dtype == E4M3 else rng.integers(-128, 128, (out, inputs)).astype(np.int8)
    rows = {"tensor": 1, "block": -(-out // 32)}.get(strategy, out)
    scales = scales_of(rng, (rows, inputs // group), np.float32 if dtype == E4M3 else ml_dtypes.bfloat16)
    zeros = rng.integers(-128, 128, scales.shape).astype(np.int8)
    multipliers = np.repeat(scales, 32 if strategy == "block" else 1, axis=0)[:out].astype(np.float64)
    numbers = codes.astype(np.float64)
    if not is_symmetric:
        numbers = numbers - spread(zeros, inputs, group)
    is_int = dtype == np.int8
    weights = {"num_bits": 8, "type": "int" if is_int else "float", "strategy": strategy, "symmetric": is_symmetric}
    weights |= {"group_size": group if strategy == "group" else None, "block_structure": [32, 16]}
    tensors = {".weight": codes, ".weight_scale": scales[0] if strategy == "tensor" else scales}
    tensors |= {} if is_symmetric else {".weight_zero_point": zeros}
    config = compressed("int-quantized" if is_int else "float-quantized", weights)
    return Sample(config, tensors, float32(numbers * spread(multipliers, inputs, group)))


def e4m3_of(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return any numbers of E4M3 but those that are none."""
    codes = rng.integers(0, 256, shape, np.uint8)
    return np.where(codes & 127 == 127, 0, codes).astype(np.uint8).view(E4M3)


def fp8(out: int = 200, inputs: int = 384, *, has_blocks: bool = True, end: str = ".weight_scale_inv") -> Sample:
    rng = np.random.default_rng(4)
    codes = e4m3_of(rng, (out, inputs))
    sizes = (-(-out // 128), -(-inputs // 128)) if has_blocks else (1, 1)
    scales = scales_of(rng, sizes, np.float32)
    multipliers = np.repeat(np.repeat(scales, 128, 0)[:out], 128, 1)[:, :inputs] if has_blocks else scales
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    config |= {"weight_block_size": [128, 128] if has_blocks else None}
    tensors = {".weight": codes, end: scales if has_blocks else scales.reshape(())}
    numbers = float32(codes.astype(np.float64) * multipliers.astype(np.float64))
    return Sample(config, tensors, numbers, inputs % 128 == 0 or inputs < 128)


def nvfp4(*, is_modelopt: bool) -> Sample:
    rng = np.random.default_rng(5)
    out, inputs = 6, 64
    codes = rng.integers(0, 16, (out, inputs))
    scales, factor = e4m3_of(rng, (out, inputs // 16)), np.float32(0.0123)
    stored = np.float32(1) / factor
    in_bytes = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    used = factor if is_modelopt else np.float32(1) / stored
    numbers = E2M1[codes] * spread(scales.astype(np.float32) * used, inputs, 16)
    if is_modelopt:
        config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
        tensors = {".weight": in_bytes, ".weight_scale": scales, ".weight_scale_2": np.array(factor)}
        return Sample(config, tensors, float32(numbers))
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    tensors = {".weight_packed": in_bytes, ".weight_scale": scales, ".weight_global_scale": np.array([stored])}
    return Sample(compressed("nvfp4-pack-quantized", weights), tensors, float32(numbers))


def mx(bits: int) -> Sample:
    """Return MXFP4 or MXFP8 of compressed-tensors: any power of two scales 32 numbers."""
    rng = np.random.default_rng(6)
    out, inputs = 6, 64
    bytes_ = rng.integers(0, 255, (out, inputs // 32), np.uint8)
    bytes_[0, 0] = 0
    multipliers = spread(2.0 ** (bytes_.astype(np.float64) - 127), inputs, 32)
    if bits == 4:
        codes = rng.integers(0, 16, (out, inputs))
        tensors = {".weight_packed": (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8), ".weight_scale": bytes_}
        weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
        return Sample(compressed("mxfp4-pack-quantized", weights), tensors, float32(E2M1[codes] * multipliers))
    values = e4m3_of(rng, (out, inputs))
    weights = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}
    tensors = {".weight": values, ".weight_scale": bytes_}
    return Sample(compressed("mxfp8-quantized", weights), tensors, float32(values.astype(np.float64) * multipliers))


def nf4(*, is_nested: bool, out: int = 5, inputs: int = 192) -> Sample:
    """Return NF4; rows of other lengths than blocks of 64 can only be widened."""
    rng = np.random.default_rng(7)
    table = np.array(NF4, np.float32)
    codes = rng.integers(0, 16, out * inputs + out * inputs % 2)
    num_blocks = -(-out * inputs // 64)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [out, inputs]}
    tensors = {
        ".weight": (codes[0::2] << 4 | codes[1::2]).astype(np.uint8)[:, None],
        ".weight.absmax": scales_of(rng, (num_blocks,), np.float32),
        ".weight.quant_map": table,
    }
    scales = tensors[".weight.absmax"]
    if is_nested:
        inner = rng.standard_normal(256).astype(np.float32)
        places, outer = rng.integers(0, 256, num_blocks, np.uint8), np.array([0.37], np.float32)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0421}
        tensors |= {".weight.absmax": places, ".weight.nested_absmax": outer, ".weight.nested_quant_map": inner}
        scales = inner[places] * outer + np.float32(0.0421)
    text = json.dumps(state).encode()
    tensors[".weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(text, np.uint8)
    multipliers = np.repeat(scales.astype(np.float64), 64)[: out * inputs]
    numbers = (table[codes[: out * inputs]].astype(np.float64) * multipliers).reshape(out, inputs)
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return Sample(config, tensors, float32(numbers), inputs % 64 == 0)


NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def int8_rows() -> Sample:
    """Return LLM.int8."""
    rng = np.random.default_rng(8)
    codes, scales = rng.integers(-128, 128, (10, 48)).astype(np.int8), scales_of(rng, (10,), np.float32)
    multipliers = (scales * np.float32(1 / 127)).astype(np.float64)
    tensors = {".weight": codes, ".SCB": scales, ".weight_format": np.array(0, np.uint8)}
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]}
    return Sample(config, tensors, float32(codes * multipliers[:, None]))


def modelopt_fp8(algorithm: str) -> Sample:
    sample = fp8(has_blocks=algorithm == "FP8_PB_WO", end=".weight_scale")
    tensors = dict(sample.tensors)
    if algorithm == "FP8_PB_WO":
        rows, columns = tensors[".weight_scale"].shape
        tensors[".weight_scale"] = tensors[".weight_scale"].reshape(rows, 1, columns, 1)
    return Sample({"quant_method": "modelopt", "quant_algo": algorithm}, tensors, sample.numbers)


SAMPLES: Mapping[str, Callable[[], Sample]] = {
    "awq": awq,
    "awq bfloat16": lambda: awq(dtype=ml_dtypes.bfloat16),
    "awq, one group": lambda: awq(group=128, inputs=96),
    "awq, a partial group": lambda: awq(inputs=80),
    **{
        f"gptq {bits}{' asym' * (not even)}{' ordered' * ordered}{' v2' * (not v1)}": (
            lambda bits=bits, even=even, ordered=ordered, v1=v1: gptq(
                bits, is_symmetric=even, is_ordered=ordered, is_v1=v1
            )
        )
        for bits in (2, 3, 4, 8)
        for even, ordered, v1 in ((True, False, True), (False, False, True), (False, True, False))
    },
    "gptq, whole rows": lambda: gptq(group=-1),
    "gptq, a partial group": lambda: gptq(inputs=80),
    "gptq ordered, a partial group": lambda: gptq(3, inputs=32 * 3, group=40, is_symmetric=False, is_ordered=True),
    **{f"packed {bits}": (lambda bits=bits: packed(bits)) for bits in (2, 3, 4, 5, 6, 8)},
    **{f"packed {bits} asym": (lambda bits=bits: packed(bits, is_symmetric=False)) for bits in (3, 4, 8)},
    **{f"packed {bits} by rows": (lambda bits=bits: packed(bits, group=0)) for bits in (4, 8)},
    "packed 8 asym by rows": lambda: packed(8, is_symmetric=False, group=0),
    "packed ordered": lambda: packed(4, is_symmetric=False, is_ordered=True),
    **{f"int8 {kind}": (lambda kind=kind: whole_bytes(np.int8, kind)) for kind in ("tensor", "channel", "group")},
    "int8 channel asym": lambda: whole_bytes(np.int8, "channel", is_symmetric=False),
    "int8 group asym": lambda: whole_bytes(np.int8, "group", is_symmetric=False),
    **{f"e4m3 {kind}": (lambda kind=kind: whole_bytes(E4M3, kind)) for kind in ("tensor", "channel", "group", "block")},
    "fp8 blocks": fp8,
    "fp8 blocks, few inputs": lambda: fp8(inputs=64),
    "fp8 blocks, a partial one": lambda: fp8(inputs=200),
    "fp8": lambda: fp8(has_blocks=False, end=".weight_scale"),
    "modelopt fp8": lambda: modelopt_fp8("FP8"),
    "modelopt fp8 blocks": lambda: modelopt_fp8("FP8_PB_WO"),
    "modelopt nvfp4": lambda: nvfp4(is_modelopt=True),
    "nvfp4": lambda: nvfp4(is_modelopt=False),
    "mxfp4": lambda: mx(4),
    "mxfp8": lambda: mx(8),
    "nf4": lambda: nf4(is_nested=False),
    "nf4 nested": lambda: nf4(is_nested=True),
    "nf4, rows of 40": lambda: nf4(is_nested=True, inputs=40),
    "nf4, odd": lambda: nf4(is_nested=False, out=3, inputs=21),
    "LLM.int8": int8_rows,
}
"""A matrix of each kind."""
