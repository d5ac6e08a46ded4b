"""Messages between a front end and its core are frames; errors about malformed ones name the request."""

from __future__ import annotations

import array
import math
from typing import Any

import msgspec
import pytest

from jaxllm.core_messages import (
    BlockEviction,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    MediaItem,
    MediaSpan,
    PromptLogprobs,
    PromptMedia,
    RequestError,
    TokenLogprobs,
)
from jaxllm.engine.transport import wire
from jaxllm.engine.transport.wire import (
    Abort,
    Add,
    Call,
    Failure,
    FrameError,
    FromCore,
    Heartbeat,
    Release,
    Reply,
    Shutdown,
    Starting,
    ToCore,
    decode_from_core,
    decode_to_core,
    encode_from_core,
    encode_to_core,
)
from jaxllm.params.structured_outputs import StructuredOutputsParams
from jaxllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams
from tests.engine.fake_core import FakeCore
from tests.engine.support import byte_level, make_ready

STATS = FakeCore(lambda _: []).stats()
EVERYTHING: dict[str, Any] = {
    "n": 3,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "seed": -(2**63),
    "stop": ["é🎉", "END"],
    "stop_token_ids": [5, 6],
    "bad_words": ["bad"],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "max_tokens": 9,
    "min_tokens": 2,
    "logprobs": 3,
    "prompt_logprobs": 2,
    "prompt_logprob_token_ids": [[1, 2], [3, 4]],
    "prompt_logprob_start": 1,
    "flat_logprobs": True,
    "skip_special_tokens": False,
    "output_kind": RequestOutputKind.DELTA,
    "logit_bias": {3: -100.0, 7: 0.25},
    "allowed_token_ids": [3, 4, 5],
    "extra_args": {"scale": 2.5, "deep": {"a": [1, None, True]}},
    "structured_outputs": StructuredOutputsParams(json={"type": "object"}, disable_any_whitespace=True),
    "repetition_detection": RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=1, min_count=3),
    "thinking_token_budget": 5,
    "stream_interval": 4,
}
"""These fields go together."""
THE_REST: dict[str, Any] = {
    "detokenize": False,
    "logprob_token_ids": [7, 1],
    "skip_clone": True,
    "skip_reading_prefix_cache": True,
    "spaces_between_special_tokens": False,
}


def request(**changes: Any) -> EngineCoreRequest:
    fields: dict[str, Any] = {
        "request_id": "12",
        "prompt_token_ids": [0, 1, 2**31 - 1],
        "sampling_params": SamplingParams(),
        "eos_token_id": 2,
        "max_tokens": 16,
        "seed": 2**64 - 1,
        "arrival_time": 1.5e9,
    }
    return EngineCoreRequest(**(fields | changes))


def resolved() -> SamplingParams:
    """Make params that differ from the defaults in every field, with what the front end adds."""
    params = SamplingParams(**EVERYTHING)
    params._eos_token_id = 2
    params._all_stop_token_ids = {5, 6, 2}
    params._bad_words_token_ids = [[1, 2], [3]]
    return params


def item(key: bytes, offset: int, patches: bytes) -> MediaItem:
    spans = [MediaSpan(offset, 2, 0), MediaSpan(offset + 3, 2, 2)]
    grids = [(1, 2, 4), (1, 4, 2)]
    return MediaItem(key=key, modality="image", grids=grids, size=(30, 60), patches=patches, spans=spans)


MEDIA = PromptMedia(
    items=[item(b"\x00\xff", 1, bytes(range(256)) * 12), msgspec.structs.replace(item(b"b", 7, b""), is_encoded=True)],
    rope_positions=array.array("i", [0, 2**31 - 1, -1]).tobytes(),
    rope_offset=-7,
)
TO_CORE: list[ToCore] = [
    Add(request()),
    Add(request(prompt_token_ids=list(range(100_000)), priority=-7, cache_salt="mine", fork_of="3", keeps_blocks=True)),
    Add(request(sampling_params=resolved(), eos_token_id=None)),
    Add(request(sampling_params=SamplingParams(**THE_REST))),
    Add(request(prompt_token_ids=[1] * 12, media=MEDIA)),
    Add(request(media=PromptMedia(items=[]))),
    Abort(["1", "1#2"]),
    Abort([]),
    Release(["0.1.2"]),
    Call(2**40, "check", [{"temperature": 0.5}, None]),
    Shutdown(),
]
OUTPUT = EngineCoreOutput(
    request_id="1#2",
    new_token_ids=[1, 2],
    new_logprobs=[TokenLogprobs([1, 2], [-0.1, -math.inf], 1)],
    new_prompt_logprobs=PromptLogprobs(3, [TokenLogprobs([4], [-2.5], 9)]),
    finish_reason="error",
    stop_reason=5,
    error=RequestError("invalid", "no such rule", "structured_outputs"),
    is_admitted=True,
    num_cached_tokens=16,
    num_preemptions=2,
    queued_ts=1.5,
    scheduled_ts=2.5,
)
OUTPUTS = EngineCoreOutputs(
    outputs=[OUTPUT, EngineCoreOutput(request_id="2", stop_reason="repetition_detected")],
    stats=STATS,
    timestamp=7.25,
    evictions=[BlockEviction(lifetime=5.0, idle=2.0, reuse_gaps=[0.5, 1.5])],
    num_deferred_reqs=3,
)
FROM_CORE: list[FromCore] = [
    OUTPUTS,
    make_ready(generation_config={"eos_token_id": [1, 2]}, extra_args={"by": 2.0, "to": 3}, has_validators=True),
    Starting(None),
    Starting(byte_level().parts),
    Reply(3, {"any": ["thing", None]}),
    Reply(3, error=RequestError("internal", "RuntimeError: no")),
    Heartbeat(0.25, True, False),
    Failure(RequestError("internal", "it fell over")),
]


@pytest.mark.parametrize("message", TO_CORE, ids=lambda message: type(message).__name__)
def test_what_goes_to_the_core_arrives(message: ToCore) -> None:
    received = decode_to_core(encode_to_core(message))
    assert received == message
    if isinstance(message, Add) and isinstance(received, Add):
        sent, got = message.request.sampling_params, received.request.sampling_params
        assert (got.all_stop_token_ids, got.bad_words_token_ids) == (sent.all_stop_token_ids, sent.bad_words_token_ids)
        assert all(type(each) is int for each in received.request.prompt_token_ids)


def test_every_field_of_the_params_is_sent() -> None:
    """One that is new would be at its default in all of the above."""
    usual, names = SamplingParams(), {field.name for field in msgspec.structs.fields(SamplingParams)}
    sent = [SamplingParams(**EVERYTHING), SamplingParams(**THE_REST)]
    unchanged = {name for name in names if all(getattr(each, name) == getattr(usual, name) for each in sent)}
    derived = {"_eos_token_id", "_all_stop_token_ids", "_bad_words_token_ids", "output_text_buffer_length"}
    assert unchanged - derived == {"watermarking", "trace_decode_token_ids", "routed_experts_prompt_start"}, "refused"


@pytest.mark.parametrize("message", FROM_CORE, ids=lambda message: type(message).__name__)
def test_what_comes_from_the_core_arrives(message: FromCore) -> None:
    assert decode_from_core(encode_from_core(message)) == message


def test_a_new_request_has_its_id_and_its_prompt_in_frames_of_their_own() -> None:
    """So a body that cannot be read ends its request, and prompts are not parsed number by number."""
    name, body, prompt = encode_to_core(Add(request()))
    assert name == b"12"
    assert array.array("i", prompt).tolist() == [0, 1, 2**31 - 1]
    assert len(body) < 350


def test_each_picture_has_a_frame_of_its_own() -> None:
    _, body, _, *patches = encode_to_core(Add(request(media=MEDIA)))
    assert patches == [item.patches for item in MEDIA.items]
    assert len(body) < 600


def test_patches_cross_in_frames_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 1024)
    monkeypatch.setattr(wire, "_MAX_PATCH_BYTES", 1000)
    sizes = [3072, 0, 1000, 1001]
    items = [item(bytes([n]), 6 * n, bytes([n]) * size) for n, size in enumerate(sizes)]
    message = Add(request(media=PromptMedia(items=items)))
    frames = encode_to_core(message)
    assert [len(frame) for frame in frames[3:]] == [1000, 1000, 1000, 72, 0, 1000, 1000, 1]
    assert decode_to_core(frames) == message
    for wrong in (frames[:-1], [*frames, b""], [*frames[:3], *frames[5:]]):
        with pytest.raises(FrameError) as error:
            decode_to_core(wrong)
        assert error.value.request_id == message.request.request_id


def with_counts(num_frames: list[int]) -> list[bytes | memoryview]:
    """Return the frames of a request with two items, with other numbers of frames."""
    name, body, *rest = encode_to_core(Add(request(request_id="7", media=MEDIA)))
    tag, head, _ = msgspec.msgpack.decode(body)
    return [name, msgspec.msgpack.encode([tag, head, num_frames]), *rest]


NO_MESSAGES: dict[str, list[bytes | memoryview]] = {
    "no counts": with_counts([]),
    "a count of none": with_counts([2, 0]),
    "a negative count": with_counts([3, -1]),
    "a count too large": with_counts([1, 2**62]),
    "a count too many": with_counts([1, 1, 0]),
    "both in one": with_counts([2]),
    "nothing": [],
    "an id alone": [b"7"],
    "no msgpack": [b"7", b"\xc1"],
    "half a message": [b"7", encode_to_core(Add(request()))[1][:-3]],
    "no prompt": [b"7", *encode_to_core(Add(request(request_id="7")))[1:2]],
    "half a token": [b"7", encode_to_core(Add(request(request_id="7")))[1], b"\x01\x02"],
    "no picture": [b"7", *encode_to_core(Add(request(request_id="7", media=MEDIA)))[1:-1]],
    "a picture too many": [b"7", *encode_to_core(Add(request(request_id="7", media=MEDIA)))[1:], b""],
    "another one's name": [b"7", *encode_to_core(Add(request(request_id="8")))[1:]],
    "an unknown kind": [b"7", msgspec.msgpack.encode(["do", 1])],
    "a message of the core's": [b"7", encode_from_core(Heartbeat(0.0, False, True))],
    "wrong types": [b"7", msgspec.msgpack.encode(["abort", [1, 2]])],
    "lists in lists": [b"7", b"\x91" * 100_000],
    "broken text": [b"7", b"\x92\xa5abort\x91\xa2\xff\xfe"],
}


@pytest.mark.parametrize("case", NO_MESSAGES)
def test_what_is_no_message_names_its_request(case: str) -> None:
    with pytest.raises(FrameError) as error:
        decode_to_core(NO_MESSAGES[case])
    assert error.value.request_id == ("7" if case != "nothing" else "")
    with pytest.raises(FrameError):
        decode_to_core([b"\xff\xfe", *NO_MESSAGES[case][1:]])


@pytest.mark.parametrize("frame", [b"", b"\xc1", encode_from_core(OUTPUTS)[:-1], encode_to_core(Shutdown())[1]])
def test_what_is_no_message_from_the_core(frame: bytes) -> None:
    with pytest.raises(FrameError):
        decode_from_core(frame)


def test_frames_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = encode_from_core(make_ready())
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", len(ready))
    assert encode_from_core(make_ready()) == ready
    most = len(ready) // 4
    assert len(encode_to_core(Add(request(prompt_token_ids=[1] * most)))[2]) == 4 * most
    with pytest.raises(FrameError, match=f"it takes {4 * most + 4} bytes, and at most {len(ready)} cross") as error:
        encode_to_core(Add(request(prompt_token_ids=[1] * (most + 1))))
    assert error.value.request_id == "12"
    with pytest.raises(FrameError, match="at most"):
        encode_from_core(Reply(1, "x" * len(ready)))
