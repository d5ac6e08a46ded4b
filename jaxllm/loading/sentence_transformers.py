"""Read the files with which sentence-transformers describes how hidden states become embeddings.

Opening a checkpoint reads the files without checking them. They are interpreted on request: a model that only generates
does not need them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxllm.loading.json_file import model_error, read_json, read_json_value
from jaxllm.params.checks import INT32_MAX, shown

_MODULES_NAME = "modules.json"
_SETTINGS_NAME = "config_sentence_transformers.json"
_ENCODER_NAMES = tuple(
    f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta")
)
"""The settings of the model's inputs; older versions named the file after the model."""
SENTENCE_FILES = (_MODULES_NAME, _SETTINGS_NAME, *_ENCODER_NAMES)
"""The files in the model's own folder; modules have folders of their own."""
METADATA_NAME, METADATA_KEY = "artifact.metadata", "colbert_metadata"
"""The file of the settings of a ColBERT model in Stanford's form, and the key that the config keeps them under."""
CONFIG_NAME, WEIGHTS_NAME, TOKENIZER_NAME = "config.json", "model.safetensors", "tokenizer_config.json"
_MAX_MODULES = 64
_JINA_TRANSFORMER = "custom_st.Transformer"
"""The class of Jina's models, which without a task is sentence-transformers' own."""
_FOLDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")

_POOLING_MODES: Mapping[str, str] = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}
"""Our pooling for each supported mode of sentence-transformers."""
ACTIVATIONS: Mapping[str, str | None] = {
    "Identity": None,
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}
"""Our activation for each supported module of PyTorch."""
_SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
_TOKEN_SIMILARITIES = ("maxsim", "meanmaxsim")
_PYLATE_DENSE = "pylate.models.Dense.Dense"
_LEGACY_MODE = re.compile(r"pooling_mode_(.+?)(?:_tokens?)?")


@dataclass(frozen=True)
class Module:
    """One row of modules.json."""

    kind: str
    """The name of its class; for a class of another library, its full path."""
    folder: str
    """The folder of its files; "" is the model's own."""
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SentenceFiles:
    """The raw contents of sentence-transformers' files in a model's folder; missing ones are empty."""

    source: str
    modules: tuple[Module, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    encoder: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Mapping[str, Any] = field(default_factory=dict)

    def has(self, kind: str) -> bool:
        """Return whether there is a module of this kind."""
        return any(module.kind == kind for module in self.modules)

    @property
    def is_multi_vector(self) -> bool:
        """Return whether each token has a vector of its own, as in ColBERT: in files of PyLate, or newer ones."""
        model_type = self.settings.get("model_type")
        return self.has("MultiVectorMask") or model_type in ("ColBERT", "MultiVectorEncoder") or self.is_pylate

    @property
    def is_pylate(self) -> bool:
        """Return whether PyLate wrote the files."""
        return "query_prefix" in self.settings

    @property
    def weight_files(self) -> list[str]:
        """Return the weight files of the modules after the model."""
        return [prefix + WEIGHTS_NAME for prefix in self.tensor_prefixes]

    @property
    def tensor_prefixes(self) -> tuple[str, ...]:
        """Return the prefixes of the names of those weights, such as "2_Dense/"."""
        return tuple(f"{module.folder}/" for module in self.modules if module.kind == "Dense")


@dataclass(frozen=True)
class Dense:
    """A layer after pooling: a matmul and an activation, by our name."""

    folder: str
    in_features: int
    out_features: int
    bias: bool
    act: str | None
    adds_input: bool = False
    """The input is added to the output; a matmul makes it as wide."""


@dataclass(frozen=True)
class Embedding:
    """How the modules turn hidden states into embeddings."""

    kind: str
    """The pooling by our name, or the file's mode if it is not supported."""
    layers: tuple[Dense, ...]
    normalizes: bool
    by_token: bool = False
    """Each token has an embedding, and no sequence has."""


@dataclass(frozen=True)
class Settings:
    """The prompts, input limits and similarity function of an embedding model."""

    prompts: Mapping[str, str]
    default_prompt_name: str | None
    similarity: str
    max_length: int | None
    """The most tokens of a text."""
    lowercases: bool
    activation: Any = None
    """PyTorch's name of the function that turns a classifier's logits into scores; None if no file names it."""


def read_files(folder: Path, source: str) -> SentenceFiles | None:
    """Read sentence-transformers' files in a model's folder; None if there are none."""
    modules = _read_modules(folder, source)
    encoders = [folder / name for name in _ENCODER_NAMES if (folder / name).is_file()]
    settings = folder / _SETTINGS_NAME
    if not (modules or encoders or settings.is_file()):
        return None
    paths = settings, encoders[0] if encoders else folder, folder / TOKENIZER_NAME
    return SentenceFiles(source, modules, *(read_json(path, source) if path.is_file() else {} for path in paths))


def module_files(folder: Path, source: str) -> list[str]:
    """Return the settings files of the modules that the local modules.json lists."""
    return [f"{module.folder}/{CONFIG_NAME}" for module in _read_modules(folder, source) if module.folder]


def _read_modules(folder: Path, source: str) -> tuple[Module, ...]:
    if not (folder / _MODULES_NAME).is_file():
        return ()
    rows = read_json_value(folder / _MODULES_NAME, source)
    if not isinstance(rows, list) or len(rows) > _MAX_MODULES or not all(isinstance(row, dict) for row in rows):
        raise model_error(f"{_MODULES_NAME} is no list of modules", source)
    modules = []
    for row in rows:
        kind, path = row.get("type"), row.get("path", "")
        if not isinstance(kind, str) or not _is_folder(path, may_be_model=not kind.endswith(".Dense")):
            message = f"{_MODULES_NAME} has a module of type {shown(kind)} in {shown(path)}, which is no folder's name"
            raise model_error(message, source)
        config = folder / path / CONFIG_NAME
        read = read_json(config, source) if path and config.is_file() else {}
        is_known = kind.startswith("sentence_transformers.") or kind in (_JINA_TRANSFORMER, _PYLATE_DENSE)
        modules.append(Module(kind.rpartition(".")[2] if is_known else kind, path, read))
    return tuple(modules)


def _is_folder(path: object, *, may_be_model: bool) -> bool:
    return isinstance(path, str) and (_FOLDER_NAME.fullmatch(path) is not None or (may_be_model and not path))


def read_embedding(files: SentenceFiles) -> Embedding:
    """Read pooling, dense layers and normalization; errors name the module or the key of its settings."""
    # A mask chooses among vectors: it changes none.
    modules = [module for module in files.modules if module.kind not in ("Dropout", "MultiVectorMask")]
    kinds = [module.kind for module in modules]
    pools = [] if files.is_multi_vector else ["Pooling"]
    known = {"Transformer", *pools, "Dense", "Normalize"}
    for kind in kinds:
        if kind not in known:
            raise model_error(f"{_MODULES_NAME} has a module {shown(kind)}, which is not supported", files.source)
    plain = ["Transformer", *pools, *["Dense"] * kinds.count("Dense")]
    if kinds not in (plain, [*plain, "Normalize"]):
        message = f"{_MODULES_NAME} has {', '.join(kinds)}; only {', '.join(['Transformer', *pools])}, Dense layers "
        raise model_error(f"{message}and Normalize, in this order, are supported", files.source)
    if modules[0].folder:
        message = f"{_MODULES_NAME} places the Transformer in {modules[0].folder}, not in the model's folder"
        raise model_error(f"{message}: give that folder as the model", files.source)
    taken = "token_embeddings" if files.is_multi_vector else "sentence_embedding"
    layers = tuple(_read_dense(module, taken, files.source) for module in modules if module.kind == "Dense")
    normalizes = kinds[-1] == "Normalize" or files.is_pylate
    if files.is_multi_vector:
        return Embedding("LAST", layers, normalizes, by_token=True)
    with named(files.source, f"{modules[1].folder}/{CONFIG_NAME}"):
        kind = _read_mode(modules[1].config, has_prompts=bool(files.settings.get("prompts")))
    return Embedding(kind, layers, normalizes)


def _read_mode(config: Mapping[str, Any], *, has_prompts: bool) -> str:
    from jaxllm.models.fields import read_bool

    modes_value = config.get("pooling_mode")
    if modes_value is None:
        flags = {key: _LEGACY_MODE.fullmatch(key) for key in config}
        modes_value = [match[1] for key, match in flags.items() if match and read_bool(config, key)] or "mean"
    modes = [modes_value] if isinstance(modes_value, str) else modes_value
    if not isinstance(modes, list) or not modes or not all(isinstance(mode, str) for mode in modes):
        raise ValueError(f"pooling_mode is {shown(modes_value)}, expected a name")
    if not read_bool(config, "include_prompt", True) and has_prompts:
        raise ValueError("include_prompt is false, which is not supported: prompts are pooled with their texts")
    mode = "+".join(modes)
    return _POOLING_MODES.get(mode, mode)


def _read_dense(module: Module, taken: str, source: str) -> Dense:
    from jaxllm.models.fields import read_bool, read_int, require

    config = module.config
    with named(source, f"{module.folder}/{CONFIG_NAME}"):
        require(config, module_input_name=taken, module_output_name=taken)
        name = config.get("activation_function", "torch.nn.modules.activation.Tanh") or "torch.nn.Identity"
        act = name.rpartition(".")[2] if isinstance(name, str) and name.startswith("torch.") else name
        if not isinstance(act, str) or act not in ACTIVATIONS:
            raise ValueError(f"activation_function is {shown(name)}, which is not supported; {', '.join(ACTIVATIONS)}")
        sizes = read_int(config, "in_features"), read_int(config, "out_features")
        bias, adds_input = read_bool(config, "bias", True), read_bool(config, "use_residual")
        return Dense(module.folder, *sizes, bias, ACTIVATIONS[act], adds_input)


def read_classifier_tokens(files: SentenceFiles) -> list[int] | None:
    """Return the tokens whose logits give a reranker's score: [yes], or [no, yes] for their difference.

    None if no module names them.
    """
    from jaxllm.models.fields import read_int

    module = next((module for module in files.modules if module.kind == "LogitScore"), None)
    if module is None:
        return None
    with named(files.source, f"{module.folder}/{CONFIG_NAME}"):
        names = [name for name in ("false_token_id", "true_token_id") if module.config.get(name) is not None]
        return [read_int(module.config, name, minimum=0) for name in names or ["true_token_id"]]


def read_settings(files: SentenceFiles) -> Settings:
    """Read prompts, similarity and the limits of texts; errors name the key."""
    from jaxllm.models.fields import read_bool, read_choice, read_mapping, read_optional_int

    with named(files.source, _SETTINGS_NAME):
        prompts = read_mapping(files.settings, "prompts")
        if not all(isinstance(text, str) for text in prompts.values()):
            raise ValueError("prompts has others than texts")
        name = files.settings.get("default_prompt_name")
        if name is not None and name not in prompts:
            raise ValueError(f"default_prompt_name is {shown(name)}, and prompts has {', '.join(prompts) or 'none'}")
        known = _TOKEN_SIMILARITIES if files.is_multi_vector else _SIMILARITIES
        similarity = files.settings.get("similarity_fn_name") or known[0]
        if files.is_pylate and isinstance(similarity, str):
            similarity = similarity.lower()
        similarity = read_choice({"similarity_fn_name": similarity}, "similarity_fn_name", known, "")
    with named(files.source, _ENCODER_NAMES[0]):
        length = read_optional_int(files.encoder, "max_seq_length")
        lowercases = read_bool(files.encoder, "do_lower_case")
    if files.is_multi_vector:  # queries and documents have limits of their own
        length = None
    elif length is None and files.modules:  # newer versions store it with the tokenizer, where HF writes 1e30 for none
        limit = files.tokenizer.get("model_max_length")
        length = limit if type(limit) is int and 0 < limit <= INT32_MAX else None
    return Settings(prompts, name, similarity, length, lowercases, files.settings.get("activation_fn"))


@contextmanager
def named(source: str, file_name: str) -> Iterator[None]:
    """Add the file's name to errors about a field."""
    try:
        yield
    except ValueError as error:
        raise model_error(f"{file_name}: {error}", source) from error
