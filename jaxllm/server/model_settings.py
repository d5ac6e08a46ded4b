"""Read which models a server has, from its command line: several MODELs, a folder of models, or a file."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxllm.config.flag_values import convert, keys_of, read_yaml, unknown_key
from jaxllm.config.server_arguments import CHAT_GROUP, ServerArgs
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import shown
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.server.openai.serving_models import LoRAModule
from jaxllm.utils.argparse_utils import FlexibleArgumentParser

_ALIASES = "aliases"
_WHOLE_SERVER = ("log_config_file", "shutdown_timeout", "nnodes", "node_rank", "master_addr", "master_port")
"""Arguments of an engine that a server has once."""
_CONFIGS = ("config.json", "params.json")
_MAX_MODELS = 1000


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """One of a server's models."""

    names: tuple[str, ...]
    """The names in requests, the first for lists."""
    args: argparse.Namespace
    """The command line as if the server had this model alone."""
    engine_args: AsyncEngineArgs
    adapters: tuple[str, ...]
    """The names of the adapters that it is loaded with."""


def has_several(args: argparse.Namespace) -> bool:
    """Return whether a parsed command line asks for models that are loaded on demand."""
    tags = _tags(args)
    return getattr(args, "models", None) is not None or len(tags) > 1 or any(map(_is_folder_of_models, tags))


def read_models(args: argparse.Namespace) -> list[ModelSettings]:
    """Return the models of a parsed command line that `has_several`.

    Raises VLLMValidationError for what several models cannot have, for unknown keys, and for a name given twice.
    """
    _check_flags(args)
    rows = [*_from_tags(_tags(args)), *_from_file(args)]
    if not rows:
        message = f"there is no model in {', '.join(_tags(args)) or args.models}."
        raise VLLMValidationError(message, parameter="models")
    if len(rows) > _MAX_MODELS:
        raise VLLMValidationError(f"a server has at most {_MAX_MODELS} models, got {len(rows)}.", parameter="models")
    models = [_settings(args, name, fields) for name, fields in rows]
    _check_names(models)
    _check_sizes(args, models)
    return models


def _tags(args: argparse.Namespace) -> list[str]:
    tags = getattr(args, "model_tag", None)
    return tags if isinstance(tags, list) else [] if tags is None else [tags]


def _check_flags(args: argparse.Namespace) -> None:
    """Refuse the flags that a server of several models cannot have."""
    reasons = {
        "api_server_count": (1, "several models are served by one front end: leave it out"),
        "nnodes": (1, "several models are served by one host: leave it out"),
        "headless": (False, "several models are served by one host: leave it out"),
        "grpc_port": (None, "gRPC serves one model: leave it out"),
        "served_model_name": (None, "name several models in the file of --models, with their aliases"),
        "disable_frontend_multiprocessing": (False, "several models have their cores in processes: leave it out"),
        "lora_modules": (None, "give lora-modules to a model in the file of --models"),
    }
    for name, (default, reason) in reasons.items():
        value = getattr(args, name, default)
        if value not in (default, None):
            raise VLLMValidationError(f"{name} cannot go with several models: {reason}.", parameter=name, value=value)


def _is_folder_of_models(tag: str) -> bool:
    """Return whether a MODEL is a folder with several models, or with one in a folder of its own."""
    try:
        folder = Path(tag).expanduser()
        if not folder.is_dir():
            return False
        names = {each.name for each in folder.iterdir()}
        if names & {*_CONFIGS} or any(name.endswith((".safetensors", ".bin", ".pt")) for name in names):
            return False
        models = list(_models_in(folder))
    except (OSError, RuntimeError):  # the name is too long, or the home folder's user unknown
        return False
    return len(models) > 1 or any(each.is_dir() for each in models)


def _models_in(folder: Path) -> Iterator[Path]:
    """Yield the models in a folder: .gguf files, the first part of each, and folders with a checkpoint."""
    from jaxllm.loading.gguf.split_files import first_parts

    for name in first_parts(sorted(each.name for each in folder.iterdir() if each.is_file())):
        yield folder / name
    for inner in sorted(folder.iterdir()):
        if inner.is_dir() and (any((inner / name).is_file() for name in _CONFIGS) or any(inner.glob("*.gguf"))):
            yield inner


def _from_tags(tags: Iterable[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the names and models of MODELs. A local one has the name of its file or folder."""
    for tag in tags:
        if _is_folder_of_models(tag):
            yield from ((_short(each), {"model": str(each)}) for each in _models_in(Path(tag).expanduser()))
        else:
            path = Path(tag).expanduser()
            yield _short(path) if path.exists() else tag, {"model": tag}


def _short(path: Path) -> str:
    return re.sub(r"(-00001-of-\d{5})?\.gguf$", "", path.name) or str(path)


def _from_file(args: argparse.Namespace) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the names and settings in the file of --models."""
    if args.models is None:
        return
    for name, value in read_yaml(args.models, "models").items():
        fields = {"model": value} if isinstance(value, str) else value
        if not isinstance(fields, dict) or not isinstance(fields.get("model"), str) or not str(name):
            message = f"--models {args.models}: {name!r} must have a model, and may have flags, got {shown(value)}."
            raise VLLMValidationError(message, parameter="models", value=shown(value))
        yield str(name), fields


def _settings(args: argparse.Namespace, name: str, fields: Mapping[str, Any]) -> ModelSettings:
    """Return the settings of a model: those of the command line, with its fields in their place."""
    actions = _actions()
    values = dict(vars(args))
    aliases: list[str] = []
    for key, value in fields.items():
        label = f"{name}: {key}"
        if key == _ALIASES:
            aliases = _names(label, value)
            continue
        action = actions.get(str(key).replace("_", "-"))
        if action is None:
            raise unknown_key(f"the model {name!r}", key, value, [*actions, _ALIASES])
        values[action.dest] = convert(action, value, label)
    names = tuple(dict.fromkeys((name, *aliases)))
    values |= {"served_model_name": list(names), "model_tag": None}
    settled = argparse.Namespace(**values)
    server_args = ServerArgs.from_cli_args(settled)
    adapters = tuple(LoRAModule.read(each).name for each in server_args.lora_modules or ())
    engine_args = AsyncEngineArgs.from_cli_args(settled)
    if engine_args.data_parallel_size > 1:
        message = f"data_parallel_size cannot go with several models: {names[0]!r} has one engine: leave it out."
        raise VLLMValidationError(message, parameter="data_parallel_size", value=engine_args.data_parallel_size)
    return ModelSettings(names, settled, engine_args, adapters)


def _actions() -> dict[str, argparse.Action]:
    """Return the flags that each model may have for itself, by their names in a file."""
    parser = FlexibleArgumentParser(add_help=False)
    AsyncEngineArgs.add_cli_args(parser)
    ServerArgs.add_cli_args(parser)
    of_server = {
        field.name for field in dataclasses.fields(ServerArgs) if field.metadata.get("group") != CHAT_GROUP
    } - {"lora_modules"}
    of_server |= {*_WHOLE_SERVER, "served_model_name"}
    return {key: each for each in parser._actions if each.dest not in of_server for key in keys_of(each)}


def _names(label: str, value: Any) -> list[str]:
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(each, str) and each for each in names):
        raise VLLMValidationError(f"{label} must be a name or a list of names, got {shown(value)}.", parameter=_ALIASES)
    return names


def _check_names(models: Iterable[ModelSettings]) -> None:
    taken: set[str] = set()
    for model in models:
        for name in (*model.names, *model.adapters):
            if name in taken:
                message = f"two models have the name {name!r}: give one of them another in the file of --models."
                raise VLLMValidationError(message, parameter="models", value=name)
            taken.add(name)


def _check_sizes(args: argparse.Namespace, models: Iterable[ModelSettings]) -> None:
    """Refuse models that would each take a device for themselves where several are to be loaded at once."""
    if max_loaded(args) == 1:
        return
    for model in models:
        engine_args = model.engine_args
        if engine_args.kv_cache_memory_bytes is None and engine_args.num_gpu_blocks_override is None:
            message = (
                f"the model {model.names[0]!r} needs the size of its KV cache, since others are loaded beside it: "
                "give --kv-cache-memory-bytes for all, or kv-cache-memory-bytes to each in the file of --models."
            )
            raise VLLMValidationError(message, parameter="kv_cache_memory_bytes")


def max_loaded(args: argparse.Namespace) -> int | None:
    """Return the most models that are loaded at once: one unless the command line has a number, or a memory."""
    if args.max_loaded_models is None and args.models_memory is None:
        return 1
    return args.max_loaded_models
