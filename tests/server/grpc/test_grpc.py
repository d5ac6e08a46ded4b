"""gRPC answers what HTTP answers, takes the same keys, and sees the same limits."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.grpc import fields, inference_pb2
from jaxllm.server.grpc.authentication import OPEN_METHODS
from jaxllm.server.grpc.conversion import PROMPT, completion_request
from jaxllm.server.grpc.inference_pb2 import DESCRIPTOR, GenerateRequest
from jaxllm.server.grpc.service import SERVICE
from jaxllm.server.openai.completion_protocol import CompletionRequest
from tests.async_engine.support import metric, mock_llm, tiny_args
from tests.server.grpc_support import Client, client_of, grpc_opened, message_of, refusal
from tests.server.support import Served, mock_served, served

SERVICES = {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
LONG = {"prompt": [5], "max_tokens": 400, "ignore_eos": True}
KINDS: list[dict[str, Any]] = [
    {"max_tokens": 8, "seed": 7},
    {"max_tokens": 8, "seed": 7, "n": 3, "temperature": 0.9},
    {"max_tokens": 30, "seed": 7, "stop": ["e", "a"], "include_stop_str_in_output": True},
    {"max_tokens": 30, "seed": 7, "prompt": [5, 6, 7], "stop_token_ids": list(range(60, 200))},
]


@pytest.fixture(scope="module")
def client(mock_server: Served) -> Iterator[Client]:
    with grpc_opened(mock_server) as address, client_of(address) as client:
        yield client


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def shown(outputs: list[Any]) -> list[tuple[Any, ...]]:
    """Return what HTTP's choices and gRPC's outputs have in common, of outputs that are whole."""
    return [(each["text"], each["token_ids"], each["finish_reason"], each["stop_reason"]) for each in outputs]


def joined(messages: list[Any]) -> list[dict[str, Any]]:
    """Return the outputs of all the pieces of a stream, each like one of HTTP's choices."""
    whole: dict[int, dict[str, Any]] = {}
    for output in (each for message in messages for each in message.outputs):
        choice = whole.setdefault(
            output.index, {"text": "", "token_ids": [], "finish_reason": None, "stop_reason": None}
        )
        choice["text"] += output.text
        choice["token_ids"] += output.token_ids
        if output.HasField("finish_reason"):
            kind = output.WhichOneof("stop_reason")
            choice |= {"finish_reason": output.finish_reason, "stop_reason": kind and getattr(output, kind)}
    return [whole[index] for index in sorted(whole)]


@pytest.mark.parametrize("parameters", KINDS)
def test_both_methods_answer_what_http_does(mock_server: Served, client: Client, parameters: dict[str, Any]) -> None:
    fields = {"prompt": "ab", "return_token_ids": True, **parameters}
    answer = mock_server.post("/v1/completions", fields).json
    whole = client.whole(message_of(fields))
    assert shown(joined([whole])) == shown(answer["choices"])
    pieces = list(client.stream(message_of(fields)))
    assert shown(joined(pieces)) == shown(answer["choices"])
    assert len(pieces) > 1
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    for message in (whole, pieces[-1]):
        assert {name: getattr(message.usage, name) for name in names} == {name: answer["usage"][name] for name in names}
    for message in (whole, pieces[0]):
        assert list(message.prompt_info.token_ids) == answer["choices"][0]["prompt_token_ids"]
        assert message.prompt_info.model == answer["model"]
    assert not any(message.HasField("prompt_info") for message in pieces[1:])
    assert not any(message.HasField("usage") for message in pieces[:-1])


@pytest.mark.server
def test_log_probabilities_are_https_to_the_bit(tiny_server: Served) -> None:
    fields = {"prompt": [30, 31, 32], "temperature": 0.0, "max_tokens": 4, "logprobs": 2, "prompt_logprobs": 1}
    [choice] = tiny_server.post("/v1/completions", fields).json["choices"]
    with grpc_opened(tiny_server) as address, client_of(address) as client:
        whole = client.whole(message_of(fields))
        del fields["prompt_logprobs"]
        pieces = list(client.stream(message_of(fields)))
    positions = whole.outputs[0].logprobs
    assert [each.tokens[0].logprob for each in positions] == choice["logprobs"]["token_logprobs"]
    tops = [{token.token: token.logprob for token in reversed(each.tokens)} for each in positions]
    assert tops == choice["logprobs"]["top_logprobs"]
    assert [position for each in pieces for position in each.outputs[0].logprobs] == list(positions)
    scores = [
        {
            str(each.token_id): {"logprob": each.logprob, "rank": each.rank, "decoded_token": each.token}
            for each in tokens
        }
        or None
        for tokens in (position.tokens for position in whole.prompt_info.logprobs)
    ]
    assert scores == choice["prompt_logprobs"]


def test_a_request_has_the_clients_id_if_it_is_well_formed(client: Client) -> None:
    def id_of(requested: str, *metadata: tuple[str, str]) -> str:
        fields = {"prompt": "a", "max_tokens": 1, "request_id": requested}
        return client.whole(message_of(fields), metadata).prompt_info.request_id

    assert id_of("mine") == "mine"
    assert id_of("mine", ("x-request-id", "other")) == "other"
    assert re.fullmatch("[0-9a-f]{32}", id_of("not mine\n", ("x-request-id", "nor this")))


def test_fields_have_the_names_that_they_have_over_http() -> None:
    """What is left out has another form here, or none: one that is new over HTTP has to be thought of."""
    http = {field.name for field in msgspec.structs.fields(CompletionRequest)}
    names = {field.name for field in GenerateRequest.DESCRIPTOR.fields} - set(PROMPT)
    assert http - names == {
        *("prompt", "echo", "stream", "stream_options", "response_format", "use_beam_search", "length_penalty"),
        *("return_tokens_as_token_ids", "session_id", "user", "best_of", "prompt_embeds"),
    }
    assert names <= http


def test_values_of_logits_processors_are_those_of_json() -> None:
    values = {"a": 1, "b": [1.5, "x", None, True], "c": {"d": -3}}
    request = completion_request(GenerateRequest(text="a", vllm_xargs=values).SerializeToString(), stream=False)
    assert request.vllm_xargs == values
    assert isinstance((request.vllm_xargs or {})["a"], int)


def test_what_is_generated_is_of_the_file_beside_it() -> None:
    """If not, run scripts/make/grpc.sh."""
    text = Path(inference_pb2.__file__).with_name("inference.proto").read_text()
    written = set(re.findall(r"^ +(?:optional |repeated )?[\w.]+(?:<.*>)? (\w+) = (\d+);", text, re.MULTILINE))
    messages = DESCRIPTOR.message_types_by_name.values()
    assert written == {(field.name, str(field.number)) for message in messages for field in message.fields}


def methods_of(client: Client, metadata: list[tuple[str, str]]) -> list[MethodDescriptor]:
    """Return every method of every service that reflection tells of."""
    database = ProtoReflectionDescriptorDatabase(_WithMetadata(client.channel, metadata))  # type: ignore[arg-type]
    services = set(database.get_services())
    assert services == SERVICES
    pool = DescriptorPool(database)
    return [method for name in services for method in pool.FindServiceByName(name).methods]


class _WithMetadata:
    """A channel whose streams, which reflection needs, bring metadata."""

    def __init__(self, channel: grpc.Channel, metadata: list[tuple[str, str]]) -> None:
        self._channel, self._metadata = channel, metadata

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        call = self._channel.stream_stream(*args, **kwargs)
        return lambda requests: call(requests, metadata=tuple(self._metadata))


def test_reflection_tells_of_all_services(client: Client) -> None:
    methods = methods_of(client, [])
    (method,) = (each for each in methods if each.full_name == f"{SERVICE}.Generate")
    assert [field.name for field in method.input_type.fields] == [f.name for f in GenerateRequest.DESCRIPTOR.fields]


def call(client: Client, path: str, *metadata: tuple[str, str]) -> grpc.StatusCode:
    """Return the status of a call of whatever kind with one empty message."""
    answers = client.channel.stream_stream(path)(iter([b""]), timeout=2, metadata=metadata)
    try:
        for _ in answers:
            answers.cancel()
            return grpc.StatusCode.OK
    except grpc.RpcError as error:
        failed: Any = error
        return failed.code()
    return grpc.StatusCode.OK


WRONG = ["", "Bearer", "Bearer ", "key", "Basic key", "Bearer ke", "Bearer keys"]


def test_r17_every_method_needs_a_key(mock: AsyncLLM) -> None:
    key = ("authorization", "Bearer key")
    with served(mock, "--api-key", "key") as server, grpc_opened(server) as address, client_of(address) as client:
        paths = [f"/{each.containing_service.full_name}/{each.name}" for each in methods_of(client, [key])]
        assert set(paths) > OPEN_METHODS
        for path in [*paths, "/nothing", f"/{SERVICE}/Nothing", "/grpc.health.v1.Health/check", f"{SERVICE}/Generate"]:
            is_open = path in OPEN_METHODS
            for metadata in ((), *((("authorization", wrong),) for wrong in WRONG), (key, key)):
                assert (call(client, path, *metadata) is grpc.StatusCode.UNAUTHENTICATED) is not is_open, path
            assert call(client, path, key) is not grpc.StatusCode.UNAUTHENTICATED, path


def test_r16_what_a_client_sends_is_bounded(tokenizer: str) -> None:
    words = ("--max-body-size", "4096", "--h11-max-incomplete-event-size", "2048")
    with mock_served(tokenizer, *words) as server, grpc_opened(server) as address, client_of(address) as client:
        good = {"prompt": "a", "max_tokens": 1}
        assert client.whole(message_of(good), [("x", "a" * 1000)]).usage.completion_tokens == 1
        for failed in (
            refusal(lambda: client.whole(message_of({**good, "request_id": "a" * 4096}))),
            refusal(lambda: client.whole(message_of(good), [("x", "a" * 2048)])),
        ):
            assert failed[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        packed = client.channel.unary_unary(f"/{SERVICE}/Generate")
        code, _, _ = refusal(lambda: packed(b"\0" * 100_000, compression=grpc.Compression.Gzip))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_what_is_no_message_is_refused(client: Client) -> None:
    method = client.channel.unary_unary(f"/{SERVICE}/Generate")
    assert refusal(lambda: method(b"\xff\xff"))[0] is grpc.StatusCode.INVALID_ARGUMENT
    nested = json_format.ParseDict({}, GenerateRequest(text="a"))
    value = nested.vllm_xargs
    for _ in range(200):
        value = value.get_or_create_struct("a")
    assert refusal(lambda: client.whole(nested))[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_r24_a_fault_is_told_in_general_words(
    mock_server: Served, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        raise RuntimeError("<object at 0x7f12345678>, /etc/passwd")

    monkeypatch.setattr(mock_server.app.state.openai_serving_completion, "admit", fail)
    code, details, metadata = refusal(lambda: client.whole(message_of(LONG)))
    assert (code, details) == (grpc.StatusCode.INTERNAL, "The server could not answer this request.")
    assert metadata == {"x-should-retry": "false"}


def test_r24_an_error_is_short_enough_for_every_client(client: Client) -> None:
    """Beyond 8 KiB of headers a client may see another error in its place."""
    code, details, metadata = refusal(lambda: client.whole(message_of({**LONG, "model": "\N{DRAGON}" * 5000})))
    assert (code, metadata["param"]) == (grpc.StatusCode.NOT_FOUND, "model")
    assert details.startswith("The model `\N{DRAGON}")


@pytest.mark.parametrize("name", ["Generate", "GenerateStream"])
def test_r5_a_request_whose_client_leaves_is_aborted(
    mock: AsyncLLM, mock_server: Served, client: Client, name: str
) -> None:
    before = metric(mock, "request_success", finished_reason="abort")
    answering = client.channel.stream_stream(f"/{SERVICE}/{name}")(iter([message_of(LONG).SerializeToString()]))
    until(lambda: mock_server.get("/load").json == {"server_load": 1})
    answering.cancel()
    until(lambda: mock_server.get("/load").json == {"server_load": 0})
    until(lambda: mock.front.outputs.num_unfinished_requests == 0)
    assert metric(mock, "request_success", finished_reason="abort") == before + 1


def test_a_request_whose_client_does_not_read_is_aborted(tokenizer: str) -> None:
    with (
        mock_served(tokenizer, "--stalled-client-timeout", "0.3", tokens_per_second=200) as server,
        grpc_opened(server) as address,
        client_of(address, options=[("grpc.http2.bdp_probe", 0)]) as client,  # which would let more be sent
    ):
        stalled = client.stream(message_of({**LONG, "n": 16, "logprobs": 20, "stream_interval": 1}))
        assert next(stalled).HasField("prompt_info")
        until(lambda: server.get("/load").json == {"server_load": 0})
        assert server.llm.front.outputs.num_unfinished_requests == 0
        assert metric(server.llm, "request_success", finished_reason="abort") == 16
        stalled.cancel()


def test_answers_are_counted(mock_server: Served, client: Client) -> None:
    def counts() -> list[float]:
        shown = mock_server.get("/metrics").body.decode()
        kinds = ('Generate",method="POST",status="2xx"', 'GenerateStream",method="POST",status="4xx"')
        matches = [re.search(rf'^http_requests_total{{handler="grpc:{kind}}} (.*)$', shown, re.M) for kind in kinds]
        return [float(each[1]) if each else 0.0 for each in matches]

    whole, refused = counts()
    client.whole(message_of({"prompt": "a", "max_tokens": 1}))
    refusal(lambda: list(client.stream(message_of({"prompt": ""}))))
    assert counts() == [whole + 1, refused + 1]


def test_ids_are_bounded_before_they_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "MAX_VALUES", 3)
    data = message_of({"prompt": [5, 6, 7]}).SerializeToString()
    assert completion_request(data, stream=False).prompt == [5, 6, 7]
    data = message_of({"prompt": [5, 6, 7, 8]}).SerializeToString()
    with pytest.raises(VLLMValidationError, match="token_ids must have at most 3 entries, got 4"):
        completion_request(data, stream=False)


def test_health_says_whether_requests_are_taken(tokenizer: str) -> None:
    """While the server drains, the engine sleeps, or has ended, none are; an overload does not count."""
    args = tiny_args(tokenizer, max_num_queued_reqs=1)
    with (
        mock_llm(args, tokens_per_second=1000) as llm,
        served(llm) as server,
        grpc_opened(server) as address,
        client_of(address) as client,
    ):
        health: Any = HealthStub(client.channel)
        watched = health.Watch(HealthCheckRequest(service=SERVICE))

        def is_serving() -> bool:
            statuses = {health.Check(HealthCheckRequest(service=name)).status for name in ("", SERVICE)}
            (status,) = statuses
            assert next(watched).status == status
            return status == HealthCheckResponse.SERVING

        def run(step: Any) -> None:
            asyncio.run_coroutine_threadsafe(step, server.loop).result(10)

        def refused() -> tuple[grpc.StatusCode, str, dict[str, str]]:
            return refusal(lambda: client.whole(message_of({"prompt": "a"})))

        unavailable = (grpc.StatusCode.UNAVAILABLE, "1")
        assert is_serving()
        running = client.stream(message_of(LONG))
        next(running)
        code, details, metadata = refused()
        assert (code, metadata["retry-after"]) == unavailable
        assert "max_num_queued_reqs" in details
        running.cancel()
        until(lambda: server.get("/load").json == {"server_load": 0})
        server.app.state.load.is_draining = True
        assert not is_serving()
        code, details, metadata = refused()
        assert (code, metadata["retry-after"]) == unavailable
        assert "about to end" in details
        server.app.state.load.is_draining = False
        assert is_serving()
        run(llm.sleep())
        assert not is_serving()
        code, details, metadata = refused()
        assert (code, metadata["retry-after"]) == unavailable
        assert "sleeps" in details
        run(llm.wake_up())
        assert is_serving()
        assert client.whole(message_of({"prompt": "a", "max_tokens": 3})).usage.completion_tokens == 3
        llm.shutdown()
        assert not is_serving()
        assert refused()[:2] == (grpc.StatusCode.INTERNAL, "The engine has ended.")
        code, _, _ = refusal(lambda: health.Check(HealthCheckRequest(service="nothing")))
        assert code is grpc.StatusCode.NOT_FOUND
        watched.cancel()
