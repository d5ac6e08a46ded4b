"""GGUF files with vision towers: files of llama.cpp's own converter equal the checkpoints that they were made from."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.open import open_checkpoint
from jaxllm.media.rules import find_rule
from tests.loading.gguf_vision_files import (
    FAMILIES,
    MEDIA,
    VISION,
    Stored,
    changed,
    general_name,
    text_file,
    tower_file,
    write_beside,
)

# What a file does not say of a tiny model, since all real ones share it.
NOT_IN_FILES = {"tokens_per_second", "model_type", "initializer_range", "attention_dropout", "num_channels"}
NOT_IN_FILES |= {"in_channels", "rope_parameters", "vision_use_head"}


def refused(path: Path) -> str:
    """Return the message of a refusal to open a model."""
    with pytest.raises(VLLMValidationError) as error:
        open_checkpoint(str(path))
    assert "language_model_only=True" in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_hf(family: str) -> None:
    """Norms, split queries and keys, frames and mergers have HF's values bit by bit."""
    checkpoint, hf = open_checkpoint(str(VISION / family)), open_checkpoint(str(MEDIA / family))
    ours = {general_name(name): name for name in checkpoint.tensors}
    theirs = {general_name(name): name for name in hf.tensors if ".experts." not in name}
    assert theirs.keys() == {name for name in ours if ".experts." not in name}
    for name, stored in theirs.items():
        expected, values, info = hf.read(stored), checkpoint.read(ours[name]), checkpoint.tensors[ours[name]]
        assert (values.shape, values.dtype.name) == (info.shape, info.dtype)
        # The converter rounds this one to float16, which lacks the smallest numbers of bfloat16.
        rounded = name.endswith("mm_input_projection_weight")
        np.testing.assert_allclose(
            values.astype(np.float32), expected.astype(np.float32), rtol=0, atol=1e-7 if rounded else 0, err_msg=name
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_configs_are_hf(family: str) -> None:
    checkpoint, hf = open_checkpoint(str(VISION / family)), open_checkpoint(str(MEDIA / family))
    assert checkpoint.config["architectures"] == hf.config["architectures"]
    assert checkpoint.config["model_type"] == hf.config["model_type"]
    assert checkpoint.config.get("mm_tokens_per_image") == hf.config.get("mm_tokens_per_image")
    vision, expected = checkpoint.config["vision_config"], hf.config["vision_config"]
    for key in expected.keys() - NOT_IN_FILES:
        assert vision[key] == pytest.approx(expected[key]), key
    sections = hf.config["text_config"]["rope_parameters"].get("mrope_section")
    assert (checkpoint.config["text_config"]["rope_scaling"] or {}).get("mrope_section") == sections
    processor = checkpoint.image_processor
    for key in ("image_mean", "image_std", "image_processor_type"):
        assert processor[key] == (
            hf.image_processor[key] if isinstance(processor[key], str) else pytest.approx(hf.image_processor[key])
        )


def test_sizes_of_images_are_those_of_the_real_models() -> None:
    """A file holds the bounds only if the converter knew them."""
    sizes = {family: open_checkpoint(str(VISION / family)).image_processor["size"] for family in FAMILIES}
    assert sizes["gemma3"] == {"height": 48, "width": 48}
    assert sizes["qwen2_vl"] == sizes["qwen2_5_vl"] == {"shortest_edge": 3136, "longest_edge": 12_845_056}
    assert sizes["qwen3_vl"] == {"shortest_edge": 65_536, "longest_edge": 16_777_216}


def test_bounds_in_a_file_hold(tmp_path: Path) -> None:
    bounds = {"clip.vision.image_min_pixels": 1024, "clip.vision.image_max_pixels": 4096}
    path = write_beside(tmp_path, "qwen3_vl", {"mmproj.gguf": changed(tower_file("qwen3_vl"), metadata=bounds)})
    assert open_checkpoint(str(path)).image_processor["size"] == {"shortest_edge": 1024, "longest_edge": 4096}


def test_quantized_towers_are_dequantized(tmp_path: Path) -> None:
    """Q8_0 keeps a matrix within half a step of 1/127 of each block's largest number; what is not quantized stays."""
    tower = (VISION / "Q8_0.gguf").read_bytes()
    checkpoint = open_checkpoint(str(write_beside(tmp_path, "qwen2_5_vl", {"mmproj-q8.gguf": tower})))
    exact = open_checkpoint(str(VISION / "qwen2_5_vl"))
    name = "visual.blocks.0.attn.qkv.weight"
    values, expected = checkpoint.read(name), exact.read(name).astype(np.float32)
    assert checkpoint.format_of(name) is None
    assert values.dtype == np.float32
    largest = np.abs(expected).reshape(-1, 32).max(axis=1, keepdims=True)
    off = np.abs(values - expected).reshape(-1, 32)
    assert (off <= largest / 230).all()
    assert off.any()
    down = "visual.blocks.0.mlp.down_proj.weight"
    assert checkpoint.tensors[down].dtype == "float16"
    np.testing.assert_allclose(checkpoint.read(down), exact.read(down).astype(np.float32), atol=1e-6)


@pytest.mark.parametrize("family", ["gemma3", "qwen2_vl", "qwen2_5_vl"])
def test_exchanged_names_of_early_converters(tmp_path: Path, family: str) -> None:
    def exchange(tensors: dict[str, Stored]) -> None:
        for name in [name for name in tensors if ".ffn_up." in name]:
            other = name.replace("ffn_up", "ffn_down")
            tensors[name], tensors[other] = tensors[other], tensors[name]

    tower = changed(tower_file(family), change=exchange)
    checkpoint = open_checkpoint(str(write_beside(tmp_path, family, {"mmproj.gguf": tower})))
    expected = open_checkpoint(str(VISION / family))
    assert checkpoint.config == expected.config
    assert checkpoint.tensors == expected.tensors
    for name in (name for name in expected.tensors if ".mlp." in name and "model.layers" not in name):
        assert (checkpoint.read(name) == expected.read(name)).all()


def test_a_gemma_without_a_token_for_rows(tmp_path: Path) -> None:
    """Files of Gemma's first months end before the token that takes a row of an image; another one takes it."""
    tokens = ["<image>" if token == "<image_soft_token>" else token for token in _tokens("gemma3")]
    text = changed(text_file("gemma3"), metadata={"tokenizer.ggml.tokens": tokens})
    path = write_beside(tmp_path, "gemma3", {"mmproj.gguf": tower_file("gemma3").read_bytes()}, text)
    assert find_rule(open_checkpoint(str(path)).config).rows == {"image": "[multimodal]"}
    assert find_rule(open_checkpoint(str(VISION / "gemma3")).config).rows == {"image": "<image_soft_token>"}


def _tokens(family: str) -> list[str]:
    vocab = open_checkpoint(str(VISION / family), sees=False).tokenizer().get_vocab()
    return sorted(vocab, key=lambda token: vocab[token])


def test_only_a_model_that_is_to_see_has_a_tower() -> None:
    checkpoint = open_checkpoint(str(text_file("qwen3_vl")), sees=False)
    assert checkpoint.config["architectures"] == ["Qwen3ForCausalLM"]
    assert not any(name.startswith("visual.") for name in checkpoint.tensors)
    assert not checkpoint.image_processor


def test_size_and_weight_type_of_a_model_with_a_tower() -> None:
    """The text model's type is named; the size is that of both files' tensors."""
    blind, seeing = (open_checkpoint(str(text_file("qwen3_vl")), sees=sees) for sees in (False, True))
    assert (seeing.weight_type, seeing.dtype) == (blind.weight_type, blind.dtype) == ("BF16", "bfloat16")
    assert seeing.num_bytes - blind.num_bytes == sum(
        info.num_bytes for name, info in seeing.tensors.items() if name.startswith("visual.")
    )


def test_several_towers_are_refused_by_name(tmp_path: Path) -> None:
    tower = tower_file("gemma3").read_bytes()
    path = write_beside(tmp_path, "gemma3", {"mmproj-F16.gguf": tower, "gemma-mmproj-f32.gguf": tower})
    message = refused(path)
    assert "gemma-mmproj-f32.gguf, mmproj-F16.gguf" in message
    assert "vision_config" not in open_checkpoint(str(path), sees=False).config
    assert refused(tmp_path) == message


@pytest.mark.parametrize("other", ["gemma3", "qwen2_vl"])
def test_towers_of_other_models_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture, other: str) -> None:
    towers = {f"mmproj-{name}.gguf": tower_file(name).read_bytes() for name in (other, "qwen3_vl")}
    checkpoint = open_checkpoint(str(write_beside(tmp_path, "qwen3_vl", towers)))
    assert checkpoint.config["model_type"] == "qwen3_vl"
    (tmp_path / "mmproj-qwen3_vl.gguf").unlink()
    with caplog.at_level(logging.WARNING, "jaxllm"):
        checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.config["model_type"] == "qwen3"
    assert f"mmproj-{other}.gguf" in caplog.text


def test_a_model_of_another_width_does_not_take_a_tower(tmp_path: Path) -> None:
    def widen(tensors: dict[str, Stored]) -> None:
        kind, (rows, columns), data = tensors["mm.input_projection.weight"]
        tensors["mm.input_projection.weight"] = kind, (rows, 2 * columns), 2 * data

    tower = changed(tower_file("gemma3"), change=widen)
    assert "vision_config" not in open_checkpoint(str(write_beside(tmp_path, "gemma3", {"mmproj.gguf": tower}))).config


def test_a_lonely_tower_names_what_to_give() -> None:
    with pytest.raises(VLLMValidationError, match="holds a vision tower alone: give the file of its text model"):
        open_checkpoint(str(tower_file("gemma3")))


@pytest.mark.parametrize(
    ("family", "key", "reason"),
    [
        ("gemma3", "clip.vision.image_mean", "'clip.vision.image_mean' does not hold three numbers"),
        ("gemma3", "clip.vision.image_size", "'clip.vision.image_size' is missing"),
        ("qwen2_5_vl", "clip.vision.n_wa_pattern", "'clip.vision.n_wa_pattern' is missing"),
        ("qwen3_vl", "v.position_embd.weight", "no v.position_embd.weight"),
        ("qwen3_vl", "v.blk.0.ffn_up.weight", "claims 3 layers, and does not have their tensors"),
    ],
)
def test_incomplete_towers_are_refused(tmp_path: Path, family: str, key: str, reason: str) -> None:
    tower = changed(tower_file(family), without=(key,))
    message = refused(write_beside(tmp_path, family, {"mmproj.gguf": tower}))
    assert reason in message
    assert "mmproj.gguf" in message


def test_a_text_model_without_positions_of_images_is_refused(tmp_path: Path) -> None:
    text = changed(text_file("qwen3_vl"), without=("qwen3vl.rope.dimension_sections",))
    path = write_beside(tmp_path, "qwen3_vl", {"mmproj.gguf": tower_file("qwen3_vl").read_bytes()}, text)
    assert "qwen3vl.rope.dimension_sections" in refused(path)


def test_a_damaged_tower_is_refused_by_name(tmp_path: Path) -> None:
    tower = tower_file("gemma3").read_bytes()[:-5000]
    assert "mmproj.gguf: tensor 'v.blk" in refused(write_beside(tmp_path, "gemma3", {"mmproj.gguf": tower}))


@pytest.mark.parametrize("length", [-5000, 100])
def test_a_damaged_tower_beside_the_models_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, length: int
) -> None:
    towers = {"mmproj-a.gguf": tower_file("gemma3").read_bytes()[:length]}
    towers["mmproj-b.gguf"] = tower_file("qwen3_vl").read_bytes()
    with caplog.at_level(logging.WARNING, "jaxllm"):
        checkpoint = open_checkpoint(str(write_beside(tmp_path, "qwen3_vl", towers)))
    assert checkpoint.config["model_type"] == "qwen3_vl"
    # A tower of another model is no news; what cannot be told for one is.
    assert ("mmproj-a.gguf" in caplog.text) == (length == 100)


def test_a_tower_of_another_model_that_ends_early_is_left_alone(tmp_path: Path) -> None:
    tower = tower_file("qwen3_vl").read_bytes()[:-5000]
    assert open_checkpoint(str(write_beside(tmp_path, "gemma3", {"mmproj.gguf": tower}))).config["model_type"] == (
        "gemma3_text"
    )


def test_a_file_that_may_be_the_tower_is_refused(tmp_path: Path) -> None:
    towers = {"mmproj-a.gguf": b"GGUF", "mmproj-b.gguf": tower_file("qwen3_vl").read_bytes()}
    message = refused(write_beside(tmp_path, "gemma3", towers))
    assert "mmproj-a.gguf: " in message
    assert "Fetch it again" in message


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_no_damage_to_a_tower_is_another_error(tmp_path: Path, family: str) -> None:
    """Whatever bytes of the metadata are changed, a file is refused by name, or left alone, or read."""
    whole, rng = tower_file(family).read_bytes(), np.random.default_rng(0)
    messages: list[str] = []
    for _ in range(150):
        tower = bytearray(whole)
        for position in rng.integers(24, 3500, size=rng.integers(1, 4)):
            tower[position] = rng.integers(256)
        try:
            open_checkpoint(str(write_beside(tmp_path, family, {"mmproj.gguf": bytes(tower)})))
        except VLLMValidationError as error:
            messages.append(str(error))
    assert len(messages) > 30
    assert all("mmproj.gguf" in message for message in messages)
