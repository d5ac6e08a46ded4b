"""A child's work, in this process: the verdicts on an engine's kernels, right and planted wrong."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from jaxllm.selfcheck import worker
from jaxllm.selfcheck.report import Done, Judged, Mistake, Opened, Request, Verdict
from jaxllm.selfcheck.worker import _work
from tests.models.tiny import folder
from tests.selfcheck.faulty import planted
from tests.selfcheck.support import make_model

pytestmark = pytest.mark.programs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


def ask(*without: str, checks_cpu: bool = True, **engine_args: Any) -> Request:
    return Request(engine_args=engine_args, first=0, without=without, checks_cpu=checks_cpu)


def verdicts(model: str, *without: str, **more: Any) -> list[Verdict]:
    opened, *messages, done = _work(ask(*without, **more, model=model))
    assert isinstance(opened, Opened)
    assert isinstance(done, Done)
    return [message.verdict for message in messages if isinstance(message, Judged)]


def test_all_is_right(model: str) -> None:
    judged = verdicts(model)
    assert {verdict.op for verdict in judged} == {"paged_attention", "linear"}
    assert {verdict.status for verdict in judged} == {"right"}
    assert all((verdict.error or 1) < (verdict.allowed or 0) for verdict in judged)


def test_a_device_of_several_is_checked(model: str) -> None:
    """Two devices have half of the heads each, and a CPU of two runs attention alone in kernels."""
    [shape] = {verdict.shape for verdict in verdicts(model, tensor_parallel_size=2)}
    assert shape.startswith("num_heads 2, num_kv_heads 1")


def test_layers_with_a_window_and_without_are_checked() -> None:
    """They have one shape."""
    judged = verdicts(str(folder("gemma3")), "linear", skip_tokenizer_init=True)
    shapes = {verdict.shape.partition(", window ")[::2] for verdict in judged if verdict.op == "paged_attention"}
    assert len(shapes) == 2
    assert len({shape for shape, _ in shapes}) == 1


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [("unfinished", "wrong", "the pool differs"), ("broken", "failed", "there is no such instruction")],
)
def test_faults(model: str, fault: str, status: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*planted("paged_attention", fault))
    for verdict in verdicts(model, "linear"):
        assert (verdict.status, verdict.op) == (status, "paged_attention")
        assert reason in verdict.reason


def test_a_mistake_is_told() -> None:
    [mistake] = _work(ask(model="/nowhere/at/all"))
    assert isinstance(mistake, Mistake)
    assert mistake.parameter == "model"


def test_a_start_checks_no_cpu() -> None:
    assert list(_work(ask(model="m", checks_cpu=False))) == [Opened("cpu", "cpu"), Done()]


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_trials_are_compiled_as_steps_are(
    model: str, quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(worker, "compiler_options", lambda *_, **settings: calls.append(settings))
    settings: dict[str, Any] = {"quantization": quantization, "attention_config": {"backend": "xla"}}
    messages = list(_work(ask(model=model, **settings)))
    assert isinstance(messages[-1], Done)
    [call] = calls
    assert call["devices"] == jax.devices()[:1]
    assert call["quantized"] == (quantization is not None)
