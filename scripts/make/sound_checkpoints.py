"""Write tests/data/sounds: a tiny random checkpoint per family that hears, with goldens from HF Transformers.

Needs an environment of its own with torch and transformers 5.23, as `scripts/peers.sh DIR hf` makes it:
`DIR/hf/bin/python scripts/make.py sound_checkpoints [FAMILY ...]`. Same versions, same bytes.

Each family is a folder with a checkpoint (bfloat16) and golden.npz: prompts with sounds, HF's greedy tokens and
log-probabilities in float32 with eager attention, and the tower's rows. tests/e2e/sound_goldens.py describes the
arrays.
"""

# pyright: reportMissingImports=false, reportArgumentType=false

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image

from make.media_checkpoints import (
    IMAGE,
    DoubtfulError,
    fill_all,
    generate,
    make_processor,
    make_tokenizer,
    save_processor,
    whole,
)
from make.media_families import GEMMA4, TEXT, chat_template, gemma4_e2b
from make.tiny_checkpoints import MAX_DOUBT, MIN_GAP, fill, run
from make.ultravox import Ultravox
from make.ultravox import hear as hear_ultravox
from tests.e2e.pictures import draw
from tests.models.clips import RATE, draw_clip

CLIP_SECONDS = 2
NUM_FRAMES = 50 * CLIP_SECONDS
MIN_INFLUENCE = 1e-2
"""How far a log-probability must move when the middle of a sound changes."""
NUM_SEEDS = 60
SOUND = "<sound>"


PICTURE = (37, 61)
"""The width and height of the picture, which is drawn with the seed 0."""


class Case(NamedTuple):
    """A prompt with `<sound>` for sounds and `<image>` for the picture, and the indices of the sounds."""

    name: str
    text: str
    sounds: tuple[int, ...]


CASES = (
    Case("text", "Which of the two is louder?", ()),
    Case("one", f"{SOUND}Tell me what is said.", (0,)),
    Case("two", f"Compare this {SOUND} to the next one\n{SOUND} and say which is older.", (1, 2)),
    Case("turn", f"Hear {SOUND} and {SOUND}, please.\nTwo sounds.\n\nNow this:\n{SOUND}\nWhat is new?", (2, 0, 1)),
)
PICTURE_CASE = Case("picture", f"Hear {SOUND} and see {IMAGE}, then {SOUND}: what fits?", (0, 2))
"""A case of families that see too."""


@dataclass(frozen=True)
class Family:
    """A model that hears, and what a checkpoint of it has beside the weights."""

    model: Any
    """HF's model class, or ours where HF has none."""
    specials: tuple[str, ...]
    """Special tokens, from id 0: the first three are those that pad, start and end a text."""
    config: Callable[[Mapping[str, int]], Any]
    """Returns the config for the ids of the special tokens."""
    sound: str
    """What stands for a sound in a prompt that has not been expanded; its last special token takes the rows."""
    row: str
    """The token that takes a row, which stands for a sound too unless there is a placeholder."""
    hear: Callable[[Any, Sequence[np.ndarray]], tuple[list[int], dict[str, torch.Tensor]]]
    """Returns the number of rows of each sound, and the model's inputs, for a feature extractor and samples."""
    rows: Callable[[Any, dict[str, torch.Tensor]], torch.Tensor]
    """Returns the rows of all sounds, for a model and its inputs."""
    seconds: tuple[float, ...] = (0.61, CLIP_SECONDS, 1.37)
    placeholder: str = ""
    num_mels: int = 128
    extractor: str = "WhisperFeatureExtractor"
    """HF's feature extractor class."""
    processor: str = ""
    """HF's processor class, as checkpoints name it."""
    template: str = ""
    newlines: int = 1
    token_names: Mapping[str, str] = field(default_factory=dict)
    image: str = ""
    """What stands for a picture in a prompt, in a family that sees too: HF's whole processor makes its inputs."""


ENCODER: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 3,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "max_source_positions": NUM_FRAMES,
}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}


def qwen2_audio(ids: Mapping[str, int]) -> Any:
    """Return a Qwen2-Audio config: three layers of two heads in the encoder."""
    return transformers.Qwen2AudioConfig(
        text_config=TEXT | {"model_type": "qwen2", "rope_parameters": ROPE},
        audio_config={"model_type": "qwen2_audio_encoder", "num_mel_bins": 128, **ENCODER},
        audio_token_index=ids["<|AUDIO|>"],
        tie_word_embeddings=False,
    )


def hear_qwen2_audio(extractor: Any, sounds: Sequence[np.ndarray]) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Return what Qwen2-Audio's processor makes of sounds."""
    inputs = extractor(
        list(sounds), sampling_rate=RATE, return_attention_mask=True, padding="max_length", return_tensors="pt"
    )
    mask = inputs["attention_mask"]
    rows = [((length - 1) // 2 + 1 - 2) // 2 + 1 for length in mask.sum(-1).tolist()]
    return rows, {"input_features": inputs["input_features"], "feature_attention_mask": mask}


@torch.inference_mode()
def rows_of_qwen2_audio(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the rows that the model puts in the place of placeholders."""
    seen = []

    hook = model.model.multi_modal_projector.register_forward_hook(lambda *call: seen.append(call[-1]))
    model(**inputs)
    hook.remove()
    lengths = inputs["feature_attention_mask"].sum(-1).tolist()
    number = [((length - 1) // 2 + 1) // 2 for length in lengths]
    return torch.cat([rows[:count] for rows, count in zip(seen[0], number, strict=True)])


def voxtral(ids: Mapping[str, int]) -> Any:
    """Return a Voxtral config: three layers of two heads in the encoder."""
    return transformers.VoxtralConfig(
        text_config=TEXT | {"model_type": "llama", "head_dim": 16, "rope_parameters": ROPE},
        audio_config={
            "model_type": "voxtral_encoder",
            "hidden_size": ENCODER["d_model"],
            "num_hidden_layers": ENCODER["encoder_layers"],
            "num_attention_heads": ENCODER["encoder_attention_heads"],
            "intermediate_size": ENCODER["encoder_ffn_dim"],
            "max_source_positions": NUM_FRAMES,
            "num_mel_bins": 80,
        },
        audio_token_id=ids["[AUDIO]"],
    )


def hear_voxtral(extractor: Any, sounds: Sequence[np.ndarray]) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Return what Voxtral's processor makes of sounds, with clips of another length."""
    settings = {"padding": True, "truncation": False, "pad_to_multiple_of": CLIP_SECONDS * RATE}
    clips, rows = [], []
    for sound in sounds:
        features = extractor(sound, sampling_rate=RATE, return_tensors="pt", **settings)["input_features"]
        clips.append(features.reshape(extractor.feature_size, -1, 2 * NUM_FRAMES).transpose(0, 1))
        rows.append(len(clips[-1]) * NUM_FRAMES // 4)
    return rows, {"input_features": torch.cat(clips)}


@torch.inference_mode()
def rows_of_features(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the rows that the model makes of features."""
    names = ("input_features", "input_features_mask")
    return model.get_audio_features(**{name: inputs[name] for name in names if name in inputs}).pooler_output


def glm_asr(ids: Mapping[str, int]) -> Any:
    """Return a GLM-ASR config: three layers of two heads in the encoder."""
    return transformers.GlmAsrConfig(
        text_config=TEXT | {"model_type": "llama", "rope_parameters": ROPE},
        audio_config={
            "model_type": "glmasr_encoder",
            "hidden_size": ENCODER["d_model"],
            "num_hidden_layers": ENCODER["encoder_layers"],
            "num_attention_heads": ENCODER["encoder_attention_heads"],
            "intermediate_size": ENCODER["encoder_ffn_dim"],
            "max_position_embeddings": NUM_FRAMES,
            "num_mel_bins": 128,
        },
        audio_token_id=ids["<|pad|>"],
        tie_word_embeddings=False,
    )


def hear_glm_asr(extractor: Any, sounds: Sequence[np.ndarray]) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Return what GLM-ASR's processor makes of sounds: clips that are heard by themselves."""
    length = CLIP_SECONDS * RATE
    clips = [[sound[start : start + length] for start in range(0, len(sound), length)] for sound in sounds]
    inputs = extractor(
        [clip for of_sound in clips for clip in of_sound],
        sampling_rate=RATE,
        return_attention_mask=True,
        return_tensors="pt",
    )
    mask, rows = inputs["attention_mask"], []
    for of_sound in torch.split(mask.sum(-1), [len(of_sound) for of_sound in clips]):
        rows.append(((int(of_sound.sum()) - 1) // 2 + 1 - 4) // 4 + 1)
    return rows, {"input_features": inputs["input_features"], "input_features_mask": mask}


def qwen3_asr(ids: Mapping[str, int]) -> Any:
    """Return a Qwen3-ASR config: three layers of two heads in the encoder, which attends to one second."""
    return transformers.Qwen3ASRConfig(
        text_config=TEXT | {"model_type": "qwen3", "head_dim": 16, "rope_parameters": ROPE},
        audio_config={
            "model_type": "qwen3_asr_encoder",
            **{name: value for name, value in ENCODER.items() if name != "max_source_positions"},
            "num_mel_bins": 128,
            "n_window_infer": 100,
            "downsample_hidden_size": 8,
            "output_dim": TEXT["hidden_size"],
        },
        audio_token_id=ids["<|audio_pad|>"],
        pad_token_id=TEXT["pad_token_id"],
        eos_token_id=TEXT["eos_token_id"],
        tie_word_embeddings=False,
    )


def hear_qwen3_asr(extractor: Any, sounds: Sequence[np.ndarray]) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Return what Qwen3-ASR's processor makes of sounds, each by itself: after the shorter ones there are zeros."""
    settings = {"padding": True, "return_attention_mask": True, "return_tensors": "pt"}
    heard = [extractor(sound, sampling_rate=RATE, **settings) for sound in sounds]
    most = max(inputs["attention_mask"].shape[1] for inputs in heard)

    def joined(name: str) -> torch.Tensor:
        values = (inputs[name] for inputs in heard)
        return torch.cat([torch.nn.functional.pad(value, (0, most - value.shape[-1])) for value in values])

    mask = joined("attention_mask")
    rows = [length // 100 * 13 + -(-(length % 100) // 8) for length in mask.sum(-1).tolist()]
    return rows, {"input_features": joined("input_features"), "input_features_mask": mask}


ULTRAVOX_GROUP = 3
"""The frames of a row: the last row of a whole clip has fewer."""


def ultravox(ids: Mapping[str, int]) -> dict[str, Any]:
    """Return an Ultravox config: three layers of two heads in the encoder."""
    return {
        "architectures": ["UltravoxModel"],
        "model_type": "ultravox",
        "audio_config": {"model_type": "whisper", "num_mel_bins": 128, **ENCODER},
        "text_config": TEXT | {"model_type": "llama", "rope_parameters": ROPE, "tie_word_embeddings": False},
        "audio_token_index": ids["<|reserved_special_token_0|>"],
        "hidden_size": 96,
        "projector_act": "swiglu",
        "projector_ln_mid": True,
        "stack_factor": ULTRAVOX_GROUP,
    }


def gemma4(ids: Mapping[str, int]) -> Any:
    """Return a config like Gemma 4 E2B's: three layers of two heads in the conformer, with bounds."""
    audio = transformers.Gemma4AudioConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        subsampling_conv_channels=(NUM_BANDS, 8),
        output_proj_dims=40,
    )
    return gemma4_e2b(ids, audio)


NUM_BANDS = 32
"""The bands of Gemma 4's spectrograms; the first convolution has as many channels."""
SEEING_GEMMA4 = replace(
    GEMMA4,
    config=gemma4,
    template=(
        "{{ bos_token }}{% for message in messages %}<|turn>{{ message.role }}\n{% for part in message.content %}"
        "{% if part.type == 'text' %}{{ part.text }}{% else %}<|{{ part.type }}|>{% endif %}{% endfor %}<turn|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
    ),
)


@torch.inference_mode()
def rows_of_gemma4(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the rows that the model makes of features, without those of padding."""
    heard = model.model.get_audio_features(inputs["input_features"], inputs["input_features_mask"])
    return heard.pooler_output[heard.attention_mask]


def make_extractor(family: Family, tokenizer: Any) -> Any:
    """Return HF's feature extractor, or the whole processor in a family that sees too."""
    if not family.image:
        return getattr(transformers, family.extractor)(feature_size=family.num_mels, chunk_length=CLIP_SECONDS)
    extractor = transformers.Gemma4AudioFeatureExtractor(feature_size=family.num_mels)
    return make_processor(SEEING_GEMMA4, tokenizer, feature_extractor=extractor)


def save_extractor(family: Family, extractor: Any, tokenizer: Any, folder: Path) -> None:
    """Write the files of the tokenizer, the feature extractor and the processors."""
    heard = extractor.feature_extractor if family.image else extractor
    settings = json.loads(heard.to_json_string()) | {"processor_class": family.processor}
    settings = {name: value for name, value in settings.items() if name not in ("mel_filters", "window")}
    if not family.image:
        tokenizer.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
        return
    save_processor(SEEING_GEMMA4, extractor, tokenizer, folder)
    path = folder / "processor_config.json"
    merged = json.loads(path.read_text()) | {"feature_extractor": settings}
    path.write_text(json.dumps(merged, indent=2, sort_keys=True) + "\n")


def fill_family(family: Family, model: Any, seed: int) -> None:
    """Draw the weights, and the bounds of matmuls that clip."""
    if family.image:
        fill_all(model, seed, SEEING_GEMMA4)
    else:
        fill(model, seed, norm_offset=0.0, scales_embeddings=False)


QWEN_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
FAMILIES = {
    "gemma4": Family(
        model=transformers.Gemma4ForConditionalGeneration,
        processor=GEMMA4.processor,
        specials=GEMMA4.specials,
        config=gemma4,
        sound="<|audio|>",
        row="<|audio|>",
        hear=hear_qwen2_audio,
        rows=rows_of_gemma4,
        num_mels=NUM_BANDS,
        template=SEEING_GEMMA4.template,
        newlines=GEMMA4.newlines,
        token_names=GEMMA4.token_names,
        image=GEMMA4.image,
    ),
    "glm_asr": Family(
        model=transformers.GlmAsrForConditionalGeneration,
        processor="GlmAsrProcessor",
        specials=("<|endoftext|>", "<|user|>", "<|assistant|>", "<|begin_of_audio|>", "<|pad|>", "<|end_of_audio|>"),
        config=glm_asr,
        sound="<|begin_of_audio|><|pad|><|end_of_audio|>",
        row="<|pad|>",
        hear=hear_glm_asr,
        rows=rows_of_features,
        seconds=(0.61, CLIP_SECONDS, 2 * CLIP_SECONDS + 0.9),
        template=(
            "{% for message in messages %}<|{{ message.role }}|>\n{% if message.content is string %}"
            "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'text' %}"
            "{{ part.text }}{% else %}<|begin_of_audio|><|pad|><|end_of_audio|>{% endif %}{% endfor %}{% endif %}"
            "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
        ),
    ),
    "qwen2_audio": Family(
        model=transformers.Qwen2AudioForConditionalGeneration,
        processor="Qwen2AudioProcessor",
        specials=QWEN_SPECIALS,
        config=qwen2_audio,
        sound="<|audio_bos|><|AUDIO|><|audio_eos|>",
        row="<|AUDIO|>",
        hear=hear_qwen2_audio,
        rows=rows_of_qwen2_audio,
        template=chat_template("<|audio_bos|><|AUDIO|><|audio_eos|>\n"),
    ),
    "qwen3_asr": Family(
        model=transformers.Qwen3ASRForConditionalGeneration,
        extractor="Qwen3ASRFeatureExtractor",
        processor="Qwen3ASRProcessor",
        specials=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"),
        config=qwen3_asr,
        sound="<|audio_start|><|audio_pad|><|audio_end|>",
        row="<|audio_pad|>",
        hear=hear_qwen3_asr,
        rows=rows_of_features,
        seconds=(0.31, CLIP_SECONDS, 2 * CLIP_SECONDS + 0.905),
        template=chat_template("<|audio_start|><|audio_pad|><|audio_end|>"),
    ),
    "ultravox": Family(
        model=Ultravox,
        processor="UltravoxProcessor",
        specials=(
            *("<|finetune_right_pad_id|>", "<|begin_of_text|>", "<|eot_id|>"),
            *("<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_0|>"),
        ),
        config=ultravox,
        sound="<|audio|>",
        placeholder="<|audio|>",
        row="<|reserved_special_token_0|>",
        hear=partial(hear_ultravox, group=ULTRAVOX_GROUP),
        rows=lambda model, inputs: model.rows(inputs["input_features"], inputs["lengths"]).detach(),
        seconds=(0.611, CLIP_SECONDS, 2 * CLIP_SECONDS + 0.9),
        template=(
            "{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
            "{{ message.content | trim }}<|eot_id|>{% endfor %}"
            "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
        ),
    ),
    "voxtral": Family(
        model=transformers.VoxtralForConditionalGeneration,
        processor="VoxtralProcessor",
        specials=("<pad>", "<s>", "</s>", "[INST]", "[/INST]", "[AUDIO]", "[BEGIN_AUDIO]"),
        config=voxtral,
        sound="[BEGIN_AUDIO][AUDIO]",
        row="[AUDIO]",
        hear=hear_voxtral,
        rows=rows_of_features,
        seconds=(0.61, CLIP_SECONDS, 2 * CLIP_SECONDS + 0.9),
        num_mels=80,
        template=(
            "{% for message in messages %}{% if message.role == 'user' %}[INST]{% for part in message.content %}"
            "{% if part.type == 'text' %}{{ part.text }}{% else %}[BEGIN_AUDIO][AUDIO]{% endif %}{% endfor %}[/INST]"
            "{% else %}{{ message.content }}</s>{% endif %}{% endfor %}"
        ),
    ),
}


def prepare(
    family: Family, extractor: Any, tokenizer: Any, text: str, sounds: Sequence[np.ndarray]
) -> dict[str, torch.Tensor]:
    """Return the model's inputs for a prompt, with the picture if the text has its placeholder."""
    if family.image:
        images = [[Image.fromarray(draw(*PICTURE, 0))]] if family.image in text else None
        inputs = dict(extractor(text=text, images=images, audio=list(sounds) or None, return_tensors="pt"))
        return {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}
    rows, inputs = family.hear(extractor, sounds) if sounds else ([], {})
    texts = text.split(family.placeholder or family.row)
    expanded = texts[0] + "".join(family.row * count + after for count, after in zip(rows, texts[1:], strict=True))
    ids = tokenizer(expanded, return_tensors="pt").input_ids
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **inputs}


def influence(
    model: Any, inputs_of: Callable[[Sequence[np.ndarray]], Any], sounds: Sequence[np.ndarray], tokens: Sequence[int]
) -> float:
    """Return how far the largest change of a log-probability is when a sound's middle changes: of the least."""
    before, moved = whole(model, inputs_of(sounds), tokens), []
    for index, sound in enumerate(sounds):
        changed = sound.copy()
        third = len(sound) // 3
        changed[third : 2 * third] = changed[third : 2 * third][::-1] * 0.3
        after = whole(model, inputs_of([*sounds[:index], changed, *sounds[index + 1 :]]), tokens)
        moved.append(np.abs(after - before).max(axis=-1).min())
    return float(min(moved))


def golden(family: Family, folder: Path, extractor: Any, tokenizer: Any) -> tuple[dict[str, Any], str]:
    """Run HF over the cases; return goldens and what they are worth, or raise `DoubtfulError`."""
    load = {"attn_implementation": "eager", "local_files_only": True}
    model = family.model.from_pretrained(folder, dtype=torch.float32, **load).eval()
    exact = family.model.from_pretrained(folder, dtype=torch.float64, **load).eval()
    for name, param in exact.named_parameters():
        if name.endswith("per_dim_scale"):  # which HF multiplies by float32 queries
            param.data = param.data.float()
    model.generation_config.eos_token_id = None
    sounds = [draw_clip(seconds, seed) for seed, seconds in enumerate(family.seconds)]
    arrays: dict[str, Any] = {"seconds": np.array(family.seconds)}
    for index, sound in enumerate(sounds):
        arrays[f"rows_{index}"] = family.rows(
            model, prepare(family, extractor, tokenizer, family.sound, [sound])
        ).numpy()
    gaps, doubts, moved = [], [], [np.inf]
    for case in (*CASES, *([PICTURE_CASE] if family.image else ())):
        text = case.text.replace(SOUND, family.sound).replace(IMAGE, family.image)
        heard = [sounds[index] for index in case.sounds]
        inputs_of = partial(prepare, family, extractor, tokenizer, text)
        inputs = inputs_of(heard)
        tokens, logprobs = generate(model, inputs)
        if any(token < len(family.specials) for token in tokens):
            raise DoubtfulError("a special token is generated")
        best = np.sort(logprobs, axis=-1)
        gaps.append((best[:, -1] - best[:, -2]).min())
        doubts += [np.abs(whole(net, inputs, tokens[:-1]) - logprobs).max() for net in (model, exact)]
        if heard:
            moved.append(influence(model, inputs_of, heard, tokens[:-1]))
        arrays |= {
            f"{case.name}_text": np.array(text),
            f"{case.name}_sounds": np.array(case.sounds, np.int32),
            f"{case.name}_ids": np.array(tokenizer(text).input_ids, np.int32),
            f"{case.name}_expanded": inputs["input_ids"][0].numpy().astype(np.int32),
            f"{case.name}_tokens": np.array(tokens, np.int32),
            f"{case.name}_logprobs": logprobs,
        }
    report = f"smallest gap {min(gaps):.4f}, {max(doubts):.0e} in doubt, its middle moves {min(moved):.3f}"
    if min(gaps) < MIN_GAP or max(doubts) > MAX_DOUBT or min(moved) < MIN_INFLUENCE:
        raise DoubtfulError(report)
    return arrays, report


def make(name: str, family: Family, folder: Path) -> None:
    """Write one family, with the first seed that leaves nothing in doubt."""
    ids = {text: index for index, text in enumerate(family.specials)}
    tokenizer: Any = make_tokenizer(family)
    extractor = make_extractor(family, tokenizer)
    for seed in range(NUM_SEEDS):
        shutil.rmtree(folder, ignore_errors=True)
        model = family.model(family.config(ids))
        fill_family(family, model, seed)
        model.to(torch.bfloat16).save_pretrained(folder)
        save_extractor(family, extractor, tokenizer, folder)
        try:
            arrays, report = golden(family, folder, extractor, tokenizer)
        except DoubtfulError as error:
            print(f"{name}: not seed {seed}: {error}", flush=True)
            continue
        np.savez_compressed(folder / "golden.npz", **arrays)
        size = sum(path.stat().st_size for path in folder.iterdir()) // 1024
        print(f"{name}: seed {seed}, {report}, {size} KB", flush=True)
        return
    raise RuntimeError(f"{name}: all of {NUM_SEEDS} seeds leave something in doubt")


if __name__ == "__main__":
    run(__doc__, FAMILIES, make, "sounds")
