"""Write tests/data/towers: a tiny vision tower per family, with the rows that HF Transformers makes of random patches.

Needs an environment with torch and transformers (`scripts/peers.sh DIR hf`):

    DIR/hf/bin/python scripts/make.py tower_goldens [CASE ...]

A case is one file: config.json, the tensors' names in a saved checkpoint with their shapes, the names of the same
parameters in HF's modules, and the rows in float32 with eager attention. Weights and patches are drawn from a seed, by
`tests.models.random_weights`, so that the tests draw the same.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

from tests.models.random_weights import draw_pixels, draw_weights

SEED = 0
PARTS = (
    "visual",
    "vision_tower",
    "vision_model",
    "multi_modal_projector",
    "connector",
    "embed_vision",
    "vision_embedder",
    "image_newline",
)
"""The parts of tensors' names that tell a tower and its projector from the text model."""
TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}
VIT: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "patch_size": 4,
}
QWEN: dict[str, Any] = {"depth": 3, "num_heads": 3, "patch_size": 4, "intermediate_size": 64}
MROPE: dict[str, Any] = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}


class Case(NamedTuple):
    """A model of HF, the grids of its patches, and how it makes rows of them."""

    model: str
    config: Callable[[], Any]
    grids: list[list[int]]
    """Frames, rows and columns of patches of each item."""
    rows: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
    """It takes the model, the pixels and the grids."""
    pixels: tuple[int, ...]
    """The shape of the pixels: flattened patches, or images."""
    size: tuple[int, int] = (0, 0)
    """The height and width of an image in tiles."""


def qwen_rows(model: Any, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
    """Return the rows of a Qwen tower, with deepstack outputs after them. GLM's takes the frames of a video apart."""
    if "glm" in model.config.model_type:
        grids = torch.tensor([[1, height, width] for frames, height, width in grids.tolist() for _ in range(frames)])
    out = model.model.visual(pixels, grid_thw=grids)
    return torch.cat([out.pooler_output, *getattr(out, "deepstack_features", [])], dim=-1)


def image_rows(model: Any, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
    """Return the rows of images of one size."""
    del grids
    rows = model.get_image_features(pixel_values=pixels).pooler_output
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in rows])


def gemma4_rows(model: Any, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
    """Return the rows of images one after the other, which come with the column and row of each patch."""
    rows, start = [], 0
    for _, height, width in grids.tolist():
        row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        places = torch.stack((column.ravel(), row.ravel()), dim=-1)[None]
        patches = pixels[None, start : start + height * width]
        rows.append(model.get_image_features(pixel_values=patches, image_position_ids=places).pooler_output[0])
        start += height * width
    return torch.cat(rows)


def tile_rows(model: Any, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
    """Return the rows of the tiles of one image."""
    del grids
    return torch.cat(list(model.get_image_features(pixel_values=pixels[None]).pooler_output))


def llama4_rows(model: Any, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
    """Return the rows of tiles. Llama 4's tower and its last matmul are called one after the other."""
    del grids
    rows = model.multi_modal_projector(model.get_image_features(pixel_values=pixels).last_hidden_state)
    return rows.flatten(0, 1)


def pixtral_rows(model: Any, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
    """Return the rows of images of one size, with Mistral 3's way of asking for them."""
    del grids
    sizes = torch.tensor([list(image.shape[1:]) for image in pixels])
    return torch.cat(list(model.get_image_features(pixel_values=pixels, image_sizes=sizes).pooler_output))


def tiled(model: str, config: Callable[[], Any], num_tiles: int, size: tuple[int, int]) -> Case:
    """Return a case of one image of a height and width, whole and in tiles of 24 x 24 pixels."""

    def rows(model: Any, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        del grids
        return model.get_image_features(pixel_values=pixels[None], image_sizes=torch.tensor([size])).pooler_output[0]

    return Case(model, config, [[1, 6, 6]] * num_tiles, rows, (num_tiles, 3, 24, 24), size)


def qwen(model: str, config: str, vision: dict[str, Any], rope: dict[str, Any] = MROPE) -> Case:
    """Return a case of a Qwen-VL: an image, one of another size, and a video of two pairs of frames."""
    grids = [[1, 6, 10], [1, 4, 4], [2, 4, 6]]
    num_patches = sum(t * h * w for t, h, w in grids)
    text = {**TEXT, "head_dim": 16, "rope_parameters": rope}
    return Case(
        model,
        lambda: getattr(transformers, config)(text_config=text, vision_config={**QWEN, **vision}),
        grids,
        qwen_rows,
        (num_patches, 3 * 2 * 4 * 4),
    )


def images(
    model: str,
    config: Callable[[], Any],
    *,
    num_images: int = 2,
    height: int = 24,
    width: int = 24,
    rows: Any = image_rows,
) -> Case:
    """Return a case of images of one size, with patches of 4 x 4 pixels."""
    pixels = (num_images, 3, height, width)
    return Case(model, config, [[1, height // 4, width // 4]] * num_images, rows, pixels)


def gemma4(**vision: Any) -> Case:
    """Return a case of a Gemma 4: two images of 2 x 3 and 3 x 1 rows."""
    sizes = {"head_dim": 16, "num_key_value_heads": 3, "position_embedding_size": 12}

    def config() -> Any:
        return transformers.Gemma4Config(
            text_config={**TEXT, "model_type": "gemma4_text", "hidden_size_per_layer_input": 0},
            vision_config={**VIT, **sizes, **vision, "model_type": "gemma4_vision"},
            audio_config=None,
            image_token_id=63,
        )

    grids = [[1, 6, 9], [1, 9, 3]]
    return Case("Gemma4ForConditionalGeneration", config, grids, gemma4_rows, (6 * 9 + 9 * 3, 3 * 4 * 4))


def gemma4_unified() -> Case:
    """Return a case of a Gemma 4 12B: two images of 2 x 3 and 3 x 1 patches."""

    def config() -> Any:
        return transformers.Gemma4UnifiedConfig(
            text_config={**TEXT, "model_type": "gemma4_unified_text"},
            vision_config={
                "model_type": "gemma4_unified_vision",
                "patch_size": 4,
                "pooling_kernel_size": 3,
                "mm_embed_dim": 48,
                "mm_posemb_size": 5,
                "output_proj_dims": 48,
            },
            audio_config=None,
            image_token_id=63,
        )

    return Case("Gemma4UnifiedForConditionalGeneration", config, [[1, 2, 3], [1, 3, 1]], gemma4_rows, (9, 3 * 12 * 12))


CASES: dict[str, Case] = {
    "gemma4": gemma4(standardize=True),
    "gemma4_clipped": gemma4(use_clipped_linears=True),
    "gemma4_unified": gemma4_unified(),
    "qwen2_vl": qwen(
        "Qwen2VLForConditionalGeneration", "Qwen2VLConfig", {"embed_dim": 48, "hidden_size": 32, "mlp_ratio": 2}
    ),
    "qwen2_5_vl": qwen(
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        {"hidden_size": 48, "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": qwen(
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        {
            "hidden_size": 48,
            "out_hidden_size": 32,
            "num_position_embeddings": 25,
            "deepstack_visual_indexes": [0, 2],
        },
    ),
    "qwen3_5": qwen(
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        {"hidden_size": 48, "out_hidden_size": 32, "num_position_embeddings": 16},
    ),
    "glm4v": qwen(
        "Glm4vForConditionalGeneration", "Glm4vConfig", {"hidden_size": 48, "out_hidden_size": 32, "image_size": 20}
    ),
    "glm4v_moe": qwen(
        "Glm4vMoeForConditionalGeneration",
        "Glm4vMoeConfig",
        {"hidden_size": 48, "out_hidden_size": 32, "image_size": 32, "attention_bias": True},
        MROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
    ),
    "gemma3": images(
        "Gemma3ForConditionalGeneration",
        lambda: transformers.Gemma3Config(
            text_config=TEXT,
            vision_config={**VIT, "model_type": "siglip_vision_model", "image_size": 24, "vision_use_head": False},
            mm_tokens_per_image=9,
            image_token_index=63,
        ),
    ),
    "llava": images(
        "LlavaForConditionalGeneration",
        lambda: transformers.LlavaConfig(
            text_config={**TEXT, "model_type": "llama"},
            vision_config={**VIT, "model_type": "clip_vision_model", "image_size": 24},
            image_token_index=63,
        ),
    ),
    "llava_next": tiled(
        "LlavaNextForConditionalGeneration",
        lambda: transformers.LlavaNextConfig(
            text_config={**TEXT, "model_type": "mistral"},
            vision_config={**VIT, "model_type": "clip_vision_model", "image_size": 24},
            image_grid_pinpoints=[[24, 48], [48, 48], [48, 24]],
            image_token_index=63,
        ),
        3,
        (20, 51),
    ),
    "llava_onevision": tiled(
        "LlavaOnevisionForConditionalGeneration",
        lambda: transformers.LlavaOnevisionConfig(
            text_config={**TEXT, "model_type": "qwen2"},
            vision_config={**VIT, "model_type": "siglip_vision_model", "image_size": 24, "vision_use_head": False},
            image_grid_pinpoints=[[24, 48], [48, 48], [72, 48]],
            vision_aspect_ratio="anyres_max_2",
            image_token_index=63,
        ),
        5,
        (48, 40),
    ),
    "internvl": images(
        "InternVLForConditionalGeneration",
        lambda: transformers.InternVLConfig(
            text_config={**TEXT, "model_type": "qwen2"},
            vision_config={**VIT, "image_size": 24, "attention_bias": True},
            image_token_id=63,
        ),
    ),
    "internvl_normed": images(
        "InternVLForConditionalGeneration",
        lambda: transformers.InternVLConfig(
            text_config={**TEXT, "model_type": "llama"},
            vision_config={**VIT, "image_size": 24, "use_mean_pooling": False},
            image_token_id=63,
        ),
        num_images=1,
    ),
    "internvl_6b": images(
        "InternVLForConditionalGeneration",
        lambda: transformers.InternVLConfig(
            text_config={**TEXT, "model_type": "qwen2"},
            vision_config={**VIT, "image_size": 24, "use_qk_norm": True, "norm_type": "rms_norm"},
            image_token_id=63,
        ),
    ),
    "llama4": images(
        "Llama4ForConditionalGeneration",
        lambda: transformers.Llama4Config(
            text_config={**TEXT, "head_dim": 16, "intermediate_size_mlp": 48, "num_local_experts": 1},
            vision_config={
                **VIT,
                "intermediate_size": 4 * VIT["hidden_size"],
                "image_size": 24,
                **dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 40),
            },
            image_token_index=63,
        ),
        rows=llama4_rows,
    ),
    "idefics3": images(
        "Idefics3ForConditionalGeneration",
        lambda: transformers.Idefics3Config(
            text_config={**TEXT, "model_type": "llama"},
            vision_config={**VIT, "image_size": 32},
            image_token_id=63,
            pad_token_id=0,
        ),
        rows=tile_rows,
    ),
    "smolvlm": images(
        "SmolVLMForConditionalGeneration",
        lambda: transformers.SmolVLMConfig(
            text_config={**TEXT, "model_type": "llama"},
            vision_config={**VIT, "image_size": 24},
            scale_factor=3,
            image_token_id=63,
            pad_token_id=0,
        ),
        rows=tile_rows,
    ),
    "mistral3": Case(
        "Mistral3ForConditionalGeneration",
        lambda: transformers.Mistral3Config(
            text_config={**TEXT, "head_dim": 16, "model_type": "mistral"},
            vision_config={**VIT, "model_type": "pixtral", "image_size": 64},
            image_token_index=63,
        ),
        [[1, 6, 10], [1, 6, 10]],
        pixtral_rows,
        (2, 3, 24, 40),
    ),
}


@torch.no_grad()
def make(name: str, case: Case, path: Path) -> None:
    """Write one case."""
    model_class = getattr(transformers, case.model)
    with tempfile.TemporaryDirectory() as folder:
        fresh = model_class(case.config())
        fresh.save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        shapes = {key: list(tensor.shape) for key, tensor in load_file(file).items()}
        save_file(draw_weights(shapes, SEED, "tower"), file, {"format": "pt"})
        model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        config = json.loads((Path(folder) / "config.json").read_text())
    pixels = torch.from_numpy(draw_pixels(case.pixels, SEED))
    rows = case.rows(model, pixels, torch.tensor(case.grids))
    golden = {
        "config": config,
        "grids": case.grids,
        "pixels": list(case.pixels),
        "size": list(case.size),
        "shapes": {key: shape for key, shape in sorted(shapes.items()) if is_vision(key)},
        "module_names": sorted(key for key in model.state_dict() if is_vision(key)),
    }
    path.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path / f"{name}.npz", case=np.array(json.dumps(golden)), rows=rows.numpy())
    print(f"{name}: {tuple(rows.shape)} rows, mean size {rows.abs().mean():.2f}")


def is_vision(name: str) -> bool:
    """Return whether a tensor is of the tower or its projector."""
    return any(part in name for part in PARTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all by default")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for name in args.cases or CASES:
        make(name, CASES[name], Path(__file__).parents[2] / "tests/data/towers")


if __name__ == "__main__":
    main()
