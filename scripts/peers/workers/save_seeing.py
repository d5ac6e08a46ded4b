"""save_seeing.py SHAPE GGUF FOLDER: write a model that sees, with random weights in the shapes of a real one.

SHAPE is smolvlm, SmolVLM-256M whole, or qwen3_vl, Qwen3-VL-2B with two layers in its tower and two in its text model.
The text is split as in GGUF, the file of SmolLM2, with the special tokens of the shape behind it. SmolVLM shows a
picture whole, in one tile of 512 x 512 pixels, and resizes it with bicubic weights.

Runs in the environment of `scripts/peers.sh DIR hf`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers
from transformers import AutoTokenizer

LAST_TOKEN = "<|endoftext|>"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}IMAGE{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """The configs of a model, `config` without the ids of special tokens, which `ids` names by key."""

    model: str
    processor: str
    specials: tuple[str, ...]
    image: str
    config: Mapping[str, Any]
    ids: Mapping[str, str]
    image_processor: Mapping[str, Any]
    video_processor: Mapping[str, Any]
    processor_settings: Mapping[str, Any]


SMOLVLM = Shape(
    model="SmolVLM",
    processor="SmolVLMProcessor",
    specials=(
        *("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"),
        *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    ),
    image="<image>",
    config={
        "scale_factor": 4,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "llama",
            "vocab_size": 49280,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
            "tie_word_embeddings": False,
        },
        "vision_config": {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "image_size": 512,
            "patch_size": 16,
        },
    },
    ids={"image_token_id": "<image>"},
    image_processor={
        "image_processor_type": "SmolVLMImageProcessor",
        "do_convert_rgb": True,
        "do_image_splitting": True,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "max_image_size": {"longest_edge": 512},
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": 512},
    },
    video_processor={
        "video_processor_type": "SmolVLMVideoProcessor",
        "size": {"longest_edge": 512},
        "max_image_size": {"longest_edge": 512},
    },
    processor_settings={"image_seq_len": 64},
)
QWEN3_VL = Shape(
    model="Qwen3VL",
    processor="Qwen3VLProcessor",
    specials=("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    image="<|vision_start|><|image_pad|><|vision_end|>",
    config={
        "tie_word_embeddings": True,
        "text_config": {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 2,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000000.0,
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": 2048,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "deepstack_visual_indexes": [0],
        },
    },
    ids={
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    },
    image_processor={
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    },
    video_processor={
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": 4096, "longest_edge": 25165824},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    },
    processor_settings={},
)
SHAPES = {"smolvlm": SMOLVLM, "qwen3_vl": QWEN3_VL}


def main(shape: Shape, gguf: Path, folder: Path) -> None:
    """Write weights, configs, tokenizer and chat template."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.add_special_tokens({"additional_special_tokens": list(shape.specials)})
    tokenizer.chat_template = CHATML.replace("IMAGE", shape.image)
    tokenizer.save_pretrained(folder)
    special = tokenizer.convert_tokens_to_ids(LAST_TOKEN)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in shape.ids.items()}
    ends = {"pad_token_id": special, "bos_token_id": special, "eos_token_id": special}
    values = {**shape.config, **ids, "text_config": shape.config["text_config"] | ends}
    config = getattr(transformers, f"{shape.model}Config")(**values)
    model = getattr(transformers, f"{shape.model}ForConditionalGeneration")._from_config(config, dtype=torch.bfloat16)
    draw_weights(model)
    model.save_pretrained(folder)
    common = {"processor_class": shape.processor}
    for name, settings in (
        ("preprocessor_config", {**shape.image_processor, **common}),
        ("video_preprocessor_config", {**shape.video_processor, **common}),
        ("processor_config", {**common, **shape.processor_settings}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(settings, indent=2) + "\n")


@torch.no_grad()
def draw_weights(model: torch.nn.Module) -> None:
    """Draw weights that keep the size of their inputs, so that pictures move the logits."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("bias"):
            noise *= 0.1
        elif weight.ndim == 1:
            noise = 1 + 0.1 * noise
        elif "embed_tokens" in name:
            noise *= 0.05  # tied, they are the head too
        else:
            noise /= weight[0].numel() ** 0.5
        weight.copy_(noise)
    model.tie_weights()


if __name__ == "__main__":
    main(SHAPES[sys.argv[1]], Path(sys.argv[2]), Path(sys.argv[3]))
