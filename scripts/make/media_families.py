"""Tiny multimodal models of all families, for media_checkpoints: configs, image processors and special tokens."""

# pyright: reportMissingImports=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import transformers

from make.tiny_checkpoints import VOCAB

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}IMAGE{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A multimodal model, and what a checkpoint of it has beside the weights."""

    model: str
    """HF's model class."""
    processor: str
    """HF's processor class."""
    image_processor: str
    """HF's image processor class as checkpoints name it."""
    specials: tuple[str, ...]
    """Special tokens, from id 0: the first three are those that pad, start and end a text."""
    config: Callable[[Mapping[str, int]], Any]
    """Returns the config for the ids of the special tokens."""
    image: str
    """What stands for an image in a prompt that has not been expanded."""
    template: str
    image_settings: Mapping[str, Any]
    video_processor: str = ""
    """HF's video processor class; "" if the golden has no video."""
    video_settings: Mapping[str, Any] = field(default_factory=dict)
    video: str = ""
    """What stands for a video in a prompt that has not been expanded."""
    clip: tuple[int, int, int] = (3, 32, 32)
    """The number, the width and the height of a video's frames."""
    nests_images: bool = False
    """Whether HF's processor is to be told which images are of one prompt."""
    processor_settings: Mapping[str, Any] = field(default_factory=dict)
    token_names: Mapping[str, str] = field(default_factory=dict)
    """Attributes of the tokenizer that name special tokens, as `image_token`."""
    newlines: int = 1
    """The longest run of newlines that is one token."""
    norm_offset: float = 0.0
    """What norms add to their weights."""
    scales_embeddings: bool = False
    """Whether the model multiplies its embeddings."""
    transposes_experts: bool = False
    """Whether published checkpoints store experts the other way round than this version of HF."""
    changes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By the end of their names, parameters that are multiplied and added to after they are drawn."""


TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def chat_template(image: str) -> str:
    """Return a template of ChatML with this for an image."""
    return CHATML.replace("IMAGE", image)


QWEN_SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_PIXELS: dict[str, Any] = {
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 16 * 16,
    "max_pixels": 64 * 64,
}


def qwen_ids(ids: Mapping[str, int]) -> dict[str, int]:
    """Return what a Qwen config says about special tokens."""
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def qwen2_vl(ids: Mapping[str, int]) -> Any:
    """Return a Qwen2-VL config: three vision layers of two heads."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    return transformers.Qwen2VLConfig(
        text_config=TEXT | {"rope_parameters": rope},
        vision_config={
            "depth": 3,
            "embed_dim": 32,
            "hidden_size": TEXT["hidden_size"],
            "mlp_ratio": 2,
            "num_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        tie_word_embeddings=False,
        **qwen_ids(ids),
    )


VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": TEXT["hidden_size"],
}
INTERLEAVED_ROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "mrope_section": [3, 3, 2],
    "mrope_interleaved": True,
}


def qwen2_5_vl(ids: Mapping[str, int]) -> Any:
    """Return a Qwen2.5-VL config: windows of 2 x 2 rows in all vision layers but the second."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    return transformers.Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_parameters": rope},
        vision_config=QWEN_VISION | {"window_size": 16, "fullatt_block_indexes": [1]},
        tie_word_embeddings=False,
        **qwen_ids(ids),
    )


def qwen3_vl(ids: Mapping[str, int]) -> Any:
    """Return a Qwen3-VL config: two vision layers of three go to text layers, and a picture has more positions."""
    return transformers.Qwen3VLConfig(
        text_config=TEXT | {"head_dim": 16, "rope_parameters": INTERLEAVED_ROPE},
        vision_config=QWEN_VISION | {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]},
        tie_word_embeddings=True,
        **qwen_ids(ids),
    )


def qwen3_vl_moe(ids: Mapping[str, int]) -> Any:
    """Return a Qwen3-VL config with experts."""
    experts = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3}
    return transformers.Qwen3VLMoeConfig(
        text_config=TEXT | {"head_dim": 16, "rope_parameters": INTERLEAVED_ROPE} | experts,
        vision_config=QWEN_VISION | {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]},
        tie_word_embeddings=False,
        **qwen_ids(ids),
    )


def qwen3_5(ids: Mapping[str, int], kind: str = "Qwen3_5", **text: Any) -> Any:
    """Return a Qwen3.5 config: layers with recurrent state and layers that attend in turn."""
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    heads |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    rope = INTERLEAVED_ROPE | {"partial_rotary_factor": 0.5}
    return getattr(transformers, f"{kind}Config")(
        text_config=TEXT
        | heads
        | {"num_hidden_layers": 4, "num_attention_heads": 2, "head_dim": 32, "num_key_value_heads": 1}
        | {"rope_parameters": rope, "layer_types": ["linear_attention", "full_attention"] * 2}
        | text,
        vision_config=QWEN_VISION | {"num_position_embeddings": 36},
        tie_word_embeddings=True,
        **qwen_ids(ids),
    )


def qwen3_5_moe(ids: Mapping[str, int]) -> Any:
    """Return a Qwen3.5 config with experts, and one that all tokens go through."""
    experts = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    return qwen3_5(ids, "Qwen3_5Moe", num_experts=8, num_experts_per_tok=3, **experts)


def gemma3(ids: Mapping[str, int]) -> Any:
    """Return a Gemma 3 config: a picture has 36 rows, all within the window."""
    return transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(
            **TEXT | {"head_dim": 16, "sliding_window": 48, "query_pre_attn_scalar": 16},
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        vision_config=transformers.SiglipVisionConfig(**VISION, image_size=48, patch_size=4, vision_use_head=False),
        mm_tokens_per_image=36,
        image_token_index=ids["<image_soft_token>"],
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        tie_word_embeddings=True,
    )


def gemma4(ids: Mapping[str, int], *, clips: bool = False, audio: Any = None, **changes: Any) -> Any:
    """Return a Gemma 4 config: pictures are attended to from both sides, and global heads are wider and fewer."""
    rope = {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 10.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    text = TEXT | {
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 96,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCAB,
        "final_logit_softcapping": 20.0,
        "use_bidirectional_attention": "vision",
        "rope_parameters": rope,
    }
    vision = VISION | {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 3}
    return transformers.Gemma4Config(
        text_config=transformers.Gemma4TextConfig(**text | changes),
        vision_config=transformers.Gemma4VisionConfig(
            **vision, position_embedding_size=64, standardize=not clips, use_clipped_linears=clips
        ),
        audio_config=audio,
        image_token_id=ids["<|image|>"],
        boi_token_id=ids["<|image>"],
        eoi_token_id=ids["<image|>"],
        video_token_id=ids["<|video|>"],
        audio_token_id=ids["<|audio|>"],
        tie_word_embeddings=True,
    )


def gemma4_e2b(ids: Mapping[str, int], audio: Any = None) -> Any:
    """Return a Gemma 4 config like E2B's: pictures are causal, their tower clips, and two layers borrow keys."""
    sliding, full = "sliding_attention", "full_attention"
    return gemma4(
        ids,
        clips=True,
        audio=audio,
        num_key_value_heads=1,
        attention_k_eq_v=False,
        num_hidden_layers=4,
        layer_types=[sliding, full] * 2,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=16,
        use_bidirectional_attention=None,
    )


def gemma4_moe(ids: Mapping[str, int]) -> Any:
    """Return a Gemma 4 config like 26B-A4B's: experts beside the MLP."""
    return gemma4(ids, enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=16)


def gemma4_unified(ids: Mapping[str, int]) -> Any:
    """Return a Gemma 4 config like 12B's, which has no tower."""
    module: Any = import_module("transformers.models.gemma4_unified.modeling_gemma4_unified")
    # Its `forward` lets global layers attend to pictures from both sides, unless the cache is a static one. vLLM and
    # the other models of Gemma 4 never do.
    module.create_masks_for_generate = module.create_masks_for_vision_model
    full, sliding = "full_attention", "sliding_attention"
    text = gemma4(ids, layer_types=[full, sliding, full]).text_config.to_dict()
    names = (*TEXT, "head_dim", "attention_k_eq_v", "sliding_window", "layer_types", "per_layer_config")
    names = (*names, "final_logit_softcapping", "use_bidirectional_attention", "rope_parameters")
    return transformers.Gemma4UnifiedConfig(
        text_config=transformers.Gemma4UnifiedTextConfig(**{name: text[name] for name in names}),
        vision_config=transformers.Gemma4UnifiedVisionConfig(
            patch_size=4, pooling_kernel_size=3, mm_embed_dim=48, mm_posemb_size=24, output_proj_dims=48
        ),
        audio_config=transformers.Gemma4UnifiedAudioConfig(audio_embed_dim=8),
        image_token_id=ids["<|image|>"],
        boi_token_id=ids["<|image>"],
        eoi_token_id=ids["<image|>"],
        video_token_id=ids["<|video|>"],
        audio_token_id=ids["<|audio|>"],
        tie_word_embeddings=True,
    )


def llava_text(kind: Any, **changes: Any) -> Any:
    """Return a text config of this class."""
    return kind(**TEXT | changes, tie_word_embeddings=False)


def llava(ids: Mapping[str, int]) -> Any:
    """Return a LLaVA 1.5 config: CLIP's second layer of three, without its first row."""
    return transformers.LlavaConfig(
        text_config=llava_text(transformers.LlamaConfig),
        vision_config=transformers.CLIPVisionConfig(**VISION, image_size=30, patch_size=5, projection_dim=16),
        image_token_index=ids["<image>"],
        image_seq_length=36,
    )


def llava_next(ids: Mapping[str, int]) -> Any:
    """Return a LLaVA-NeXT config: tiles of 3 x 3 rows."""
    return transformers.LlavaNextConfig(
        text_config=llava_text(transformers.LlamaConfig),
        vision_config=transformers.CLIPVisionConfig(**VISION, image_size=24, patch_size=8, projection_dim=16),
        image_token_index=ids["<image>"],
        image_grid_pinpoints=TILES_NEXT,
        image_seq_length=9,
    )


def llava_onevision(ids: Mapping[str, int]) -> Any:
    """Return a LLaVA-OneVision config: more than two tiles of rows are shrunk."""
    return transformers.LlavaOnevisionConfig(
        text_config=llava_text(transformers.Qwen2Config),
        vision_config=transformers.SiglipVisionConfig(**VISION, image_size=24, patch_size=6, vision_use_head=False),
        image_token_index=ids["<image>"],
        video_token_index=ids["<video>"],
        image_grid_pinpoints=TILES_ONEVISION,
        vision_aspect_ratio="anyres_max_2",
    )


def mistral3(ids: Mapping[str, int], text: Any = None) -> Any:
    """Return a Mistral Small 3.1 config: Pixtral's tower, and 2 x 2 of its rows are one."""
    return transformers.Mistral3Config(
        text_config=text or llava_text(transformers.MistralConfig, head_dim=16, sliding_window=None),
        vision_config=transformers.PixtralVisionConfig(**VISION, image_size=64, patch_size=4),
        image_token_index=ids["[IMG]"],
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )


def ministral3(ids: Mapping[str, int]) -> Any:
    """Return a Ministral 3 config: queries grow every 16 positions."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
    return mistral3(ids, llava_text(transformers.Ministral3Config, head_dim=16, rope_parameters=rope))


def internvl(ids: Mapping[str, int], text: Any = None, **vision: Any) -> Any:
    """Return an InternVL 3 config: tiles of 16 rows."""
    sizes = {"image_size": [32, 32], "patch_size": [4, 4], "attention_bias": True}
    return transformers.InternVLConfig(
        text_config=text or llava_text(transformers.Qwen2Config),
        vision_config=transformers.InternVLVisionConfig(**VISION | sizes | vision),
        image_token_id=ids["<IMG_CONTEXT>"],
        image_seq_length=16,
        tie_word_embeddings=False,
    )


def internvl_moe(ids: Mapping[str, int]) -> Any:
    """Return a config like that of InternVL 3.5 241B-A28B: InternViT-6B, and a Qwen3 with experts."""
    experts = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3, "head_dim": 16}
    return internvl(
        ids,
        llava_text(transformers.Qwen3MoeConfig, **experts),
        attention_bias=False,
        use_qk_norm=True,
        norm_type="rms_norm",
    )


def internvl_gpt_oss(ids: Mapping[str, int]) -> Any:
    """Return a config like that of InternVL 3.5 GPT-OSS-20B-A4B."""
    types = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 48}
    experts = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32, "head_dim": 16}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    return internvl(ids, llava_text(transformers.GptOssConfig, rope_parameters=rope, **types, **experts))


def llama4(ids: Mapping[str, int]) -> Any:
    """Return a Llama 4 config: two layers attend within chunks of 64, and one of them has experts."""
    chunks = {"attention_chunk_size": 64, "no_rope_layer_interval": 3, "floor_scale": 64}
    experts = {"num_local_experts": 6, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2}
    widths = dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 48)
    squares = {"intermediate_size": 4 * VISION["hidden_size"], "image_size": 32, "patch_size": 4}
    return transformers.Llama4Config(
        text_config=transformers.Llama4TextConfig(**TEXT | {"intermediate_size": 48} | chunks | experts, head_dim=16),
        vision_config=transformers.Llama4VisionConfig(**VISION | squares | widths),
        boi_token_index=ids["<|image_start|>"],
        eoi_token_index=ids["<|image_end|>"],
        image_token_index=ids["<|patch|>"],
    )


def idefics(kind: str) -> Callable[[Mapping[str, int]], Any]:
    """Return what makes a config of Idefics 3 or SmolVLM: tiles of four rows."""

    def config(ids: Mapping[str, int]) -> Any:
        return getattr(transformers, f"{kind}Config")(
            text_config=llava_text(transformers.LlamaConfig),
            vision_config=VISION | {"image_size": 32, "patch_size": 8},
            image_token_id=ids["<image>"],
            scale_factor=2,
            tie_word_embeddings=False,
        )

    return config


def glm4v(ids: Mapping[str, int], kind: str = "Glm4v", **text: Any) -> Any:
    """Return a GLM-4.1V config: half of each head is rotated, and a picture has more positions than the tower."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    return getattr(transformers, f"{kind}Config")(
        text_config=TEXT | {"rope_parameters": rope} | text,
        vision_config=QWEN_VISION | {"image_size": 24},
        image_token_id=ids["<|image|>"],
        video_token_id=ids["<|video|>"],
        **{f"{name}_start_token_id": ids[f"<|begin_of_{name}|>"] for name in ("image", "video")},
        **{f"{name}_end_token_id": ids[f"<|end_of_{name}|>"] for name in ("image", "video")},
        tie_word_embeddings=False,
    )


def glm4v_moe(ids: Mapping[str, int]) -> Any:
    """Return a GLM-4.5V config: one layer without experts, two with a shared one."""
    experts = {"moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 3}
    return glm4v(ids, "Glm4vMoe", head_dim=16, routed_scaling_factor=1.5, **experts)


def glm46v_moe(ids: Mapping[str, int]) -> Any:
    """Return a GLM-4.6V config with the text part and the tower of GLM-4.5V."""
    glm = glm4v_moe(ids)
    names = ("image_token_id", "video_token_id")
    return transformers.Glm46VConfig(
        text_config=glm.text_config, vision_config=glm.vision_config, **{name: getattr(glm, name) for name in names}
    )


def qwen(model: str, processor: str, config: Callable[[Mapping[str, int]], Any], **changes: Any) -> Family:
    """Return a family whose prompts and pictures are Qwen's."""
    return Family(
        model=f"{model}ForConditionalGeneration",
        processor=processor,
        image_processor="Qwen2VLImageProcessor",
        specials=QWEN_SPECIALS,
        config=config,
        image=QWEN_IMAGE,
        template=chat_template(QWEN_IMAGE),
        **{"image_settings": QWEN_PIXELS} | changes,
    )


def idefics_family(kind: str) -> Family:
    """Return Idefics 3 or SmolVLM."""
    tiles = tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))
    image = "<image>"
    return Family(
        model=f"{kind}ForConditionalGeneration",
        processor=f"{kind}Processor",
        image_processor=f"{kind}ImageProcessor",
        specials=(
            *("<|endoftext|>", "<|im_start|>", "<end_of_utterance>", image, "<fake_token_around_image>"),
            *("<global-img>", *tiles),
        ),
        config=idefics(kind),
        image=image,
        template=(
            "<|im_start|>{% for message in messages %}{{ message.role | capitalize }}"
            "{% if message.content is string %}: {{ message.content }}{% else %}"
            "{{ ':' if message.content[0].type == 'image' else ': ' }}{% for part in message.content %}"
            "{% if part.type == 'text' %}{{ part.text }}{% else %}<image>{% endif %}{% endfor %}{% endif %}"
            "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
        ),
        image_settings={"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
        video_processor=f"{kind}VideoProcessor" if kind == "SmolVLM" else "",
        video_settings={"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 32}},
        video="<video>",
        processor_settings={"image_seq_len": 4},
        newlines=3,
    )


LLAVA_TEMPLATE = (
    "{% for message in messages %}{{ message.role | upper }}: "
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<image>\n{% endif %}{% endfor %}{% endif %} "
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
LLAVA_SPECIALS = ("<pad>", "<s>", "</s>", "<image>")
GEMMA_TURNS = (
    "{{ bos_token }}{% for message in messages %}START{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}IMAGE{% endif %}{% endfor %}{% endif %}END\n"
    "{% endfor %}{% if add_generation_prompt %}STARTmodel\n{% endif %}"
)


def gemma_template(start: str, end: str, image: str) -> str:
    """Return a template with these marks around turns."""
    return GEMMA_TURNS.replace("START", start).replace("END", end).replace("IMAGE", image)


# Tied embeddings that are as large as what the layers add to them would repeat the last token.
QUIET_EMBEDDINGS = {"embed_tokens.weight": (0.2, 0.0)}
GEMMA4 = Family(
    model="Gemma4ForConditionalGeneration",
    processor="Gemma4Processor",
    image_processor="Gemma4ImageProcessor",
    specials=(
        *("<pad>", "<bos>", "<eos>", "<|turn>", "<turn|>", "<|image>", "<|image|>", "<image|>"),
        *("<|audio>", "<|audio|>", "<audio|>", "<|video|>"),
    ),
    config=gemma4,
    image="<|image|>",
    template=gemma_template("<|turn>", "<turn|>", "<|image|>"),
    image_settings={"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70},
    video_processor="Gemma4VideoProcessor",
    video_settings={"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70},
    video="<|video|>",
    clip=(2, 120, 84),
    processor_settings={"image_seq_length": 70},
    token_names={
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    },
    newlines=3,
    scales_embeddings=True,
    # Scores are not divided by anything.
    changes=QUIET_EMBEDDINGS | {"language_model.norm.weight": (5.0, 0.0), "q_norm.weight": (0.3, 0.0)},
)

TILES_NEXT = [[24, 48], [48, 24], [48, 48], [72, 24], [24, 72]]
TILES_ONEVISION = [[24, 24], [24, 48], [24, 72], [48, 24], [48, 48], [72, 24]]
QWEN3_PIXELS = QWEN_PIXELS | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}

GLM = Family(
    model="Glm4vForConditionalGeneration",
    processor="Glm4vProcessor",
    image_processor="Glm4vImageProcessor",
    specials=(
        *("<|endoftext|>", "[gMASK]", "<|user|>", "<sop>", "<|assistant|>"),
        *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
        *("<|image|>", "<|video|>"),
    ),
    config=glm4v,
    image="<|begin_of_image|><|image|><|end_of_image|>",
    template=(
        "[gMASK]<sop>{% for message in messages %}<|{{ message.role }}|>\n"
        "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
        "{% if part.type == 'text' %}{{ part.text }}{% else %}<|begin_of_image|><|image|><|end_of_image|>"
        "{% endif %}{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    image_settings={
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64 * 2},
    },
)
MISTRAL3 = Family(
    model="Mistral3ForConditionalGeneration",
    processor="PixtralProcessor",
    image_processor="PixtralImageProcessor",
    specials=("<pad>", "<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    config=mistral3,
    image="[IMG]",
    template=(
        "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST]"
        "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
        "{% if part.type == 'text' %}{{ part.text }}{% else %}[IMG]{% endif %}{% endfor %}{% endif %}[/INST]"
        "{% else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    image_settings={"patch_size": {"height": 4, "width": 4}, "size": {"longest_edge": 48}},
    processor_settings={
        "patch_size": 4,
        "spatial_merge_size": 2,
        "image_token": "[IMG]",
        "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
    },
)
INTERNVL = Family(
    model="InternVLForConditionalGeneration",
    processor="InternVLProcessor",
    image_processor="GotOcr2ImageProcessor",
    specials=(
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        *("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
    ),
    config=internvl,
    image="<IMG_CONTEXT>",
    template=chat_template("<IMG_CONTEXT>\n"),
    image_settings={"size": {"height": 32, "width": 32}, "max_patches": 3},
    video_processor="InternVLVideoProcessor",
    video_settings={"size": {"height": 32, "width": 32}},
    video="<video>",
    processor_settings={"image_seq_length": 16},
    token_names={
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
)
# States that last.
QWEN3_5_CHANGES = {"A_log": (1.0, -3.0), "embed_tokens.weight": (0.5, 0.0)}
QWEN3_5: dict[str, Any] = {"image_settings": QWEN3_PIXELS, "norm_offset": 1.0, "changes": QWEN3_5_CHANGES}
FAMILIES: dict[str, Family] = {
    "qwen2_vl": qwen("Qwen2VL", "Qwen2VLProcessor", qwen2_vl),
    "gemma3": Family(
        model="Gemma3ForConditionalGeneration",
        processor="Gemma3Processor",
        image_processor="Gemma3ImageProcessor",
        specials=(
            *("<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
            *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        ),
        config=gemma3,
        image="<start_of_image>",
        template=gemma_template("<start_of_turn>", "<end_of_turn>", "<start_of_image>"),
        image_settings={"size": {"height": 48, "width": 48}},
        processor_settings={"image_seq_length": 36},
        token_names={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        newlines=3,
        norm_offset=1.0,
        scales_embeddings=True,
        changes=QUIET_EMBEDDINGS | {"language_model.norm.weight": (5.0, 4.0)},
    ),
    "qwen2_5_vl": qwen("Qwen2_5_VL", "Qwen2_5_VLProcessor", qwen2_5_vl),
    "qwen3_vl": qwen("Qwen3VL", "Qwen3VLProcessor", qwen3_vl, image_settings=QWEN3_PIXELS),
    "llava": Family(
        model="LlavaForConditionalGeneration",
        processor="LlavaProcessor",
        image_processor="CLIPImageProcessor",
        specials=LLAVA_SPECIALS,
        config=llava,
        image="<image>",
        template=LLAVA_TEMPLATE,
        image_settings={"size": {"shortest_edge": 30}, "crop_size": {"height": 30, "width": 30}},
        processor_settings={
            "patch_size": 5,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "image_token": "<image>",
        },
    ),
    "mistral3": MISTRAL3,
    "internvl": INTERNVL,
    "smolvlm": idefics_family("SmolVLM"),
    "qwen3_5": qwen("Qwen3_5", "Qwen3VLProcessor", qwen3_5, **QWEN3_5),
    "gemma4": GEMMA4,
    "gemma4_e2b": replace(GEMMA4, config=gemma4_e2b),
    "gemma4_unified": replace(
        GEMMA4,
        model="Gemma4UnifiedForConditionalGeneration",
        processor="Gemma4UnifiedProcessor",
        image_processor="Gemma4UnifiedImageProcessor",
        config=gemma4_unified,
        video_processor="Gemma4UnifiedVideoProcessor",
    ),
    "llava_next": Family(
        model="LlavaNextForConditionalGeneration",
        processor="LlavaNextProcessor",
        image_processor="LlavaNextImageProcessor",
        specials=LLAVA_SPECIALS,
        config=llava_next,
        image="<image>",
        template=LLAVA_TEMPLATE,
        image_settings={
            "size": {"shortest_edge": 24},
            "crop_size": {"height": 24, "width": 24},
            "image_grid_pinpoints": TILES_NEXT,
        },
        processor_settings={
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "image_token": "<image>",
        },
    ),
    "llava_onevision": Family(
        model="LlavaOnevisionForConditionalGeneration",
        processor="LlavaOnevisionProcessor",
        image_processor="LlavaOnevisionImageProcessor",
        specials=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"),
        config=llava_onevision,
        image="<image>",
        template=chat_template("<image>\n"),
        image_settings={"size": {"height": 24, "width": 24}, "image_grid_pinpoints": TILES_ONEVISION},
        video_processor="LlavaOnevisionVideoProcessor",
        video_settings={"size": {"height": 24, "width": 24}},
        video="<video>",
        clip=(3, 24, 24),
        nests_images=True,
        processor_settings={
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_2",
            "image_token": "<image>",
            "video_token": "<video>",
        },
    ),
    "glm4v": GLM,
    "glm4v_moe": replace(GLM, model="Glm4vMoeForConditionalGeneration", config=glm4v_moe),
    "glm46v_moe": replace(
        GLM,
        model="Glm46VForConditionalGeneration",
        processor="Glm46VProcessor",
        image_processor="Glm46VImageProcessor",
        config=glm46v_moe,
    ),
    "llama4": Family(
        model="Llama4ForConditionalGeneration",
        processor="Llama4Processor",
        image_processor="Llama4ImageProcessor",
        specials=(
            *("<|finetune_right_pad|>", "<|begin_of_text|>", "<|eot|>", "<|header_start|>", "<|header_end|>"),
            *("<|image_start|>", "<|image_end|>", "<|image|>", "<|patch|>"),
            *("<|tile_x_separator|>", "<|tile_y_separator|>"),
        ),
        config=llama4,
        image="<|image|>",
        template=(
            "{{ bos_token }}{% for message in messages %}<|header_start|>{{ message.role }}<|header_end|>\n\n"
            "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
            "{% if part.type == 'text' %}{{ part.text }}{% else %}<|image|>{% endif %}{% endfor %}{% endif %}<|eot|>"
            "{% endfor %}{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n{% endif %}"
        ),
        image_settings={"size": {"height": 32, "width": 32}, "max_patches": 3},
        processor_settings={"patch_size": 4, "pixel_shuffle_ratio": 0.5},
        newlines=2,
    ),
    "ministral3": replace(MISTRAL3, config=ministral3),
    "internvl_moe": replace(INTERNVL, config=internvl_moe),
    "internvl_gpt_oss": replace(INTERNVL, config=internvl_gpt_oss),
    "gemma4_moe": replace(GEMMA4, config=gemma4_moe),
    "qwen3_5_moe": qwen("Qwen3_5Moe", "Qwen3VLProcessor", qwen3_5_moe, **QWEN3_5),
    "qwen3_vl_moe": replace(
        qwen("Qwen3VLMoe", "Qwen3VLProcessor", qwen3_vl_moe, image_settings=QWEN3_PIXELS), transposes_experts=True
    ),
}
