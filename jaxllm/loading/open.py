"""Open the model that a user names: a folder, a .gguf file, or a hub repository.

This is the only module that knows every kind of checkpoint.
"""

from __future__ import annotations

import glob
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading import folder as local
from jaxllm.loading.checkpoint import Checkpoint
from jaxllm.loading.gguf.checkpoint import GGUFCheckpoint
from jaxllm.loading.gguf.split_files import first_parts, is_vision_file, part_names, vision_files
from jaxllm.loading.hub import SMALL_FILES, Download, HubCheckpoint, Repository
from jaxllm.loading.mistral.checkpoint import MistralCheckpoint
from jaxllm.loading.mistral.config import PARAMS_NAME
from jaxllm.loading.mistral.tokenizer import TEKKEN_NAME
from jaxllm.loading.quantized import with_quantized
from jaxllm.loading.sentence_transformers import (
    METADATA_NAME,
    SENTENCE_FILES,
    TOKENIZER_NAME,
    module_files,
    read_files,
)
from jaxllm.loading.sharded_state import ShardedCheckpoint
from jaxllm.loading.weight_files import (
    FORMATS,
    HEAD_FILES,
    MISTRAL,
    RANK_FILES,
    SAFETENSORS,
    SHARDED,
    WEIGHT_SUFFIXES,
    FileFormat,
    read_index,
)
from jaxllm.params.checks import shown

LOAD_FORMATS = ("auto", "hf", "safetensors", "pt", "mistral", "sharded_state", "gguf", "dummy")
"""vLLM's formats of weights. Auto: HF's, or else Mistral's own, or else GGUF; hf: safetensors or pt, PyTorch's .bin."""

type _CheckConfig = Callable[[Mapping[str, Any]], object]
"""It is called with config.json's contents, and raises VLLMValidationError if the model is not supported."""

logger = logging.getLogger(__name__)


def open_checkpoint(
    model: str,
    *,
    load_format: str = "auto",
    revision: str | None = None,
    token: str | bool | None = None,
    download_dir: str | None = None,
    check_config: _CheckConfig | None = None,
    on_download: Callable[[Sequence[Download]], object] | None = None,
    sees: bool = True,
) -> Checkpoint:
    """Open `model`: a folder, a .gguf file, or a hub id ("org/name", "org/name:Q4_K_M" for one GGUF file of many).

    `check_config` is called before any weight file is opened; a .gguf file holds its own config. `on_download` is
    called with large files of the hub before they are downloaded. Without `sees` a GGUF model is opened without the
    file of its vision tower. Raises VLLMValidationError if the model cannot be found or read, or if the load format is
    not supported.
    """
    if load_format not in LOAD_FORMATS:
        raise VLLMValidationError(
            f"load_format={load_format!r} is not supported. Choose one of {', '.join(LOAD_FORMATS)}; "
            "convert other weights to safetensors first.",
            parameter="load_format",
            value=load_format,
        )
    path = local_path(model)
    if path is None:
        repository = Repository(model.partition(":")[0], revision, token, download_dir, on_download)
        checkpoint = _open_hub(model, repository, load_format=load_format, check_config=check_config, sees=sees)
    elif path.is_dir():
        checkpoint = _open_folder(path, load_format=load_format, check_config=check_config, sees=sees)
    else:
        checkpoint = _open_file(path, load_format, sees=sees)
    return with_quantized(checkpoint)


def open_config(
    model: str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    download_dir: str | None = None,
    sees: bool = True,
) -> Checkpoint:
    """Open a model's config and tokenizer, without weights. `model` is as above, or the path of a config.json.

    Raises VLLMValidationError if it cannot be found or read.
    """
    path = local_path(model)
    if path is None:
        return with_quantized(_open_hub_config(model, revision=revision, token=token, download_dir=download_dir))
    if path.suffix == ".json" and path.is_file():
        return with_quantized(local.ConfigCheckpoint(path.parent, source=model, name=path.name))
    return open_checkpoint(model, load_format="dummy", sees=sees)


def local_path(model: str) -> Path | None:
    """Return the folder or file that `model` names, or None if it can only be a hub id."""
    try:
        path = Path(model).expanduser()
        if path.is_dir() or path.is_file():
            return path
    except (OSError, RuntimeError):  # the name is too long, or the home folder's user unknown
        pass
    if looks_like_path(model):
        raise VLLMValidationError(
            f"model={shown(model)} is neither a folder nor a file here, nor the form of a hub id (org/name).",
            parameter="model",
            value=model,
        )
    return None


def _open_file(path: Path, load_format: str, *, sees: bool) -> Checkpoint:
    """Open a single file, which must be GGUF: no other format holds its own config and tokenizer."""
    with path.open("rb") as file:
        is_gguf = path.suffix == ".gguf" or file.read(4) == b"GGUF"
    if not is_gguf or load_format not in ("auto", "gguf", "dummy"):
        raise VLLMValidationError(
            f"model={str(path)!r} is a single file, and only a .gguf file carries its config and tokenizer; "
            "give the folder that holds config.json and the weights.",
            parameter="model",
            value=str(path),
        )
    checkpoint = _open_local_gguf(path, sees=sees)
    return local.DummyCheckpoint(checkpoint) if load_format == "dummy" else checkpoint


def _open_local_gguf(path: Path, *, source: str = "", sees: bool) -> GGUFCheckpoint:
    """Open a GGUF file, with the vision tower that lies beside it if the model is to see."""
    return GGUFCheckpoint(path, source=source, find_vision=(lambda: vision_files(path.parent)) if sees else None)


def looks_like_path(model: str) -> bool:
    """Return whether `model` can only be a path: a hub id is "name" or "org/name", without leading dot or suffix."""
    parts = model.split("/")
    return (
        model.startswith((".", "/", "~"))
        or len(parts) > 2
        or "" in parts
        or "\\" in model
        or model.endswith((".gguf", ".safetensors", ".bin", ".pt"))
    )


def _open_folder(folder: Path, *, load_format: str, check_config: _CheckConfig | None, sees: bool) -> Checkpoint:
    """Open a local folder in this format. "auto" prefers HF's forms, and otherwise takes the only GGUF file."""
    source = str(folder)
    ggufs = [folder / name for name in first_parts(sorted(path.name for path in folder.iterdir() if path.is_file()))]
    has_config = any((folder / name).is_file() for name in (local.CONFIG_NAME, PARAMS_NAME))
    has_others = has_config and any(form.is_in(folder) for form in FORMATS["auto"])
    if load_format == "gguf" or (load_format == "auto" and ggufs and not has_others):
        if len(ggufs) != 1:
            listed = ", ".join(path.name for path in ggufs) or "none"
            message = f"expected one .gguf file in the folder, found {listed}; give the path of the file"
            raise VLLMValidationError(f"{source}: {message}.", parameter="model", value=source)
        return _open_local_gguf(ggufs[0], source=source, sees=sees)
    if check_config is not None:
        check_config(local.read_config(folder, source))
    if load_format == "dummy":
        return local.DummyCheckpoint(local.ConfigCheckpoint(folder, source=source))
    return _open_weights(folder, source, FORMATS[load_format])


def _open_weights(folder: Path, source: str, forms: Sequence[FileFormat]) -> Checkpoint:
    """Open a folder with weights in one of the formats, which are preferred in this order."""
    checkpoint = local.FolderCheckpoint(folder, source=source, formats=forms)
    if checkpoint.form is SHARDED:
        return ShardedCheckpoint(checkpoint)
    return MistralCheckpoint(checkpoint) if checkpoint.form is MISTRAL else checkpoint


def _open_hub(
    model: str, repository: Repository, *, load_format: str, check_config: _CheckConfig | None, sees: bool
) -> Checkpoint:
    """Open "org/name", or "org/name:QUANT" for the GGUF file of that quantization; no weights are downloaded yet."""
    quant = model.partition(":")[2]
    small = repository.download(SMALL_FILES)
    _bring_modules(repository, small, model)
    has_config = any((small / name).is_file() for name in (local.CONFIG_NAME, PARAMS_NAME))
    if quant or load_format == "gguf" or not has_config:
        return _open_hub_gguf(repository, model, quant, load_format, small.name, sees=sees)
    if not any((small / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        repository.download([TEKKEN_NAME], commit=small.name)
    if check_config is not None:
        check_config(local.read_config(small, model))
    if load_format == "dummy":
        return local.DummyCheckpoint(local.ConfigCheckpoint(small, source=model))
    files = read_files(small, model)
    modules = [] if files is None else files.weight_files
    forms = FORMATS[load_format]
    if forms == (SHARDED,):
        logger.info("Fetching %s of %s", RANK_FILES, repository.name)
        return _open_weights(repository.download([RANK_FILES], commit=small.name), model, forms)
    needed = {
        form: [*(sorted({*read_index(small, form, model).values()}) or [form.single]), *modules] for form in forms
    }
    for form, names in needed.items():
        if all((small / each).is_file() for each in names):
            return _open_weights(small, model, [form])
    form = _format_on_hub(repository, model, small, forms, modules)
    names = needed[form]
    if form is SAFETENSORS:
        return HubCheckpoint(repository, model, small, names)
    logger.info("Fetching %s of %s", ", ".join(names), repository.name)
    repository.download([glob.escape(name) for name in names], commit=small.name)
    return _open_weights(small, model, [form])


def _open_hub_config(
    model: str, *, revision: str | None, token: str | bool | None, download_dir: str | None
) -> Checkpoint:
    """Open the settings of "org/name": config.json, and those beside it that say which model it is."""
    repository = Repository(model, revision, token, download_dir)
    names = [local.CONFIG_NAME, PARAMS_NAME, local.QUANTIZATION_NAME, METADATA_NAME, *HEAD_FILES]
    names += [*local.PROCESSOR_NAMES, *SENTENCE_FILES]
    folder = repository.download(names)
    _bring_modules(repository, folder, model)
    return local.ConfigCheckpoint(folder, source=model)


def _bring_modules(repository: Repository, folder: Path, source: str) -> None:
    """Download the settings of the tokenizer and of the modules in modules.json, which limit the inputs."""
    names = module_files(folder, source)
    if names:
        repository.download([*(glob.escape(name) for name in names), TOKENIZER_NAME], commit=folder.name)


def _format_on_hub(
    repository: Repository, source: str, small: Path, forms: Sequence[FileFormat], modules: Sequence[str]
) -> FileFormat:
    """Return the first format in which a repository has the model's weights.

    Raises an error if it has none of them, or no file of `modules`.
    """
    if not modules and (small / forms[0].index).is_file():
        return forms[0]
    names = repository.files(small.name)
    lacking = [name for name in modules if name not in names]
    form = next((form for form in forms if {form.single, form.index} & {*names}), None)
    if form is not None and not lacking:
        return form
    missing = lacking[0] if form is not None else f"{forms[0].single} and no index of several"
    others = [name for name in names if name.endswith(WEIGHT_SUFFIXES)]
    hint = f"it has {', '.join(others[:3])}" if others else "it has no weights at all"
    way_out = "Look for a safetensors version of it, or convert it"
    if any(name.endswith(".gguf") for name in others):
        way_out = f'Say which GGUF file, as in "{repository.name}:Q4_K_M"'
    raise VLLMValidationError(
        f"{source}: the repository has no {missing}; {hint}. {way_out}.",
        parameter="model",
        value=source,
    )


def _open_hub_gguf(
    repository: Repository, source: str, quant: str, load_format: str, commit: str, *, sees: bool
) -> Checkpoint:
    """Download and open the GGUF file of this quantization, with all its parts, and a vision tower if there is one."""
    files = repository.files(commit)
    names = first_parts(files)
    chosen = [name for name in names if quant.lower() in name.lower()]
    if len(chosen) != 1 or load_format not in ("auto", "gguf", "dummy"):
        listed = ", ".join(sorted(names)) or "none"
        hint = f'say which one, as in "{repository.name}:Q4_K_M"' if names else "and no config.json either"
        raise VLLMValidationError(
            f"{source}: expected one GGUF file, the repository has: {listed}; {hint}.", parameter="model", value=source
        )

    def fetch(name: str) -> Path:
        logger.info("Fetching %s of %s", name, repository.name)
        parts = [glob.escape(part) for part in part_names(name)]
        return repository.download(parts, commit=commit) / name

    def find_vision() -> list[Path]:
        towers = sorted(filter(is_vision_file, files), key=_tower_order)
        return [fetch(towers[0])] if towers else []

    checkpoint = GGUFCheckpoint(fetch(chosen[0]), source=source, find_vision=find_vision if sees else None)
    return local.DummyCheckpoint(checkpoint) if load_format == "dummy" else checkpoint


def _tower_order(name: str) -> tuple[int, str]:
    """Return a key that sorts files with one vision tower in several precisions, that of the original model first."""
    kinds = ("bf16", "f16", "f32")
    stem = name.lower()
    return next((number for number, kind in enumerate(kinds) if kind in stem), len(kinds)), name
