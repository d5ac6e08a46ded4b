"""/metrics shows the engine's counts, and the HTTP side's, in a form that Prometheus reads."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterable

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.engine.front.metrics import PREFIX
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.operations.prometheus_help import HELP
from tests.async_engine.support import core_process, mock_llm, tiny_args, until
from tests.engine.vllm_metrics import OURS
from tests.server.support import Served, served


def families(server: Served) -> dict[str, Metric]:
    answer = server.get("/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return {each.name: each for each in text_string_to_metric_families(answer.body.decode())}


def value(server: Served, family: str, **labels: str) -> float:
    """Return the sum of the samples that have these labels."""
    samples = [each for each in families(server)[family].samples if labels.items() <= each.labels.items()]
    return sum(each.value for each in samples if not each.name.endswith(("_bucket", "_created", "_sum")))


def complete(server: Served, num_tokens: int) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": num_tokens, "ignore_eos": True}
    assert server.post("/v1/completions", body).status == 200


def test_every_metric_is_shown_under_vllms_name(mock: AsyncLLM, mock_server: Served) -> None:
    by_name = families(mock_server)
    for name, family in OURS.items():
        if name.startswith(
            ("kv_block_", "kv_tier_", "spec_decode_", "lora_")
        ):  # with arguments that this server has not
            continue
        shown = by_name[f"vllm:{name.removesuffix('_total') if family.type == 'Counter' else name}"]
        assert (shown.type, shown.documentation) == (family.type.lower(), HELP[name])
        assert {label for each in shown.samples for label in each.labels} - {"le"} == set(family.labels)
    assert {each.name.removeprefix(PREFIX) for each in mock.get_metrics()} <= HELP.keys()
    assert HELP.keys() == OURS.keys()


def test_counts_are_what_was_done(mock_server: Served) -> None:
    names = ("vllm:generation_tokens", "vllm:prompt_tokens", "vllm:request_success")
    before = [value(mock_server, name) for name in names]
    lengths = value(mock_server, "vllm:request_generation_tokens")
    complete(mock_server, 7)
    assert [value(mock_server, name) for name in names] == [before[0] + 7, before[1] + 3, before[2] + 1]
    assert value(mock_server, "vllm:request_generation_tokens") > lengths


def test_answers_are_counted_by_route_and_status(mock_server: Served) -> None:
    def count(**labels: str) -> float:
        return value(mock_server, "http_requests", **labels)

    good = {"handler": "/v1/completions", "method": "POST", "status": "2xx"}
    bad, lost = good | {"status": "4xx"}, {"handler": "none", "method": "GET", "status": "4xx"}
    strange = {"handler": "none", "method": "other"}
    before = count(**good), count(**bad), count(**lost), count(**strange)
    complete(mock_server, 1)
    assert mock_server.post("/v1/completions", {"prompt": 1}).status == 400
    for number in range(5):
        assert mock_server.get(f"/nothing/{number}").status == 404
    mock_server.ask("PROPFIND", "/nothing")
    expected = before[0] + 1, before[1] + 1, before[2] + 5, before[3] + 1
    assert (count(**good), count(**bad), count(**lost), count(**strange)) == expected
    handlers = {each.labels["handler"] for each in families(mock_server)["http_requests"].samples}
    assert not any("nothing" in each for each in handlers), "strangers can make labels"


def test_another_prefix(mock: AsyncLLM, mock_server: Served) -> None:
    with served(mock, "--metrics-prefix", "jaxllm_") as server:
        by_name = families(server)
    assert "jaxllm_num_requests_running" in by_name
    assert not any(name.startswith("vllm") for name in by_name)
    assert families(mock_server).keys() >= {"vllm:num_requests_running", "process_resident_memory_bytes"}


def test_the_process_of_the_core_is_shown(tokenizer: str, mock_server: Served) -> None:
    name = "jaxllm_core_process_resident_memory_bytes"
    with mock_llm(tiny_args(tokenizer), in_process=True) as llm, served(llm) as server:
        complete(server, 1)
        shown, real = value(server, name), core_process(llm).memory_info().rss
        assert shown == pytest.approx(real, rel=0.1)
        core_process(llm).kill()
        asyncio.run_coroutine_threadsafe(until(lambda: not llm.core_pids), server.loop).result()
        assert name not in families(server)
    assert name not in families(mock_server), "its core is a thread"


@pytest.mark.parametrize("prefix", ["", "1a", "a-b", "a b", "ü"])
def test_a_prefix_that_can_begin_no_name_is_refused(prefix: str) -> None:
    with pytest.raises(VLLMValidationError, match="metrics_prefix"):
        ServerArgs(metrics_prefix=prefix)


@pytest.mark.parametrize("escaping", ["", ";escaping=allow-utf-8", ";escaping=underscores"])
def test_openmetrics_where_it_is_asked_for(mock_server: Served, escaping: str) -> None:
    """Prometheus asks for it, in these ways: the samples have the names that they have in the plain form."""
    complete(mock_server, 1)
    answer = mock_server.get("/metrics", {"accept": f"application/openmetrics-text;version=1.0.0{escaping};q=0.5"})
    assert answer.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"

    def names(metrics: Iterable[Metric]) -> set[str]:
        samples = {sample.name for each in metrics for sample in each.samples}
        return {name for name in samples if not name.endswith("_created")}

    shown = names(parse_openmetrics(answer.body.decode()))
    assert shown == names(families(mock_server).values())
    assert "vllm:num_requests_running" in shown


def test_only_counters_end_in_total_under_another_prefix(mock: AsyncLLM, mock_server: Served) -> None:
    def misnamed(server: Served, prefix: str) -> set[str]:
        kinds = {name: each.type for name, each in families(server).items() if name.startswith(prefix)}
        return {name for name, kind in kinds.items() if name.endswith("_total") and kind != "counter"}

    assert misnamed(mock_server, "vllm:") == {"vllm:iteration_tokens_total"}  # vLLM's own name
    with served(mock, "--metrics-prefix", "jaxllm_") as server:
        assert misnamed(server, "jaxllm_") == set()
        assert families(server)["jaxllm_iteration_tokens"].type == "histogram"


def promtool(page: bytes) -> tuple[int, list[str]]:
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, check=False)
    return done.returncode, (done.stdout + done.stderr).decode().splitlines()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Debian's prometheus, is not installed")
def test_promtool_finds_nothing_but_vllms_own_names(mock: AsyncLLM, mock_server: Served) -> None:
    """It only reports that vLLM's names have a colon, and that one histogram ends in _total."""
    complete(mock_server, 2)
    with served(mock, "--metrics-prefix", "jaxllm_") as server:
        assert promtool(server.get("/metrics").body) == (0, [])
    status, complaints = promtool(mock_server.get("/metrics").body)
    assert status == 3
    assert [each for each in complaints if "should not contain ':'" not in each] == [
        'vllm:iteration_tokens_total non-counter metrics should not have "_total" suffix'
    ]
