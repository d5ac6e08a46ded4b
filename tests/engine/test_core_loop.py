"""A core's loop does what messages say, and what one message or one output has wrong ends its own request only."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from jaxllm.core_messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, RequestError
from jaxllm.engine.core import core_loop
from jaxllm.engine.core.core_loop import CoreLoop, Heart
from jaxllm.engine.transport import wire
from jaxllm.engine.transport.wire import (
    Abort,
    Add,
    Call,
    FrameError,
    FromCore,
    Heartbeat,
    Release,
    Reply,
    Shutdown,
    ToCore,
)
from jaxllm.exceptions import VLLMValidationError
from jaxllm.sampling_params import SamplingParams
from tests.engine.fake_core import FakeCore, FrameInbox, FrameOutbox


class LastInbox(FrameInbox):
    """Ends the core that has nothing more to do."""

    def receive(self, *, wait: bool) -> list[ToCore | FrameError]:
        if wait and not self.frames:
            self.put(Shutdown())
        return super().receive(wait=wait)


class Outbox(FrameOutbox):
    """Keeps the messages in order."""

    @property
    def messages(self) -> list[FromCore]:
        return [self.take() for _ in range(len(self.frames))]


def make(**options: Any) -> tuple[FakeCore, LastInbox, Outbox, CoreLoop]:
    core, inbox, outbox = FakeCore(lambda _: list(range(300, 330)), **options), LastInbox(), Outbox()
    return core, inbox, outbox, CoreLoop(core, inbox, outbox)


def request(request_id: str, max_tokens: int = 3, **params: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2],
        sampling_params=SamplingParams(**params),
        eos_token_id=None,
        max_tokens=max_tokens,
        seed=0,
        arrival_time=0.0,
    )


def outputs_of(messages: list[FromCore]) -> dict[str, list[EngineCoreOutput]]:
    outputs: dict[str, list[EngineCoreOutput]] = {}
    for message in messages:
        if isinstance(message, EngineCoreOutputs):
            for output in message.all_outputs():
                outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens_of(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


def test_what_is_added_runs_to_its_end() -> None:
    _, inbox, outbox, loop = make()
    inbox.put(Add(request("0")))
    inbox.put(Add(request("1", 5, n=2)))
    loop.run()
    outputs = outputs_of(outbox.messages)
    assert {name: tokens_of(each) for name, each in outputs.items()} == {
        "0": [300, 301, 302],
        "1": [300, 301, 302, 303, 304],
        "1#1": [300, 301, 302, 303, 304],
    }
    assert [output.finish_reason for output in outputs["0"]] == [None, None, "length"]


def test_messages_are_read_between_steps() -> None:
    core, inbox, outbox, loop = make()
    inbox.put(Add(request("0", 9)))
    core.parked.add("kept")

    def arrive(step: int) -> None:
        if step == 2:
            inbox.put(Add(request("1")))
            inbox.put(Abort(["0", "unknown"]))
            inbox.put(Release(["kept"]))

    core.before_step = arrive
    loop.run()
    outputs = outputs_of(outbox.messages)
    assert (len(outputs["0"]), tokens_of(outputs["1"])) == (3, [300, 301, 302])
    assert (core.aborted, core.parked) == (["0"], set())


def test_shutdown_ends_the_loop_whatever_runs() -> None:
    core, inbox, outbox, loop = make()
    inbox.put(Add(request("0", 9)))
    core.before_step = lambda step: inbox.put(Shutdown()) if step == 1 else None
    loop.run()
    assert len(outbox.messages) == core.num_steps == 2
    assert core.num_shutdowns == 0, "that is for the one who made the core"


def test_calls_are_answered() -> None:
    core, inbox, outbox, loop = make()
    inbox.put(Call(1, "reset_prefix_cache", [False, False]))
    inbox.put(Add(request("0", 9)))
    inbox.put(Call(2, "reset_prefix_cache", [False, False]))
    inbox.put(Call(3, "reset_prefix_cache", [True, False]))
    inbox.put(Shutdown())
    loop.run()
    assert outbox.messages == [Reply(1, True), Reply(2, False), Reply(3, True)]
    assert core.num_resets == 3


def test_a_call_that_fails_is_answered_with_its_error(caplog: pytest.LogCaptureFixture) -> None:
    core, inbox, outbox, loop = make()

    def refuse(params: SamplingParams, seconds: float | None = None) -> None:
        raise VLLMValidationError(f"no {params.top_k}, after {seconds} s.", parameter="top_k")

    def fail() -> None:
        raise OSError("disk full")

    core.check, core.stop_profile = refuse, fail
    loop = CoreLoop(core, inbox, outbox)
    inbox.put(Call(1, "check", [{"top_k": 5}, 0.5]))
    inbox.put(Call(2, "stop_profile", []))
    inbox.put(Call(3, "shutdown", []))
    inbox.put(Call(4, "check", [{"top_k": "many"}, None]))
    inbox.put(Add(request("0")))
    loop.run()
    first, second, third, fourth, *rest = outbox.messages
    assert first == Reply(1, error=RequestError("invalid", "no 5, after 0.5 s.", "top_k"))
    assert second == Reply(2, error=RequestError("internal", "OSError: disk full"))
    for reply in (third, fourth):
        assert isinstance(reply, Reply)
        assert reply.error is not None
        assert reply.error.kind == "internal"
    assert core.num_shutdowns == 0, "only what is listed can be called"
    assert len(tokens_of(outputs_of(rest)["0"])) == 3, "the core goes on"
    assert "the call of stop_profile failed" in caplog.text


def test_a_message_that_cannot_be_read_ends_its_request_only(caplog: pytest.LogCaptureFixture) -> None:
    _, inbox, outbox, loop = make()
    inbox.put(Add(request("0")))
    inbox.frames.append([b"7", b"\xc1", b""])
    inbox.frames.append([b"", b"\xc1"])
    inbox.frames.append([])
    loop.run()
    outputs = outputs_of(outbox.messages)
    assert tokens_of(outputs.pop("0")) == [300, 301, 302]
    ((bad,),) = outputs.values()
    assert (bad.request_id, bad.finish_reason, bad.error and bad.error.kind) == ("7", "error", "internal")
    assert bad.error is not None
    assert bad.error.message.startswith("The request could not be read: ")
    assert len(caplog.records) == 3


def test_an_output_that_is_too_large_ends_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    _, inbox, outbox, loop = make()
    for name, logprobs in (("0", None), ("large", -1), ("1", 2)):
        inbox.put(Add(request(name, 4, logprobs=logprobs)))
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 2000)
    loop.run()
    outputs = outputs_of(outbox.messages)
    assert [tokens_of(outputs[name]) for name in "01"] == [[300, 301, 302, 303]] * 2
    (end,) = outputs["large"]
    assert (end.finish_reason, end.error and (end.error.kind, end.error.parameter)) == (
        "error",
        ("invalid", "prompt_logprobs"),
    )
    assert end.error is not None
    assert "at most 2000 cross" in end.error.message


def test_what_a_step_raises_ends_the_loop() -> None:
    core, inbox, outbox, loop = make()
    inbox.put(Add(request("0", 9)))

    def fail(step: int) -> None:
        if step == 2:
            raise RuntimeError("the device fell over")

    core.before_step = fail
    with pytest.raises(RuntimeError, match="fell over"):
        loop.run()
    assert len(outbox.messages) == 2


def test_what_ends_a_core_is_told() -> None:
    invalid = RequestError.of(VLLMValidationError("no such model.", parameter="model"))
    assert invalid == RequestError("invalid", "no such model.", "model")
    assert RequestError.of(MemoryError("all gone")) == RequestError("internal", "MemoryError: all gone")


def test_heartbeats_tell_how_long_a_step_takes_and_whether_it_compiles() -> None:
    core, inbox, _, loop = make()
    beats: list[Heartbeat] = []

    def beat(step: int) -> None:
        core.is_compiling = step == 1
        time.sleep(0.02)
        beats.append(loop.heartbeat())

    core.before_step = beat
    core.is_warm = False
    assert loop.heartbeat() == Heartbeat(0.0, False, False)
    inbox.put(Add(request("0", 2)))
    loop.run()
    assert [each.is_compiling for each in beats] == [False, True]
    assert 0.02 <= beats[0].step_seconds < 5
    core.is_warm, core.is_compiling = True, False
    assert loop.heartbeat() == Heartbeat(0.0, False, True)


def test_compiling_does_not_count_as_work_after_it_either() -> None:
    core, inbox, _, loop = make()
    beats: list[Heartbeat] = []
    ends: list[float] = []

    def compile_and_beat(step: int) -> None:
        time.sleep(0.2)
        core.is_compiling = True
        beats.append(loop.heartbeat())
        core.is_compiling = False
        time.sleep(0.02)
        beats.append(loop.heartbeat())
        ends.append(time.monotonic())

    core.before_step = compile_and_beat
    inbox.put(Add(request("0", 1)))
    began = time.monotonic()
    loop.run()
    assert [each.is_compiling for each in beats] == [True, False]
    assert beats[0].step_seconds == 0.0
    assert 0.02 <= beats[1].step_seconds <= ends[0] - began - 0.2


@pytest.mark.parametrize(
    "message", [Add(request("0")), Abort(["0"]), Release(["0"]), Call(1, "reset_prefix_cache", [True, False])]
)
def test_what_a_message_asks_for_is_timed_as_a_step_is(message: ToCore) -> None:
    core, inbox, outbox, _ = make()
    beats: list[Heartbeat] = []

    def hang(*_: Any) -> None:
        time.sleep(0.02)
        beats.append(loop.heartbeat())

    core.add_request = core.abort_requests = core.release = core.reset_prefix_cache = hang  # type: ignore[assignment]
    loop = CoreLoop(core, inbox, outbox)
    inbox.put(message)
    loop.run()
    assert [each.step_seconds >= 0.02 for each in beats] == [True]
    assert loop.heartbeat().step_seconds == 0.0


def test_streams_go_on_while_a_call_waits_for_all_programs() -> None:
    core, inbox, outbox, _ = make()
    goes_on = threading.Event()

    def warm_up() -> None:
        assert goes_on.wait(20)

    core.warm_up = warm_up
    loop = CoreLoop(core, inbox, outbox)
    inbox.put(Call(1, "warm_up", []))
    inbox.put(Add(request("0")))
    inbox.put(Call(2, "reset_prefix_cache", [True, False]))
    loop.run()
    reply, *rest = outbox.messages
    assert reply == Reply(2, True)
    assert len(tokens_of(outputs_of(rest)["0"])) == 3
    assert not any(isinstance(each, Reply) for each in rest)
    goes_on.set()
    wait_for(outbox)
    assert outbox.take() == Reply(1)


def test_a_heart_beats_before_there_is_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_loop, "HEARTBEAT_SECONDS", 0.005)
    _, _, outbox, loop = make()
    heart = Heart(outbox)
    wait_for(outbox)
    assert outbox.take() == Heartbeat(0.0, True, False), "what starts may compile"
    heart.watch(loop)
    wait_for(outbox, Heartbeat(0.0, False, True))
    heart.stop()
    outbox.frames.clear()
    time.sleep(0.03)
    assert not outbox.frames


def wait_for(outbox: Outbox, message: FromCore | None = None) -> None:
    """Wait until there is a message, or this one."""
    deadline = time.monotonic() + 20
    while not outbox.frames or (message is not None and outbox.take() != message):
        assert time.monotonic() < deadline
        time.sleep(0.001)
