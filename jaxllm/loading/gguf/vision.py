"""The vision tower and projector of a GGUF model, which are in a file of their own beside it, named mmproj.

Its tensors are presented under HF's names and with HF's values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.loading.checkpoint import TensorInfo
from jaxllm.loading.gguf.dequant import FLOATS, decode
from jaxllm.loading.gguf.file import GGUFFile
from jaxllm.loading.gguf.vision_config import (
    PROJECTORS,
    deepstack_layers,
    has_swapped_mlps,
    image_processor,
    projector_type,
    video_processor,
    wrapper_config,
)

VISION_ARCHITECTURES = frozenset(arch for projector in PROJECTORS.values() for arch in projector.wrappers)
"""The GGUF architectures of text models that may have a vision tower."""
_SIGLIP, _PROJECTOR = "vision_tower.vision_model.", "multi_modal_projector."
_OFFSET_NORM = "mm.soft_emb_norm.weight"
"""The norm that the converter stores plus one."""

_GEMMA3 = {
    "v.patch_embd": f"{_SIGLIP}embeddings.patch_embedding",
    "v.position_embd": f"{_SIGLIP}embeddings.position_embedding",
    "v.post_ln": f"{_SIGLIP}post_layernorm",
    "v.blk.{l}.ln1": f"{_SIGLIP}encoder.layers.{{l}}.layer_norm1",
    "v.blk.{l}.ln2": f"{_SIGLIP}encoder.layers.{{l}}.layer_norm2",
    "v.blk.{l}.attn_q": f"{_SIGLIP}encoder.layers.{{l}}.self_attn.q_proj",
    "v.blk.{l}.attn_k": f"{_SIGLIP}encoder.layers.{{l}}.self_attn.k_proj",
    "v.blk.{l}.attn_v": f"{_SIGLIP}encoder.layers.{{l}}.self_attn.v_proj",
    "v.blk.{l}.attn_out": f"{_SIGLIP}encoder.layers.{{l}}.self_attn.out_proj",
    "v.blk.{l}.ffn_up": f"{_SIGLIP}encoder.layers.{{l}}.mlp.fc1",
    "v.blk.{l}.ffn_down": f"{_SIGLIP}encoder.layers.{{l}}.mlp.fc2",
    "mm.soft_emb_norm": f"{_PROJECTOR}mm_soft_emb_norm",
}
_QWEN = {
    "v.patch_embd": "visual.patch_embed.proj",
    "v.blk.{l}.ln1": "visual.blocks.{l}.norm1",
    "v.blk.{l}.ln2": "visual.blocks.{l}.norm2",
    **{f"v.blk.{{l}}.attn_{part}": "visual.blocks.{l}.attn.qkv" for part in ("q", "k", "v", "qkv")},
    "v.blk.{l}.attn_out": "visual.blocks.{l}.attn.proj",
}
_QWEN2_MERGER = {
    "v.post_ln": "visual.merger.ln_q",
    "mm.0": "visual.merger.mlp.0",
    "mm.2": "visual.merger.mlp.2",
}
_STEMS: Mapping[str, Mapping[str, str]] = {
    "gemma3": _GEMMA3,
    "qwen2vl_merger": {
        **_QWEN,
        **_QWEN2_MERGER,
        "v.blk.{l}.ffn_up": "visual.blocks.{l}.mlp.fc1",
        "v.blk.{l}.ffn_down": "visual.blocks.{l}.mlp.fc2",
    },
    "qwen2.5vl_merger": {
        **_QWEN,
        **_QWEN2_MERGER,
        **{f"v.blk.{{l}}.ffn_{part}": f"visual.blocks.{{l}}.mlp.{part}_proj" for part in ("gate", "up", "down")},
    },
    "qwen3vl_merger": {
        **_QWEN,
        "v.position_embd": "visual.pos_embed",
        "v.blk.{l}.ffn_up": "visual.blocks.{l}.mlp.linear_fc1",
        "v.blk.{l}.ffn_down": "visual.blocks.{l}.mlp.linear_fc2",
        "v.post_ln": "visual.merger.norm",
        "mm.0": "visual.merger.linear_fc1",
        "mm.2": "visual.merger.linear_fc2",
        "v.deepstack.{l}.norm": "visual.deepstack_merger_list.{l}.norm",
        "v.deepstack.{l}.fc1": "visual.deepstack_merger_list.{l}.linear_fc1",
        "v.deepstack.{l}.fc2": "visual.deepstack_merger_list.{l}.linear_fc2",
    },
}
"""HF's names for the file's, without their endings, by the type of projector."""


class VisionFile:
    """A file with a vision tower, which may end too early before `attach`.

    Raises ValueError if it is malformed, OSError if it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFFile(path, may_be_cut=True)
        self._kind = projector_type(self._file)
        self._sources: dict[str, tuple[str, ...]] = {}
        self.tensors: dict[str, TensorInfo] = {}
        """The tensors by HF's names, after `attach`."""

    @property
    def num_bytes(self) -> int:
        """The size of the stored tensors in bytes."""
        return sum(tensor.num_bytes for tensor in self._file.tensors.values())

    def fits(self, arch: str, hidden_size: int) -> bool:
        """Return whether the tower belongs to text models of this GGUF architecture and width."""
        if self._kind not in PROJECTORS or arch not in PROJECTORS[self._kind].wrappers:
            return False
        name, axis = ("mm.input_projection.weight", 1) if self._kind == "gemma3" else ("mm.2.weight", 0)
        last = self._file.tensors.get(name)
        return last is not None and len(last.shape) == 2 and last.shape[axis] == hidden_size

    def attach(self, text: Mapping[str, Any], file: GGUFFile) -> dict[str, Any]:
        """Return the config of the whole model; `text` is that of the text part, in `file`, which the tower fits.

        Raises ValueError for a key that is missing or malformed, for tensors that do not fit together, and for a file
        that ends too early.
        """
        self._file.check_whole()
        config = wrapper_config(text, file, self._file)
        self._sources = _find_sources(self._file)
        self.tensors = {name: self._info(stored) for name, stored in self._sources.items()}
        return config

    def processors(self, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the settings of HF's image and video processors for a model with this config.json."""
        image = image_processor(config, self._file)
        return image, video_processor(image, self._file)

    def read(self, name: str) -> np.ndarray:
        """Return one tensor, dequantized, by HF's name."""
        parts = [self._values(stored) for stored in self._sources[name]]
        if len(parts) == 1:
            return parts[0]
        parts = [part.astype(self.tensors[name].dtype, copy=False) for part in parts]
        return np.stack(parts, axis=2) if _is_patch(self._sources[name]) else np.concatenate(parts)

    def release(self, name: str) -> None:
        """Mark a tensor as consumed; its pages may be dropped."""
        for stored in self._sources[name]:
            self._file.release(stored)

    def _values(self, stored: str) -> np.ndarray:
        tensor = self._file.tensors[stored]
        values = decode(tensor.type, self._file.data(stored)).reshape(tensor.shape)
        return values - values.dtype.type(1) if stored == _OFFSET_NORM else values

    def _info(self, stored: tuple[str, ...]) -> TensorInfo:
        tensors = [self._file.tensors[name] for name in stored]
        dtypes = {FLOATS.get(tensor.type.name, np.dtype(np.float32)) for tensor in tensors}
        dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
        shape = list(tensors[0].shape)
        if any(tensor.shape[1:] != tensors[0].shape[1:] for tensor in tensors):
            raise ValueError(f"the shapes of {', '.join(stored)} do not fit together")
        if len(tensors) > 1 and _is_patch(stored):
            shape.insert(2, len(tensors))
        elif len(tensors) > 1:
            shape[0] = sum(tensor.shape[0] for tensor in tensors)
        return TensorInfo(tuple(shape), dtype.name, sum(tensor.num_bytes for tensor in tensors))


def _is_patch(stored: Iterable[str]) -> bool:
    return any(name.startswith("v.patch_embd.") for name in stored)


def _find_sources(file: GGUFFile) -> dict[str, tuple[str, ...]]:
    """Return the file's tensors for each of HF's names. A tensor without a counterpart keeps its name."""
    stems = dict(_STEMS[projector_type(file)])
    if has_swapped_mlps(file):
        up, down = "v.blk.{l}.ffn_up", "v.blk.{l}.ffn_down"
        stems |= {up: stems[down], down: stems[up]}
    deep = {layer: number for number, layer in enumerate(deepstack_layers(file))}
    sources: dict[str, tuple[str, ...]] = {}
    for name in sorted(file.tensors, key=_part_order):
        ours = _hf_name(name, stems, deep)
        sources[ours] = (*sources.get(ours, ()), name)
    return sources


def _part_order(name: str) -> int:
    """Return the position of a tensor among those that HF has in one: queries, keys and values, or two frames."""
    return 1 if ".attn_k." in name else 2 if ".attn_v." in name or name.endswith(".1") else 0


def _hf_name(name: str, stems: Mapping[str, str], deep: Mapping[int, int]) -> str:
    """Return HF's name of a tensor; its own if HF has none. `deep` numbers the layers with outputs of their own."""
    if name == "mm.input_projection.weight":
        return f"{_PROJECTOR}mm_input_projection_weight"
    match = re.fullmatch(r"(.+)\.(weight|bias)(?:\.1)?", name)
    if match is None:
        return name
    stem, layer = match[1], re.match(r"v\.(?:blk|deepstack)\.(\d{1,9})\.", name)
    if layer is None:
        return f"{stems[stem]}.{match[2]}" if stem in stems else name
    number = int(layer[1])
    general = stem.replace(f".{layer[1]}.", ".{l}.", 1)
    if name.startswith("v.deepstack."):
        number = deep.get(number, -1)
    return f"{stems[general].format(l=number)}.{match[2]}" if general in stems and number >= 0 else name
