"""`jaxllm run-batch` answers each line as a server would, and goes on where it stopped."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import socket
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from jaxllm.cli.batch import run_batch
from jaxllm.cli.batch.journal import Journal
from jaxllm.cli.main import main, make_parser
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import EngineDeadError, VLLMValidationError
from jaxllm.resolve.pooling_settings import PoolingSettings
from tests.async_engine.support import mock_llm, tiny_args
from tests.cli.running import read_jsonl, write_jsonl
from tests.server.conftest import TEMPLATE
from tests.server.pooled_support import EMBED, PooledEngine
from tests.server.tool_support import CALL, TOOL
from tests.server.tool_support import TEMPLATE as TOOL_TEMPLATE

HELLO = [{"role": "user", "content": "hello"}]


def chat(custom_id: str, url: str = run_batch.CHAT_URL, **body: Any) -> dict[str, Any]:
    fields = {"messages": HELLO, "max_tokens": 4} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": fields}


def completion(custom_id: str, **body: Any) -> dict[str, Any]:
    fields = {"prompt": "hello", "max_tokens": 4} | body
    return {"custom_id": custom_id, "method": "POST", "url": run_batch.COMPLETION_URL, "body": fields}


def response(custom_id: str, **body: Any) -> dict[str, Any]:
    fields = {"input": "hello", "max_output_tokens": 4} | body
    return {"custom_id": custom_id, "method": "POST", "url": run_batch.RESPONSE_URL, "body": fields}


class Batches:
    """Runs of the subcommand in a folder, on an engine without a model."""

    def __init__(self, folder: Path, tokenizer: str) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        self.output = folder / "out.jsonl"
        self.num_started = 0
        self.pooling: PoolingSettings | None = None
        """Pooling settings, if the model pools."""
        self.template = TEMPLATE
        self.replies: str | None = None

    def run(self, lines: Sequence[Any], *words: str, **engine: Any) -> int:
        """Answer lines; an object is a line of JSON."""
        source = write_jsonl(self.folder / "in.jsonl", list(lines))
        command = ["run-batch", "m", "-i", str(source), "-o", str(self.output), "--served-model-name", "tiny", *words]

        @asynccontextmanager
        async def start(args: argparse.Namespace) -> AsyncIterator[AsyncLLM]:
            self.num_started += 1
            tiny = tiny_args(self.tokenizer, chat_template=self.template, **engine)
            with mock_llm(tiny, replies=self.replies) as llm:
                yield llm if self.pooling is None else PooledEngine(llm, self.pooling)  # type: ignore[misc]

        return run_batch.run(make_parser()[0].parse_args(command), start)


@pytest.fixture
def batches(tmp_path: Path, tokenizer: str) -> Batches:
    return Batches(tmp_path, tokenizer)


def test_answers_have_the_form_of_batches_and_the_order_of_the_requests(batches: Batches):
    assert batches.run([chat("a"), completion("b", prompt=["x", "y"]), chat("c", model="tiny")]) == 0
    first, second, third = read_jsonl(batches.output)
    assert [each["custom_id"] for each in (first, second, third)] == ["a", "b", "c"]
    assert [each["error"] for each in (first, second, third)] == [None] * 3
    assert first["id"] == first["response"]["request_id"] != second["id"]
    assert first["response"]["status_code"] == 200
    body = first["response"]["body"]
    assert (body["object"], body["model"], body["usage"]["completion_tokens"]) == ("chat.completion", "tiny", 4)
    assert body["choices"][0]["message"]["content"]
    assert [each["index"] for each in second["response"]["body"]["choices"]] == [0, 1]


BAD: dict[str, tuple[Any, int, str | None]] = {
    "no JSON": ("{", 400, None),
    "no custom_id": ({"url": run_batch.CHAT_URL, "body": {}}, 400, None),
    "another URL": (chat("x", url="/v1/nothing"), 400, "url"),
    "a URL of another model": (chat("x", url="/v1/embeddings"), 400, None),
    "another method": (chat("x") | {"method": "GET"}, 400, "method"),
    "another model": (chat("x", model="other"), 404, "model"),
    "a stream": (chat("x", stream=True), 400, "stream"),
    "a field out of bounds": (chat("x", temperature=-1), 400, "temperature"),
    "a field of another type": (completion("x", max_tokens="many"), 400, "max_tokens"),
    "a template": (chat("x", chat_template="{{ 1 }}"), 400, "chat_template"),
    "a response in the background": (response("x", background=True), 400, "background"),
    "a response after another": (response("x", previous_response_id="resp_x"), 404, "previous_response_id"),
}


def test_a_bad_line_hurts_only_itself(batches: Batches, capsys: pytest.CaptureFixture[str]):
    lines = [line for line, _, _ in BAD.values()]
    assert batches.run([*lines, chat("good")]) == 0  # as vLLM's: the errors are in their lines
    *records, good = read_jsonl(batches.output)
    for name, record, (line, status, parameter) in zip(BAD, records, BAD.values(), strict=True):
        assert record["response"]["status_code"] == status, name
        assert record["error"] == record["response"]["body"]["error"], name
        assert record["error"]["param"] == parameter, name
        assert record["custom_id"] == (line.get("custom_id") if isinstance(line, dict) else None), name
    assert good["error"] is None
    assert f"{len(BAD)} of {len(BAD) + 1} requests failed" in capsys.readouterr().err


def test_responses(batches: Batches):
    assert batches.run([response("a"), response("b", store=True, instructions="x")]) == 0
    for record in read_jsonl(batches.output):
        assert record["error"] is None
        body = record["response"]["body"]
        assert (body["object"], body["store"], body["usage"]["output_tokens"]) == ("response", False, 4)


def test_decisions(batches: Batches):
    """A batch's decisions are those of another form, with the ids of the lines."""
    noul = {"type": "noul", "instructions": "Is it?"}
    predicate = {"type": "predicate", "instructions": "Is it?", "name": "a"}
    lines = [
        {"custom_id": "a", "url": run_batch.SYSTEMONE_URL, "body": {"state": "x", "questions": {"a": noul}}},
        {"custom_id": "b", "url": run_batch.DECISION_URL, "body": {"input": "x", "questions": [predicate]}},
        {"custom_id": "c", "url": run_batch.SYSTEMONE_URL, "body": {"state": "x", "questions": {"a": {"type": "a"}}}},
        {"custom_id": "d", "url": run_batch.DECISION_URL, "body": {"input": "x", "questions": []}},
    ]
    assert batches.run(lines) == 0
    systemone, decision, *failed = read_jsonl(batches.output)
    assert [each["response"]["status_code"] for each in (systemone, decision)] == [200, 200], (systemone, decision)
    answer = systemone["response"]["body"]["answers"]["a"]
    assert 0 <= answer["noul"] <= 1
    assert decision["response"]["body"]["answers"]
    assert [each["error"]["param"] for each in failed] == ["questions"] * 2


def test_the_file_that_is_named_is_written(batches: Batches):
    real = batches.folder / "real.jsonl"
    real.write_text("x" * 10_000)
    batches.output.symlink_to(real)
    with real.open() as reader:
        assert batches.run([chat("a")]) == 0
        assert json.loads(reader.read())["custom_id"] == "a"
    assert batches.output.is_symlink()
    assert not list(batches.folder.glob("*.partial.jsonl"))


def test_calls_are_read_as_the_flags_say(batches: Batches):
    replies = batches.folder / "replies.json"
    replies.write_text(json.dumps([{"prompt": "hello", "reply": f"<think>Hm.</think>\n\n{CALL}"}]))
    batches.replies, batches.template = str(replies), TOOL_TEMPLATE
    words = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    line = chat("a", tools=[TOOL], max_tokens=300)
    long = {"hf_overrides": {"max_position_embeddings": 4096}}
    assert batches.run([line], *words, **long) == 0
    message = read_jsonl(batches.output)[0]["response"]["body"]["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "get_weather"
    assert message["reasoning"] == "Hm."
    assert batches.run([line], "--tool-call-parser", "llama3_json", **long) == 0
    message = read_jsonl(batches.output)[0]["response"]["body"]["choices"][0]["message"]
    assert "<tool_call>" in message["content"]
    with pytest.raises(VLLMValidationError, match="nothing"):
        batches.run([line], "--tool-call-parser", "nothing")


def test_metrics(batches: Batches, monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = str(taken.getsockname()[1])
        with pytest.raises(VLLMValidationError, match="--port"):
            batches.run([chat("a")], "--enable-metrics", "--host", "127.0.0.1", "--port", busy)
    told: list[str] = []
    seen: list[str] = []
    record = run_batch.Answers.record
    monkeypatch.setattr(run_batch, "say", told.append)

    async def asked(self: run_batch.Answers, job: Any, request_id: str) -> Any:
        answer = await record(self, job, request_id)
        port = told[0].rpartition(" ")[2].removesuffix(".")
        reading = await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{port}/metrics")
        with reading:
            seen.append(reading.read().decode())
        return answer

    monkeypatch.setattr(run_batch.Answers, "record", asked)
    words = ("--enable-metrics", "--host", "127.0.0.1", "--port", "0", "--max-inflight", "1")
    assert batches.run([chat("a"), chat("b")], *words) == 0
    first, second = seen
    assert re.search(r"^vllm:generation_tokens_total\{.*\} 4.0$", first, re.MULTILINE)
    assert re.search(r"^vllm:generation_tokens_total\{.*\} 8.0$", second, re.MULTILINE)


def test_models_that_pool_have_urls_of_their_own(batches: Batches):
    batches.pooling = EMBED
    bodies = {
        "/v1/embeddings": {"input": ["x", "y"], "encoding_format": "base64"},
        "/v1/score": {"text_1": "x", "text_2": ["y", "x"]},
        "/v2/rerank": {"query": "x", "documents": ["y", "x"]},
    }
    lines = [{"custom_id": url, "method": "POST", "url": url, "body": body} for url, body in bodies.items()]
    assert batches.run([*lines, chat("a chat")]) == 0
    embedded, scored, reranked, refused = read_jsonl(batches.output)
    assert [each["error"] for each in (embedded, scored, reranked)] == [None] * 3
    assert [len(each["embedding"]) for each in embedded["response"]["body"]["data"]] == [88, 88]
    assert scored["response"]["body"]["data"][1]["score"] == pytest.approx(1)
    assert [each["index"] for each in reranked["response"]["body"]["results"]] == [1, 0]
    assert refused["error"]["message"] == "The model does not support Chat Completions API"
    plain = {"custom_id": "x", "url": "/v1/embeddings", "body": {"input": "x"}}
    batches.output.unlink()
    assert batches.run([plain]) == 0
    assert len(read_jsonl(batches.output)[0]["response"]["body"]["data"][0]["embedding"]) == 16


def test_a_run_goes_on_where_it_was_killed(batches: Batches, monkeypatch: pytest.MonkeyPatch):
    lines = [completion(str(i), temperature=1.0) for i in range(12)]
    assert batches.run(lines) == 0
    whole = [each["response"]["body"]["choices"] for each in read_jsonl(batches.output)]
    batches.output.unlink()
    put, done = Journal.put, []

    def put_five(journal: Journal, index: int, record: dict[str, Any]) -> None:
        if len(done) == 5:
            raise KeyboardInterrupt
        put(journal, index, record)
        done.append(index)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "put", put_five)
        assert batches.run(lines) == 130
    assert not batches.output.exists()
    answered: list[int] = []

    def put_all(journal: Journal, index: int, record: dict[str, Any]) -> None:
        put(journal, index, record)
        answered.append(index)

    monkeypatch.setattr(Journal, "put", put_all)
    assert batches.run(lines) == 0
    assert sorted([*done, *answered]) == list(range(12))
    assert [each["response"]["body"]["choices"] for each in read_jsonl(batches.output)] == whole


def test_a_busy_engine_is_waited_for(batches: Batches):
    assert batches.run([chat(str(i), max_tokens=2) for i in range(20)], max_num_queued_reqs=2) == 0
    assert len(read_jsonl(batches.output)) == 20


def test_an_engine_that_ends_stops_the_run(
    batches: Batches, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    async def die(*_: Any) -> Any:
        raise EngineDeadError("The engine has ended.")

    monkeypatch.setattr(run_batch.Answers, "_answer", die)
    assert batches.run([chat("a"), chat("b")]) == 3
    assert "0 of 2 requests are done. Start the same command again" in capsys.readouterr().err
    assert not batches.output.exists()


def test_misuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = str(write_jsonl(tmp_path / "in.jsonl", [chat("a")]))
    for words, message in (
        (["-o", "x"], "--input-file"),
        (["-i", source], "--output-file"),
        (["-i", source, "-o", source], "must not be the input file"),
        (["-i", str(tmp_path / "none.jsonl"), "-o", "x"], "--input-file"),
        (["-i", source, "-o", "x", "--max-inflight", "0"], "max_inflight"),
    ):
        assert main(["run-batch", "m", *words]) == 2
        assert message in capsys.readouterr().err


def test_prompts_times_n_are_bounded_as_by_a_server(batches: Batches):
    assert batches.run([completion("a", prompt=["x"] * 1024, n=16_384), completion("b")]) == 0
    refused, answered = read_jsonl(batches.output)
    assert (refused["response"]["status_code"], refused["error"]["param"]) == (400, "n")
    assert answered["error"] is None
