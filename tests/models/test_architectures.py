"""Each well-known architecture runs if docs/supported_models.md lists it, and is refused by name if not."""

from __future__ import annotations

import re

import pytest
from check.architectures import PAGE, Case, examine, read_cases

from jaxllm.models import supported_architectures
from jaxllm.models.families.missing import MISSING

pytestmark = pytest.mark.models

CASES = {case.name: case for case in read_cases()}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_architecture_runs_as_documented_or_is_refused(case: Case) -> None:
    row = examine(case)
    assert row["missed"] == []
    if row["verdict"] == "refused" and case.listed is None:
        [architecture] = case.config["architectures"]
        need = rf"architecture '{architecture}' is not supported: it needs \w+|only 'absolute' is supported"
        assert re.search(need, row["reason"])


def test_wrong_rows_are_noticed() -> None:
    case = CASES["Qwen3ForCausalLM"]
    assert case.parameters is not None
    wrong = (
        (case._replace(parameters=case.parameters + 36 * 4096), "8,190,735,360 parameters, published 8,190,882,816"),
        (case._replace(parameters=8_500_000_000), "8,190,735,360 parameters, published 8,500,000,000"),
        (case._replace(listed=None), "docs/supported_models.md does not list it"),
        (case._replace(config=case.config | {"architectures": ["Qwen9Model"]}), "docs/supported_models.md lists it"),
    )
    for changed, missed in wrong:
        assert examine(changed)["missed"] == [missed]


def test_platforms_have_their_limits() -> None:
    platforms = ("cpu", "gpu", "tpu")
    row = examine(CASES["PhiForCausalLM"], platforms)
    assert row["missed"] == []
    assert row["cpu"] == "kernels"
    for platform in ("gpu", "tpu"):
        assert f"attention runs in plain XLA, not in the {platform}'s own kernels: head_dim must be" in row[platform]
    assert examine(CASES["Qwen3ForCausalLM"], platforms).items() >= dict.fromkeys(platforms, "kernels").items()


def test_what_is_missing_is_documented() -> None:
    section = PAGE.read_text().partition("\n## Not supported yet\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", section))
    assert {MISSING[name] for name in named} == set(MISSING.values())
    assert not MISSING.keys() & set(supported_architectures())
