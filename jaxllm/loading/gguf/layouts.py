"""How HF lays out the numbers of tensors that llama.cpp's converter stores in another order, or changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np

from jaxllm.loading.gguf.file import GGUFTensor

_PERMUTED_ARCHITECTURES = ("llama", "mistral3", "smollm3", "arcee", "granite", "granitemoe", "granitehybrid")
"""Architectures whose query and key rows the converter interleaves, as in the original Llama code."""
_OFFSET_NORM_ARCHITECTURES = ("gemma", "gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next")
"""Architectures whose norm weights the converter stores plus one."""
_REORDERED_ARCHITECTURES = ("qwen35", "qwen35moe")
"""Architectures whose recurrent value heads take turns with the key heads, instead of following them in groups."""


class Layout(NamedTuple):
    """What makes a tensor of the file HF's: first the order of its rows, then a function, then a shape."""

    order: np.ndarray | None = None
    """The file's row, along the first axis, for each row of HF's; None if the order is the same."""
    convert: Callable[[np.ndarray], np.ndarray] | None = None
    """A function of the numbers; None if they are the same. A tensor with one is not kept quantized."""
    shape: tuple[int, ...] | None = None
    """HF's shape; None if it is the file's."""


def find_layouts(tensors: Mapping[str, GGUFTensor], arch: str, config: Mapping[str, Any]) -> dict[str, Layout]:
    """Return the layouts of the tensors that are not stored as in HF. `config` is that of HF.

    Raises ValueError, with the tensor's name, for a tensor that does not fit the config.
    """
    layouts: dict[str, Layout] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"blk\.\d{1,9}\.(.+)", name)
        try:
            layout = _find_layout(match[1] if match else name, tensor.shape, arch, config)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if layout is not None:
            layouts[name] = layout
    return layouts


def _find_layout(suffix: str, shape: tuple[int, ...], arch: str, config: Mapping[str, Any]) -> Layout | None:
    stem = suffix.rpartition(".")[0]
    if arch in _PERMUTED_ARCHITECTURES and stem in ("attn_q", "attn_k"):
        key = "num_attention_heads" if stem == "attn_q" else "num_key_value_heads"
        return Layout(_joined_halves(shape[0], config[key]))
    if suffix == "ffn_gate_inp_shexp.weight" and len(shape) == 1:
        return Layout(shape=(1, *shape))
    if arch == "ernie4_5-moe" and suffix == "exp_probs_b.bias":
        return Layout(shape=(1, prod(shape)))
    if arch in _OFFSET_NORM_ARCHITECTURES and suffix.endswith("norm.weight") and suffix != "ssm_norm.weight":
        return Layout(convert=_less_one)
    if arch == "deepseek2" and suffix == "attn_k_b.weight" and len(shape) == 3:
        return Layout(convert=_swap_last, shape=(shape[0], shape[2], shape[1]))
    layout = _state_layout(suffix, shape)
    if arch in _REORDERED_ARCHITECTURES and config["linear_num_key_heads"] != config["linear_num_value_heads"]:
        return _reordered(stem or suffix, shape, config, layout)
    return layout


def _state_layout(suffix: str, shape: tuple[int, ...]) -> Layout | None:
    """Return the layout of a tensor of a layer with recurrent state."""
    match suffix:
        case "ssm_a":  # of Mamba, [channels, state]; otherwise one number for each head
            return Layout(convert=_log_of_negated, shape=shape if prod(shape[1:]) > 1 else shape[:1])
        case "ssm_d":
            return Layout(shape=(shape[0],))
        case "ssm_norm.weight" if len(shape) == 2:
            return Layout(shape=(shape[0] * shape[1],))
        case "ssm_conv1d.weight" | "shortconv.conv.weight" if len(shape) == 2:
            return Layout(shape=(shape[0], 1, shape[1]))
        case _:
            return None


def _reordered(stem: str, shape: tuple[int, ...], config: Mapping[str, Any], layout: Layout | None) -> Layout | None:
    """Return a layout with value heads in HF's order: those of the first key head, then those of the second."""
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    head_dim = config["linear_value_head_dim"]
    sizes = {"ssm_a": 1, "ssm_dt": 1, "ssm_alpha": 1, "ssm_beta": 1}
    sizes |= dict.fromkeys(("attn_qkv", "attn_gate", "ssm_conv1d", "ssm_out"), head_dim)
    if stem not in sizes:
        return layout
    size = sizes[stem]
    num_before = 2 * num_keys * config["linear_key_head_dim"] if stem in ("attn_qkv", "ssm_conv1d") else 0
    if shape[-1 if stem == "ssm_out" else 0] != num_before + num_values * size:
        raise ValueError(f"its shape {shape} does not fit {num_keys} key heads and {num_values} value heads")
    heads = num_before + np.arange(num_values * size).reshape(num_values // num_keys, num_keys, size)
    order = np.concatenate([np.arange(num_before), heads.swapaxes(0, 1).ravel()])
    if stem == "ssm_out":
        return Layout(convert=lambda values: values[..., order])
    return (layout or Layout())._replace(order=order)


def _joined_halves(num_rows: int, num_heads: int) -> np.ndarray:
    """Return the order that brings together the halves of each head, whose rows the converter interleaves."""
    if num_rows % (2 * num_heads):
        raise ValueError(f"{num_rows} rows are not {num_heads} heads of an even size")
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).ravel()


def _less_one(values: np.ndarray) -> np.ndarray:
    return values - values.dtype.type(1)


def _swap_last(values: np.ndarray) -> np.ndarray:
    return values.swapaxes(-1, -2)


def _log_of_negated(values: np.ndarray) -> np.ndarray:
    return np.log(-values)
