"""Arguments for an engine in another process: functions and classes go by name, live objects are refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import msgspec
import pytest

from jaxllm.config import AttentionConfig, ProfilerConfig
from jaxllm.exceptions import VLLMValidationError
from jaxllm.logits_processors import LogitsProcessor
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.scheduling.scheduler import Scheduler


def double(logits_sv: Any, state: Any) -> Any:
    del state
    return logits_sv * 2


class OnHost(LogitsProcessor):
    """A class of logits processors that can be imported."""


@dataclasses.dataclass
class Callable:
    """Its objects are dataclasses, which must not be taken for settings."""

    factor: float = 2.0

    def __call__(self, logits_sv: Any, state: Any) -> Any:
        del state
        return logits_sv * self.factor


def test_what_is_left_at_its_default_does_not_travel():
    assert EngineArgs(model="m").portable() == {"model": "m"}
    assert EngineArgs(model="m", seed=0, logits_processors=[]).portable() == {"model": "m", "logits_processors": []}


def test_all_that_travels_arrives():
    args = EngineArgs(
        model="m",
        hf_token="hf_secret",
        max_model_len="10k",
        hf_overrides={"a": [float("inf"), 2**70, {"b": None}, "\ud800"]},
        attention_config=AttentionConfig(backend="xla"),
        profiler_config=ProfilerConfig(profiler="torch", torch_profiler_dir="/tmp"),
        cudagraph_capture_sizes=[8, 16],
        logits_processors=["a.b:c", double, OnHost],
        scheduler_cls=Scheduler,
    )
    sent = msgspec.json.decode(msgspec.json.encode(args.portable()))
    assert sent["logits_processors"] == ["a.b:c", f"{__name__}:double", f"{__name__}:OnHost"]
    assert sent["scheduler_cls"] == "jaxllm.scheduling.scheduler:Scheduler"
    named = {name: sent[name] for name in ("logits_processors", "scheduler_cls")}
    assert EngineArgs(**sent) == dataclasses.replace(args, **named)


def test_live_objects_are_refused_by_name():
    class Mine(Scheduler):
        pass

    for fields, parameter, reason in (
        ({"mesh": jax.make_mesh((1,), ("tensor",))}, "mesh", "tensor_parallel_size"),
        ({"scheduler_cls": Mine}, "scheduler_cls", "made in a function"),
        ({"logits_processors": [double, lambda *_: None]}, "logits_processors", r"logits_processors\[1\]=.*a lambda"),
        ({"logits_processors": [Callable()]}, "logits_processors", "neither a function nor a class"),
    ):
        args: dict[str, Any] = fields
        with pytest.raises(VLLMValidationError, match=reason) as caught:
            EngineArgs(model="m", **args).portable()
        assert caught.value.parameter == parameter
        assert "or run the engine in this process" in str(caught.value)
        assert parameter == "mesh" or "jaxllm.plugins" in str(caught.value)
