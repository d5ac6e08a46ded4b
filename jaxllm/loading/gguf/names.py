"""Map GGUF tensor names to HF names. A file stores all experts of a layer in one tensor; HF may store them apart."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from jaxllm.loading.gguf.file import GGUFTensor
from jaxllm.loading.gguf.name_tables import EXPERT_NAMES, NAMES, Joined, Names
from jaxllm.loading.gguf.settings.rope import LONGROPE_NAMES, ROPE_FACTORS_NAME

_IGNORED_NAMES = (ROPE_FACTORS_NAME, *LONGROPE_NAMES.values())
ATTENTION, MLP = ("attn_q", "attn_k", "attn_v", "attn_output"), ("ffn_gate", "ffn_up", "ffn_down")
"""The matrices of a layer that can have a bias."""
_ALWAYS_BIASED = ("qwen2", "qwen2vl")
_NO_OUTPUT_BIAS = (*_ALWAYS_BIASED, "qwen2moe", "glm4moe", "seed_oss", "stablelm", "glm4")
"""Architectures for which HF has query, key and value biases (always, or if the file has any) but no output bias."""
_MAX_EXPERTS = 4096
"""Far above any model: a larger number of experts in a file is corrupt, and would cost memory for their names."""


class Source(NamedTuple):
    """Where one HF tensor is stored in the file."""

    names: tuple[str, ...]
    """One tensor, or two whose rows together form the HF tensor."""
    expert: int | None = None
    """The index of the expert in a tensor of all experts."""
    transposed: bool = False
    """Whether HF has a matrix's inputs before its outputs."""
    alternates: bool = False
    """Whether the rows of the two tensors alternate, instead of following one another."""
    folded: bool = False
    """Whether the tensors are joined by head, and HF's rows are the rows of all heads."""

    @property
    def joined_axis(self) -> int:
        """Return the axis along which several tensors are joined: that of the outputs."""
        return -1 if self.names[0].endswith(".bias") else -2

    @property
    def has_experts(self) -> bool:
        """Return whether the first axis in the file counts experts, and each has more than one number."""
        return "_exps." in self.names[0] and not self.names[0].endswith(".scale")


def find_sources(tensors: Mapping[str, GGUFTensor], arch: str, ignored_layers: range) -> dict[str, Source]:
    """Return the source of each HF tensor. A tensor without a counterpart keeps its name, and is reported later."""
    names = NAMES.get(arch, Names())
    sources: dict[str, Source] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"blk\.(\d{1,9})\.(.+)", name)
        if name in _IGNORED_NAMES or (ignored_layers and _layer_of(name) in ignored_layers):
            continue
        if match is None:
            sources[names.top.get(name, name)] = Source((name,))
            continue
        prefix = f"{names.layers}{int(match[1])}."
        for ours, source in _layer_sources(match[2], name, tensor, tensors, arch):
            sources[name if ours is None else prefix + ours] = source
    return sources


def has_biases(tensors: Collection[str], stems: Collection[str]) -> bool:
    """Return whether any layer of a file has a bias of one of the matrices `stems`."""
    return any(name.endswith(".bias") and name.split(".")[-2] in stems for name in tensors)


def find_zeros(tensors: Mapping[str, GGUFTensor], arch: str, ignored_layers: range) -> dict[str, int]:
    """Return the HF biases that a file omits although it has others of their kind, with their lengths.

    Omitted biases are zeros.
    """
    names, zeros = NAMES.get(arch, Names()), dict[str, int]()
    kinds = [stems for stems in (ATTENTION, MLP) if has_biases(tensors, stems)]
    wanted = {stem for stems in kinds for stem in stems} | set(ATTENTION if arch in _ALWAYS_BIASED else ())
    wanted -= {"attn_output"} if arch in _NO_OUTPUT_BIAS else set()
    for name, tensor in tensors.items():
        match = re.fullmatch(r"blk\.(\d{1,9})\.([a-z_]+)\.weight", name)
        if match is None or match[2] not in wanted & names.layer.keys() or int(match[1]) in ignored_layers:
            continue
        if f"blk.{match[1]}.{match[2]}.bias" not in tensors:
            zeros[f"{names.layers}{int(match[1])}.{names.layer[match[2]]}.bias"] = tensor.shape[0]
    return zeros


def _layer_of(name: str) -> int:
    """Return the layer of a tensor, or -1."""
    match = re.match(r"blk\.(\d{1,9})\.", name)
    return int(match[1]) if match else -1


def _layer_sources(
    suffix: str, name: str, tensor: GGUFTensor, tensors: Mapping[str, GGUFTensor], arch: str
) -> Iterator[tuple[str | None, Source]]:
    """Yield HF's names for a tensor of the file, within its layer, with their sources; None if HF has none."""
    names = NAMES.get(arch, Names())
    stem, _, kind = suffix.rpartition(".")
    joined = next((each for each in names.joined if suffix in each.parts), None)
    if joined is not None:
        yield from _joined_sources(joined, name, suffix, tensors)
    elif suffix in names.bare:
        yield names.bare[suffix], Source((name,))
    elif kind not in ("weight", "bias", "scale"):
        yield None, Source((name,))
    elif names.fused_experts is not None and stem in EXPERT_NAMES:
        for ours, source in _fused_sources(stem, kind, name, tensor, tensors):
            yield ours and f"{names.fused_experts}.{ours}", source._replace(alternates=names.alternates)
    elif stem in names.experts and kind == "weight" and len(tensor.shape) == 3 and 0 < tensor.shape[0] <= _MAX_EXPERTS:
        for expert in range(tensor.shape[0]):
            yield names.experts[stem].format(e=expert), Source((name,), expert)
    elif stem in names.layer and kind != "scale":
        transposed = stem in names.transposed and len(tensor.shape) == 2
        yield f"{names.layer[stem]}.{kind}", Source((name,), transposed=transposed)
    else:
        yield None, Source((name,))


def _joined_sources(
    joined: Joined, name: str, suffix: str, tensors: Mapping[str, GGUFTensor]
) -> Iterator[tuple[str | None, Source]]:
    """Yield the name of a tensor of several, with their source, for the first of them."""
    stored = tuple(name.removesuffix(suffix) + part for part in joined.parts)
    shapes = [tensors[part].shape for part in stored if part in tensors]
    if joined.folded:
        # Those of a head's keys have inputs before outputs.
        fits = [len(shape) for shape in shapes] == [3, 3] and shapes[0][:2] == (shapes[1][0], shapes[1][2])
    else:
        fits = len(shapes) == 2 and shapes[0] == shapes[1] and len(shapes[0]) > 1
    if not fits:
        yield None, Source((name,))
    elif suffix == joined.parts[0]:
        yield joined.name, Source(stored, folded=joined.folded)


def _fused_sources(
    stem: str, kind: str, name: str, tensor: GGUFTensor, tensors: Mapping[str, GGUFTensor]
) -> Iterator[tuple[str | None, Source]]:
    """Yield the names of HF's tensors of all experts, with their sources; gates and ups have two."""
    is_matrix = kind == "weight"
    suffix = "" if is_matrix else "_bias"
    gate, up = name.replace(stem, "ffn_gate_exps"), name.replace(stem, "ffn_up_exps")
    fits = len(tensor.shape) == (3 if is_matrix else 2)
    if stem == "ffn_down_exps" and fits:
        yield f"down_proj{suffix}", Source((name,), transposed=is_matrix)
    elif fits and gate in tensors and up in tensors and tensors[gate].shape == tensors[up].shape:
        if stem == "ffn_gate_exps":
            yield f"gate_up_proj{suffix}", Source((gate, up), transposed=is_matrix)
    else:
        yield None, Source((name,))
