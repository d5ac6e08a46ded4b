"""Read the config.json of well-known architectures, and show for each whether it runs, or why it is refused.

    scripts/check.py architectures [--only TEXT] [--platforms cpu gpu tpu] [--json OUT]

tests/data/configs/published has a file for each architecture: the model's name on the hub, its config.json, the number
of parameters that its publisher counts, and `listed`, the words of the table of families in docs/supported_models.md
that stand for it (null if there are none). `unused` is the number of parameters that its checkpoint has beyond those of
the model, as in a pooler. `source` names where the config is from: "published", or the defaults of a library's config
class where the published file is not known. No weights are read.

Each engine is resolved as far as possible without weights, on a CPU, an H100 and a TPU v6e that need not be there: its
config, parameters, cache groups and ops. A row is wrong if

- the model runs and the table does not list it, or the other way round,
- its parameters are not as many as its publisher counts, or within 3 % of a round number,
- an engine that runs on one platform is refused on another.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from lib.evidence import Evidence, make_parser
from lib.machine import ROOT, describe_sources
from lib.shapes import MODELS

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.checkpoint import Checkpoint
from jaxllm.loading.open import open_config
from jaxllm.models.plan import CacheGroup, LayerPlan
from jaxllm.models.specs import ModelSpecs
from jaxllm.resolve import resolve_ops
from jaxllm.resolve.checkpoint_settings import read_model_config
from jaxllm.resolve.engine_args import EngineArgs

CASES = ROOT / "tests" / "data" / "configs" / "published"
PAGE = ROOT / "docs" / "supported_models.md"
ROUND = 1_000_000
"""Publishers' numbers that are multiples of this are rounded, and some count layers that only guess tokens."""
NEARLY_EQUAL, NEAR = 1e-6, 0.03
"""The largest relative differences of exact numbers, which may leave out buffers, and of rounded ones."""
type Row = dict[str, Any]


class Case(NamedTuple):
    """An architecture's config.json, and what is publicly known of the model."""

    name: str
    model: str
    """The model's name on the hub."""
    config: dict[str, Any]
    listed: str | None
    """Words of the table of families that stand for the model; None if the table lacks it."""
    parameters: int | None
    """The number that the publisher counts, without unused ones; None if it is not known."""
    source: str

    @property
    def is_listed(self) -> bool:
        """Return whether the table of families has the model."""
        return self.listed is not None and any(self.listed in cells for cells in listed_models())


class Device:
    """What ops are chosen by."""

    id = process_index = 0

    def __init__(self, platform: str, device_kind: str, **facts: Any) -> None:
        self.platform, self.device_kind = platform, device_kind
        self.__dict__.update(facts)


PLATFORMS: Mapping[str, Device] = {
    "cpu": Device("cpu", "cpu"),
    "gpu": Device("gpu", "NVIDIA H100 80GB HBM3", compute_capability="9.0", core_count=132),
    "tpu": Device("tpu", "TPU v6 lite"),
}


def main() -> int:
    """Show a row for each architecture; the status is 1 if one is wrong."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="architectures and models with this in their names")
    parser.add_argument("--platforms", nargs="*", choices=PLATFORMS, default=list(PLATFORMS), metavar="PLATFORM")
    args = parser.parse_args()
    evidence = Evidence(args.json, describe_sources() | {"platforms": args.platforms})
    for case in read_cases():
        if args.only in case.name or args.only in case.model:
            evidence.add(examine(case, args.platforms))
    return evidence.finish()


@cache
def read_cases() -> tuple[Case, ...]:
    """Return all architectures, by name."""
    return tuple(map(_read_case, sorted(CASES.glob("*.json"))))


def _read_case(path: Path) -> Case:
    facts = json.loads(path.read_text())
    config = MODELS[facts["shape"]] if "shape" in facts else facts["config"]
    parameters = facts["parameters"] and facts["parameters"] - facts.get("unused", 0)
    return Case(path.stem, facts["model"], config, facts["listed"], parameters, facts["source"])


@cache
def listed_models() -> tuple[str, ...]:
    """Return the families and models of each row of the documentation's table."""
    section = PAGE.read_text().partition("\n## Families\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return tuple(" ".join(cells[:2]) for cells in rows)


def examine(case: Case, platforms: Sequence[str] = ()) -> Row:
    """Return the row of an architecture; engines are resolved on these platforms."""
    row: Row = {"architecture": case.name, "model": case.model}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(case.config))
        checkpoint = open_config(folder)
        try:
            config = read_model_config(case.model, checkpoint, checkpoint.config)
        except VLLMValidationError as refusal:
            missed = ["docs/supported_models.md lists it"] if case.is_listed else []
            return row | {"verdict": "refused", "reason": _reason(refusal), "missed": missed}
        specs = ModelSpecs(config, "bfloat16").all_param_specs()
        count = sum(math.prod(spec.shape) // spec.repeats for spec in specs.values())
        row |= {"verdict": "runs", "parameters": count, "published": case.parameters, "source": case.source}
        row |= {"context": config.max_position_embeddings, "cache": show_groups(LayerPlan(config.layers))}
        missed = list(_misses(case, count))
        for platform in platforms:
            try:
                row[platform] = _limits(folder, checkpoint, PLATFORMS[platform])
            except VLLMValidationError as refusal:
                missed.append(f"{platform}: {_reason(refusal)}")
    return row | {"missed": missed}


def _limits(folder: str, checkpoint: Checkpoint, device: Device) -> str:
    """Return what runs in plain XLA in an engine on a device, and why."""
    notes, logger = _Notes(), logging.getLogger("jaxllm")
    logger.addHandler(notes)
    try:
        args = EngineArgs(model=folder, dtype="bfloat16", skip_tokenizer_init=True)
        args.create_engine_config(devices=[device], checkpoint=checkpoint)
    finally:
        logger.removeHandler(notes)
    return "; ".join(dict.fromkeys(notes.texts)) or "kernels"


def _misses(case: Case, count: int) -> Iterator[str]:
    if not case.is_listed:
        yield "docs/supported_models.md does not list it"
    if case.parameters is not None:
        allowed = NEARLY_EQUAL if case.parameters % ROUND else NEAR
        if abs(count / case.parameters - 1) > allowed:
            yield f"{count:,} parameters, published {case.parameters:,}"


def show_groups(plan: LayerPlan) -> str:
    """Return the numbers of layers in each cache group, such as "25 of window 1024, 5 of attention"."""
    return ", ".join(f"{len(layers)} of {_kind(group)}" for group, layers in plan.groups.items() if layers)


def _kind(group: CacheGroup) -> str:
    if group.state is not None:
        return f"{type(group.state).__name__.removesuffix('Spec').lower()} state"
    if group.window is not None:
        return f"window {group.window}"
    if group.attention_chunk is not None:
        return f"chunks of {group.attention_chunk}"
    if group.is_indexer:
        return "indexers' keys"
    return "frames" if group.is_cross else "latents" if group.latent_dim is not None else "attention"


def _reason(refusal: Exception) -> str:
    return re.sub(r"^model='[^']*': ", "", str(refusal))


class _Notes(logging.Handler):
    """Collects what the choice of ops warns of, instead of showing it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts = list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == resolve_ops.__name__:
            self.texts.append(record.getMessage())


if __name__ == "__main__":
    sys.exit(main())
