"""Checkpoints in a local folder: config.json, tokenizer files, and weights in safetensors or PyTorch's .bin files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, override

import numpy as np

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.checkpoint import Checkpoint, TensorInfo, dominant_dtype, stamp_of
from jaxllm.loading.json_file import model_error, read_json
from jaxllm.loading.mapped_file import FileSpan
from jaxllm.loading.mistral.config import PARAMS_NAME, read_params
from jaxllm.loading.mistral.tokenizer import TEKKEN_NAME, tekken_tokenizer
from jaxllm.loading.sentence_transformers import METADATA_KEY, METADATA_NAME, read_files
from jaxllm.loading.weight_files import (
    FORMATS,
    HEAD_FILES,
    TORCH,
    FileFormat,
    WeightFile,
    find_format,
    open_weights,
    read_index,
    tensor_prefix,
    weight_files,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from pallas_kernels.weights import WeightFormat

CONFIG_NAME = "config.json"
QUANTIZATION_NAME = "hf_quant_config.json"
"""The file where ModelOpt writes its quantization settings if they are not in config.json."""
PROCESSOR_NAMES = ("video_preprocessor_config.json", "preprocessor_config.json", "processor_config.json")
_TEMPLATES_FOLDER = "additional_chat_templates"
_SENTENCEPIECE = "*.model"
_VOCABULARIES = ("tokenizer.json", _SENTENCEPIECE, "vocab.json", "vocab.txt", "*.tiktoken", TEKKEN_NAME)
"""Patterns of vocabulary files: a tokenizer needs at least one of them."""
_TOKENIZER_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt")


class FolderCheckpoint(Checkpoint):
    """A folder with weights. Raises VLLMValidationError, naming the file, if anything in it is missing or corrupt."""

    def __init__(self, folder: Path, *, source: str = "", formats: Sequence[FileFormat] = FORMATS["auto"]) -> None:
        """Open a folder; the weights are in the first of the `formats` that has any files."""
        self.source = source or str(folder)
        self._folder = folder
        self.config = read_config(folder, self.source)
        self.generation_config = read_generation_config(folder, self.source)
        self.image_processor = read_processor(folder, self.source, "image")
        self.video_processor = read_processor(folder, self.source, "video")
        self.audio_processor = read_feature_extractor(folder, self.source)
        self.sentence_files = read_files(folder, self.source)
        self._files: dict[str, tuple[WeightFile, str]] = {}
        self.form = find_format(folder, formats, self.source)
        self.tensors: Mapping[str, TensorInfo] = self._open_files(self.form)
        self.is_gguf = False
        self.dtype = dominant_dtype(self.tensors.values(), self.config)

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        file, own_name = self._files[name]
        tensor = file.read(own_name)
        return tensor if index is None else tensor[index]

    def spans(self, name: str) -> Sequence[FileSpan]:
        file, own_name = self._files[name]
        return (file.span(own_name),)

    def release(self, name: str) -> None:
        file, own_name = self._files[name]
        file.release(own_name)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return folder_tokenizer(self._folder, self.source)

    def tokenizer_digest(self) -> str | None:
        return tokenizer_digest(self._folder)

    def stamp(self) -> str:
        return stamp_of(path for path in self._folder.iterdir() if path.is_file())

    def _open_files(self, form: FileFormat) -> dict[str, TensorInfo]:
        """Map every weight file and return the tensors by name."""
        tensors: dict[str, TensorInfo] = {}
        weight_map = read_index(self._folder, form, self.source)
        names = weight_files(self._folder, form, weight_map, self.source)
        names += head_files(self._folder)
        if self.sentence_files is not None:
            names += _module_weights(self._folder, self.sentence_files.weight_files, self.source)
        for file_name in names:
            file = open_weights(self._folder / file_name, self.source)
            for name, info in named_tensors(file_name, file).items():
                if weight_map.get(name, file_name) != file_name:
                    continue
                if name in self._files:
                    raise model_error(f"tensor {name!r} is in two files, {file_name} the second", self.source)
                self._files[name] = file, name.removeprefix(tensor_prefix(file_name))
                tensors[name] = info
        for name, file_name in weight_map.items():
            if name not in tensors:
                text = f"{form.index} places {name!r} in {file_name}, which does not hold it"
                raise model_error(text, self.source)
        return tensors


class DummyCheckpoint(Checkpoint):
    """A checkpoint whose weights are never read: config and tokenizer only."""

    def __init__(self, inner: Checkpoint) -> None:
        self._inner = inner
        self.source = inner.source
        self.config = inner.config
        self.generation_config = inner.generation_config
        self.image_processor, self.video_processor = inner.image_processor, inner.video_processor
        self.audio_processor = inner.audio_processor
        self.text_only = inner.text_only
        self.sentence_files = inner.sentence_files
        self.tensors = {}
        self.is_gguf = inner.is_gguf
        self.dtype = inner.dtype

    @override
    def read(self, name: str, index: int | None = None) -> np.ndarray:
        raise ValueError(f'load_format="dummy" has no tensor {name!r}: its weights are random')

    def format_of(self, name: str, num_inputs: int = 0) -> WeightFormat | None:
        return self._inner.format_of(name, num_inputs)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return self._inner.tokenizer()

    def tokenizer_digest(self) -> str | None:
        return self._inner.tokenizer_digest()


class ConfigCheckpoint(Checkpoint):
    """A folder opened for its config and tokenizer only; `name` is the config's file, if it is not config.json."""

    def __init__(self, folder: Path, *, source: str = "", name: str = CONFIG_NAME) -> None:
        self.source = source or str(folder)
        self._folder = folder
        self.config = read_config(folder, self.source, name)
        self.generation_config = read_generation_config(folder, self.source)
        self.image_processor = read_processor(folder, self.source, "image")
        self.video_processor = read_processor(folder, self.source, "video")
        self.audio_processor = read_feature_extractor(folder, self.source)
        self.sentence_files = read_files(folder, self.source)
        self.tensors = {}
        self.is_gguf = False
        self.dtype = dominant_dtype((), self.config)

    @override
    def read(self, name: str, index: int | None = None) -> np.ndarray:
        raise ValueError(f"{self.source} was opened without its weights, so it has no tensor {name!r}")

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return folder_tokenizer(self._folder, self.source)

    def tokenizer_digest(self) -> str | None:
        return tokenizer_digest(self._folder)


def read_config(folder: Path, source: str, name: str = CONFIG_NAME) -> dict[str, Any]:
    """Read config.json, or else Mistral's params.json. ModelOpt's quantization settings may be in a separate file."""
    path = folder / name
    if not path.is_file():
        if name == CONFIG_NAME and (folder / PARAMS_NAME).is_file():
            return read_params(folder, source)
        raise model_error("there is no config.json, so this is not a model in the Hugging Face form", source)
    config = read_json(path, source)
    if config.get("model_type") == "qwen3_asr" and isinstance(parts := config.pop("thinker_config", None), dict):
        config = parts | config  # the hub's form becomes HF's
    metadata = folder / METADATA_NAME
    if config.get("architectures") == ["HF_ColBERT"] or metadata.is_file():
        config[METADATA_KEY] = read_json(metadata, source) if metadata.is_file() else {}
    is_roberta = config.get("architectures") == ["XLMRobertaModel"]
    is_rotary = config.get("position_embedding_type") == "rotary"
    for is_meant, architecture in (  # the first that is meant
        (is_rotary and METADATA_KEY in config, "ColBERTJinaRobertaModel"),
        (is_roberta and head_files(folder), "BgeM3EmbeddingModel"),
        (is_roberta and is_rotary, "JinaEmbeddingsV3Model"),
    ):
        if is_meant:
            config["architectures"] = [architecture]
            break
    beside = folder / QUANTIZATION_NAME
    if name == CONFIG_NAME and not config.get("quantization_config") and beside.is_file():
        config["quantization_config"] = {"quant_method": "modelopt"} | read_json(beside, source)
    if not config.get("architectures") and isinstance(model_type := config.get("model_type"), str):
        from jaxllm.loading.hf import class_names  # which loads transformers

        config["architectures"] = class_names(model_type, is_wrapper="text_config" in config)
    return config


def read_processor(folder: Path, source: str, modality: str) -> dict[str, Any]:
    """Read the settings of HF's image or video processor, from the files that may have them; {} if none has.

    A video processor that has none of its own has the image processor's.
    """
    names = PROCESSOR_NAMES if modality == "video" else PROCESSOR_NAMES[1:]
    for name in names:
        settings = read_json(folder / name, source) if (folder / name).exists() else {}
        settings = settings.get(f"{modality}_processor", settings)
        if isinstance(settings, dict) and settings.keys() & {f"{modality}_processor_type", "image_processor_type"}:
            return settings
    return {}


def read_feature_extractor(folder: Path, source: str) -> dict[str, Any]:
    """Read the settings of HF's feature extractor of sounds, from the files that may have them; {} if none has."""
    for name in PROCESSOR_NAMES[1:]:
        settings = read_json(folder / name, source) if (folder / name).exists() else {}
        settings = settings.get("feature_extractor", settings)
        if isinstance(settings, dict) and "feature_extractor_type" in settings:
            return settings
    return {}


def read_generation_config(folder: Path, source: str) -> dict[str, Any]:
    """Read generation_config.json; {} if the folder has none."""
    path = folder / "generation_config.json"
    return read_json(path, source) if path.is_file() else {}


def _module_weights(folder: Path, names: list[str], source: str) -> list[str]:
    """Return the weight files of sentence-transformers' modules: `names`, or PyTorch's beside where these are missing.

    A missing file is an error that names it.
    """
    files = []
    for name in names:
        choices = (name, tensor_prefix(name) + TORCH.single)
        chosen = next((choice for choice in choices if (folder / choice).is_file()), None)
        if chosen is None:
            raise model_error(f"{name} is not there: fetch it", source)
        files.append(chosen)
    return files


def head_files(folder: Path) -> list[str]:
    """Return the files of BGE-M3's heads; [] if they are not all in the folder."""
    return list(HEAD_FILES) if all((folder / name).is_file() for name in HEAD_FILES) else []


def named_tensors(file_name: str, file: WeightFile) -> dict[str, TensorInfo]:
    """Return the tensors of a weight file, by the names that they have in the checkpoint."""
    prefix = tensor_prefix(file_name)
    return {
        prefix + name: TensorInfo(entry.shape, entry.dtype.name, entry.num_bytes)
        for name, entry in file.entries.items()
    }


def folder_tokenizer(folder: Path, source: str) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a folder with transformers. Tokenizers that need code from the checkpoint are refused."""
    vocabularies = {pattern for pattern in _VOCABULARIES if any(folder.glob(pattern))}
    if not vocabularies:  # transformers would make an empty one
        raise _tokenizer_error(f"there is none of {', '.join(_VOCABULARIES)}", source)
    try:
        return tekken_tokenizer(folder / TEKKEN_NAME) if vocabularies == {TEKKEN_NAME} else _load_tokenizer(folder)
    except Exception as error:  # the library raises errors of every type here
        reason = str(error)
        if vocabularies == {_SENTENCEPIECE} and find_spec("sentencepiece") is None:
            name = next(folder.glob(_SENTENCEPIECE)).name
            reason = f"there is {name} and no tokenizer.json: to read it, install the package sentencepiece"
        raise _tokenizer_error(reason, source) from error


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    from jaxllm.loading.hf import AutoConfig, AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as first:  # perhaps in config.json, whose checks in HF are stricter than the families'
        try:
            AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        except Exception:  # noqa: BLE001 (the library raises every kind here)
            if not (folder / CONFIG_NAME).exists():
                raise first from None
            # The tokenizer needs only the model type from the config.
            plain = AutoConfig.for_model(str(read_json(folder / CONFIG_NAME, str(folder)).get("model_type")))
            return AutoTokenizer.from_pretrained(str(folder), config=plain, trust_remote_code=False)
        raise


def _tokenizer_error(reason: str, source: str) -> VLLMValidationError:
    return VLLMValidationError(
        f"{source}: its tokenizer cannot be loaded ({reason}). Give another with tokenizer=..., "
        "or set skip_tokenizer_init=True and pass token ids.",
        parameter="tokenizer",
        value=source,
    )


def tokenizer_digest(folder: Path) -> str | None:
    """Return a digest of the files that a folder's tokenizer may be made from; None if one cannot be read."""
    digest = hashlib.sha256()
    try:
        for path in sorted([*folder.iterdir(), *folder.glob(f"{_TEMPLATES_FOLDER}/*")]):
            if path.suffix in _TOKENIZER_SUFFIXES and path.is_file():
                content = path.read_bytes()
                digest.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode())
                digest.update(content)
    except OSError:
        return None
    return digest.hexdigest()
