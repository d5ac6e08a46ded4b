"""Translate the metadata of a file with a vision tower into HF's config.json and preprocessor_config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxllm.loading.gguf.file import GGUFFile
from jaxllm.loading.gguf.settings.numbers import Numbers

_FRAMES = 2
"""The frames of a video that one patch of Qwen's towers has; an image counts as both."""
_WIDTH = "embedding_length"
_MAX_LAYERS = 4096
"""Far above any tower: a file with more is corrupt, and would cost memory for lists by layer."""


class Projector(NamedTuple):
    """A type of projector: the models that it belongs to, and how their settings are read."""

    wrappers: Mapping[str, tuple[str, str]]
    """HF's class and model type of the whole model for each GGUF architecture of its text part."""
    read: Callable[[GGUFFile, Numbers], dict[str, Any]]
    """A function that returns the keys of the wrapper's config.json that are about vision."""
    make_processor: Callable[[Mapping[str, Any], Numbers], dict[str, Any]]
    """A function that returns the settings of the image processor besides mean and deviation."""
    video_sizes: Mapping[str, int] | None = None
    """The bounds on a video's pixels, where they differ from an image's."""


def wrapper_config(text: Mapping[str, Any], file: GGUFFile, tower: GGUFFile) -> dict[str, Any]:
    """Return the config of a whole model; `text` is the config of its text part, which is in `file`.

    Raises ValueError for a key that is missing or malformed.
    """
    arch, projector = file.value("general.architecture", str, ""), projector_of(tower)
    class_name, model_type = projector.wrappers[arch]
    shared = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    text_config = {key: value for key, value in text.items() if key != "architectures"}
    text_config |= {"model_type": f"{model_type}_text", **_mrope(text, file, arch)}
    return {
        "architectures": [class_name],
        "model_type": model_type,
        **{key: text[key] for key in shared},
        **_image_token(file, arch),
        "text_config": text_config,
        **projector.read(tower, Numbers(tower, "clip.vision")),
    }


def image_processor(config: Mapping[str, Any], tower: GGUFFile) -> dict[str, Any]:
    """Return the settings of HF's image processor for a model with this config.json."""
    numbers = Numbers(tower, "clip.vision")
    settings = projector_of(tower).make_processor(config, numbers)
    return settings | {name: _three(tower, f"clip.vision.{name}") for name in ("image_mean", "image_std")}


def video_processor(image: Mapping[str, Any], tower: GGUFFile) -> dict[str, Any]:
    """Return the settings of HF's video processor; `image` are those of its image processor."""
    sizes = projector_of(tower).video_sizes
    return dict(image) if sizes is None else {**image, "size": dict(sizes)}


def projector_type(tower: GGUFFile) -> str:
    """Return the type of projector that a file names; "" for a file without a vision tower."""
    if tower.value("general.architecture", str, "") != "clip":
        return ""
    return tower.value("clip.projector_type", str) or tower.value("clip.vision.projector_type", str, "")


def projector_of(tower: GGUFFile) -> Projector:
    """Return what is known of a file's projector; its type is one of `PROJECTORS`."""
    return PROJECTORS[projector_type(tower)]


def deepstack_layers(tower: GGUFFile) -> list[int]:
    """Return the layers with outputs of their own for the first layers of the text model."""
    key = "clip.vision.is_deepstack_layers"
    flags = tower.array(key).tolist() if tower.is_array(key) else []
    return [layer for layer, is_deep in enumerate(flags) if is_deep]


def has_swapped_mlps(tower: GGUFFile) -> bool:
    """Return whether the names of the MLPs' matrices are exchanged, as early converters wrote them."""
    down = tower.tensors.get("v.blk.0.ffn_down.weight")
    is_old_kind = projector_type(tower) in ("gemma3", "qwen2vl_merger", "qwen2.5vl_merger")
    return is_old_kind and down is not None and down.shape[-1] == Numbers(tower, "clip.vision").count(_WIDTH)


def _mrope(text: Mapping[str, Any], file: GGUFFile, arch: str) -> dict[str, Any]:
    """Return the settings of RoPE by three positions; {} for a model whose images have one."""
    if not arch.startswith(("qwen2vl", "qwen3vl")):
        return {}
    key = f"{arch}.rope.dimension_sections"
    sections = file.array(key).tolist() if file.is_array(key) else []
    if len(sections) < 3:
        raise ValueError(f"the metadata key {key!r} does not hold a number for each of three positions")
    plain = text["rope_scaling"] or {"rope_type": "default"}
    interleaved = {"mrope_interleaved": True} if arch.startswith("qwen3vl") else {}
    return {"rope_scaling": {**plain, "mrope_section": sections[:3], **interleaved}}


def _image_token(file: GGUFFile, arch: str) -> dict[str, Any]:
    """Return the token that takes a row of an image, where the file's vocabulary lacks the usual one.

    Gemma's own config.json does not count its last token, so that many files are without it. The row takes the place
    of the token's embedding, so that any token does that texts do not have.
    """
    key = "tokenizer.ggml.tokens"
    if arch != "gemma3" or not file.is_array(key) or "<image_soft_token>" in file.strings(key):
        return {}
    return {"image_token": "[multimodal]"}


def _size(numbers: Numbers, tower: GGUFFile) -> dict[str, int]:
    """Return the sizes of layers by HF's names; old files lack the width of MLPs, or have another there."""
    width, num_layers = numbers.count(_WIDTH), numbers.count("block_count")
    up = tower.tensors.get(f"v.blk.0.ffn_{'down' if has_swapped_mlps(tower) else 'up'}.weight")
    if up is None or num_layers > min(_MAX_LAYERS, len(tower.tensors)):
        raise ValueError(f"the file claims {num_layers} layers, and does not have their tensors")
    return {"hidden_size": width, "intermediate_size": up.shape[0], "layers": num_layers}


def _gemma3(tower: GGUFFile, numbers: Numbers) -> dict[str, Any]:
    sizes = _size(numbers, tower)
    image, patch = numbers.count("image_size"), numbers.count("patch_size")
    merge = numbers.count("projector.scale_factor", 4)
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": sizes["hidden_size"],
        "intermediate_size": sizes["intermediate_size"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": numbers.count("attention.head_count"),
        "image_size": image,
        "patch_size": patch,
        "layer_norm_eps": numbers.number("attention.layer_norm_epsilon", 1e-6),
        "hidden_act": "gelu_pytorch_tanh",
    }
    return {"vision_config": vision, "mm_tokens_per_image": (image // patch // merge) ** 2}


def _qwen(tower: GGUFFile, numbers: Numbers) -> dict[str, Any]:
    """Return the keys of a vision_config that all of Qwen's towers have."""
    sizes, last = _size(numbers, tower), tower.tensors.get("mm.2.weight")
    if last is None:
        raise ValueError("the file has no mm.2.weight, the projector's last matrix")
    return {
        "depth": sizes["layers"],
        "hidden_size": sizes["hidden_size"],
        "intermediate_size": sizes["intermediate_size"],
        "num_heads": numbers.count("attention.head_count"),
        "patch_size": numbers.count("patch_size"),
        "spatial_merge_size": numbers.count("spatial_merge_size", 2),
        "temporal_patch_size": _FRAMES,
        "out_hidden_size": last.shape[0],
    }


def _qwen2(tower: GGUFFile, numbers: Numbers) -> dict[str, Any]:
    """Qwen2-VL's config.json names sizes otherwise."""
    vision = _qwen(tower, numbers)
    width, inner = vision["hidden_size"], vision.pop("intermediate_size")
    if inner % width:
        raise ValueError(f"MLPs of width {inner} are no multiple of {width}, as Qwen2-VL's are")
    sizes = {"embed_dim": width, "hidden_size": vision.pop("out_hidden_size"), "mlp_ratio": inner // width}
    return {"vision_config": vision | sizes | {"hidden_act": "quick_gelu"}}


def _qwen2_5(tower: GGUFFile, numbers: Numbers) -> dict[str, Any]:
    """The file lacks two settings that all models share: the window's pixels, and a video's positions per second."""
    vision, period = _qwen(tower, numbers), numbers.count("n_wa_pattern")
    return {
        "vision_config": vision
        | {
            "hidden_act": "silu",
            "fullatt_block_indexes": list(range(period - 1, vision["depth"], period)),
            "window_size": numbers.count("window_size", 112),
            "tokens_per_second": 2,
        }
    }


def _qwen3(tower: GGUFFile, numbers: Numbers) -> dict[str, Any]:
    positions = tower.tensors.get("v.position_embd.weight")
    if positions is None:
        raise ValueError("the file has no v.position_embd.weight")
    vision = _qwen(tower, numbers) | {
        "hidden_act": "gelu_pytorch_tanh",
        "num_position_embeddings": positions.shape[0],
        "deepstack_visual_indexes": deepstack_layers(tower),
    }
    return {"vision_config": vision}


def _square_processor(config: Mapping[str, Any], numbers: Numbers) -> dict[str, Any]:
    side = numbers.count("image_size")
    return {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": side, "width": side},
        "image_seq_length": config["mm_tokens_per_image"],
    }


def _merging_processor(fewest: int, most: int) -> Callable[[Mapping[str, Any], Numbers], dict[str, Any]]:
    """Return the function for images of any size; `fewest` and `most` pixels are those of the family's models."""

    def make(config: Mapping[str, Any], numbers: Numbers) -> dict[str, Any]:
        vision = config["vision_config"]
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": vision["patch_size"],
            "merge_size": vision["spatial_merge_size"],
            "temporal_patch_size": vision["temporal_patch_size"],
            "size": {
                "shortest_edge": numbers.count("image_min_pixels", fewest),
                "longest_edge": numbers.count("image_max_pixels", most),
            },
        }

    return make


def _three(tower: GGUFFile, key: str) -> list[float]:
    """Return a number for each color."""
    values = tower.array(key).tolist() if tower.is_array(key) else []
    if len(values) != 3 or not all(isinstance(value, float) for value in values):
        raise ValueError(f"the metadata key {key!r} does not hold three numbers")
    return values


_QWEN2_PROCESSOR = _merging_processor(56**2, 12_845_056)
PROJECTORS: Mapping[str, Projector] = {
    "gemma3": Projector({"gemma3": ("Gemma3ForConditionalGeneration", "gemma3")}, _gemma3, _square_processor),
    "qwen2vl_merger": Projector({"qwen2vl": ("Qwen2VLForConditionalGeneration", "qwen2_vl")}, _qwen2, _QWEN2_PROCESSOR),
    "qwen2.5vl_merger": Projector(
        {"qwen2vl": ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl")}, _qwen2_5, _QWEN2_PROCESSOR
    ),
    "qwen3vl_merger": Projector(
        {
            "qwen3vl": ("Qwen3VLForConditionalGeneration", "qwen3_vl"),
            "qwen3vlmoe": ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe"),
        },
        _qwen3,
        _merging_processor(256**2, 4096**2),
        {"shortest_edge": 4096, "longest_edge": 25_165_824},
    ),
}
"""The types of projectors that are read, by GGUF's names."""
