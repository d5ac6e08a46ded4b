"""Find and open a model's weight files: safetensors or PyTorch's .bin, in one file or in several with an index."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxllm.loading.json_file import model_error, read_json
from jaxllm.loading.safetensors import SafetensorsFile
from jaxllm.loading.torch_files.archive import TorchFile
from jaxllm.params.checks import shown

_MAX_FILE_NAME = 200
_NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
"""Files that a trainer writes beside the weights."""
HEAD_FILES = ("colbert_linear.pt", "sparse_linear.pt")
"""The files of BGE-M3's heads, which lie beside its weights."""
WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".npz", ".h5", ".msgpack")
"""The endings of weight files of all formats, also those that are not read."""


@dataclass(frozen=True, slots=True)
class FileFormat:
    """How the weight files of one format are named."""

    single: str
    """The only file of a small model."""
    index: str
    """The file that names the weight file of each tensor, if there are several."""
    suffixes: tuple[str, ...]
    prefix: str = ""
    """The start of the names, which files of other formats do not have."""

    def names_in(self, names: Iterable[str]) -> list[str]:
        """Return the weight files among the names in a model's folder: all with the first suffix that any has."""
        known = [name for name in names if name not in (*_NO_WEIGHTS, *HEAD_FILES) and "/" not in name]
        known = [name for name in known if _prefix_of(name) == self.prefix]
        return next(filter(None, (sorted(n for n in known if n.endswith(end)) for end in self.suffixes)), [])

    def is_in(self, folder: Path) -> bool:
        """Return whether a folder has weight files of this format, or an index of them."""
        return (folder / self.index).is_file() or bool(self.names_in(_files(folder)))


_MISTRAL_PREFIX, _RANK_PREFIX = "consolidated", "model-rank-"
RANK_FILES = f"{_RANK_PREFIX}*-part-*.safetensors"
"""The pattern of vLLM's files of slices."""
_RANK_FILE = re.compile(r"model-rank-(\d{1,4})-part-\d{1,4}\.safetensors")
SAFETENSORS = FileFormat("model.safetensors", "model.safetensors.index.json", (".safetensors",))
TORCH = FileFormat("pytorch_model.bin", "pytorch_model.bin.index.json", (".bin", ".pt"))
MISTRAL = FileFormat(
    f"{_MISTRAL_PREFIX}.safetensors",
    f"{_MISTRAL_PREFIX}.safetensors.index.json",
    (".safetensors",),
    prefix=_MISTRAL_PREFIX,
)
SHARDED = FileFormat("", "", (".safetensors",), prefix=_RANK_PREFIX)
"""vLLM's files of one rank's slices, which no index names."""
FORMATS: Mapping[str, tuple[FileFormat, ...]] = {
    **dict.fromkeys(("auto", "dummy"), (SAFETENSORS, TORCH, MISTRAL)),
    "hf": (SAFETENSORS, TORCH),
    "safetensors": (SAFETENSORS,),
    "pt": (TORCH,),
    "mistral": (MISTRAL,),
    "sharded_state": (SHARDED,),
}
"""The formats for each `load_format`, the preferred one first."""

type WeightFile = SafetensorsFile | TorchFile


def find_format(folder: Path, formats: Sequence[FileFormat], source: str) -> FileFormat:
    """Return the first format that has files in a folder. An error if none has any names what else is there."""
    form = next((form for form in formats if form.is_in(folder)), None)
    if form is not None:
        return form
    wanted = " or ".join(form.prefix + form.suffixes[0] for form in formats if form is not MISTRAL or len(formats) == 1)
    others = [name for name in _files(folder) if name.endswith(WEIGHT_SUFFIXES)]
    hint = f"; there is {others[0]}" if others else ""
    if others and _RANK_FILE.fullmatch(others[0]):
        hint += ', for load_format="sharded_state"'
    raise model_error(f'there are no {wanted} files (load_format="dummy" needs none){hint}', source)


def read_index(folder: Path, form: FileFormat, source: str) -> dict[str, str]:
    """Read tensor name -> file name from the index; {} if the folder has none."""
    path = folder / form.index
    if not path.is_file():
        return {}
    weight_map = read_json(path, source).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(value, str) for value in weight_map.values()):
        raise model_error(f"{form.index} has no weight_map from tensor names to file names", source)
    for file_name in set(weight_map.values()):
        if not 0 < len(file_name) <= _MAX_FILE_NAME or not file_name.isprintable():
            raise model_error(f"{form.index} names the file {shown(file_name)}, which no file can be called", source)
        if "/" in file_name or "\\" in file_name or file_name.startswith("."):
            raise model_error(f"{form.index} names the file {file_name!r}, outside of the folder", source)
    return weight_map


def weight_files(folder: Path, form: FileFormat, weight_map: Mapping[str, str], source: str) -> list[str]:
    """Return the names of the weight files. A missing file is an error that names it."""
    if weight_map:
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise model_error(f"{form.index} names {', '.join(missing)}, which are not there: fetch them again", source)
        return names
    names = _files(folder)
    return [form.single] if form.single in names else form.names_in(names)


def open_weights(path: Path, source: str) -> WeightFile:
    """Open one file. Any failure is an error that names it."""
    try:
        return SafetensorsFile(path) if path.suffix == ".safetensors" else TorchFile(path)
    except (OSError, ValueError) as error:
        raise model_error(f"{path.name}: {error}", source) from error


def tensor_prefix(file_name: str) -> str:
    """Return the prefix of the names of a file's tensors: its rank, its head, or its folder below the model's."""
    if rank := _RANK_FILE.fullmatch(file_name):
        return rank_prefix(int(rank[1]))
    return f"{Path(file_name).stem}." if file_name in HEAD_FILES else file_name[: file_name.rfind("/") + 1]


def rank_prefix(rank: int) -> str:
    """Return the prefix of the names of one rank's slices."""
    return f"rank-{rank}."


def _prefix_of(name: str) -> str:
    """Return the prefix of the format that a file's name is of."""
    if _RANK_FILE.fullmatch(name):
        return _RANK_PREFIX
    return _MISTRAL_PREFIX if name.startswith(_MISTRAL_PREFIX) else ""


def _files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())
