"""The check at an engine's start: when it runs, what is kept, and what the engine makes of it."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from jaxllm import LLM, SamplingParams, TokensPrompt
from jaxllm.config.groups import AttentionConfig
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.resolve.resolve_engine import resolve
from jaxllm.selfcheck import device, kept, start
from jaxllm.selfcheck.device import PROVEN, Accelerators, find_accelerators
from jaxllm.selfcheck.report import Report, Verdict
from jaxllm.selfcheck.start import disproved_ops
from tests.selfcheck.support import NAME, make_model, stand_in

WRONG = Verdict(op="paged_attention", implementation="cpu", shape="", step="mixed", status="wrong", reason="error")
RIGHT = Verdict(op="linear", implementation="cpu", shape="", step="1 rows", status="right")
UNKNOWN = Verdict(op="linear", implementation="cpu", shape="", step="", status="unknown", reason="RESOURCE_EXHAUSTED")
HUNG = Verdict(op="linear", implementation="cpu", shape="", step="1 rows", status="hung", reason="did not end")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path))
    return tmp_path


class Examiner:
    """Stands for the child processes."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *verdicts: Verdict, problem: str = "", platform: str = "gpu"
    ) -> None:
        self.verdicts, self.problem, self.platform = list(verdicts), problem, platform
        self.proven: list[Sequence[str]] = []
        self.calls: list[Any] = []
        monkeypatch.setattr(start, "examine", self)

    def __call__(
        self,
        engine_args: dict[str, Any],
        *,
        driver: str,
        without: list[Verdict],
        proven: Sequence[str],
        checks_cpu: bool,
    ) -> Report:
        assert not checks_cpu
        self.calls.append((engine_args, driver, without))
        self.proven.append(proven)
        verdicts = [*without, *self.verdicts]
        return Report(
            model=engine_args["model"],
            device=NAME,
            platform=self.platform,
            complete=not self.problem,
            problem=self.problem,
            verdicts=verdicts,
        )


def test_a_result_is_kept_until_sources_or_arguments_change(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(monkeypatch)
    examiner, args = Examiner(monkeypatch, WRONG, RIGHT), EngineArgs(model=model)
    with caplog.at_level(logging.INFO, "jaxllm"):
        first = disproved_ops(args)
    assert first == {"paged_attention": f"they gave wrong results on this {NAME} (`jaxllm selfcheck` has the details)"}
    assert "compared with the reference now, once" in caplog.text
    assert disproved_ops(args) == disproved_ops(EngineArgs(model=model, max_num_seqs=7, seed=3)) == first
    assert len(examiner.calls) == 1
    assert disproved_ops(EngineArgs(model=model, block_size=32)) == first
    monkeypatch.setattr(kept, "code_digest", lambda: "other sources")
    disproved_ops(args)
    monkeypatch.setattr(start, "find_accelerators", lambda: Accelerators((NAME,), "1.2.4"))
    disproved_ops(args)
    (Path(model) / "quantization_config.json").write_text("{}")
    disproved_ops(args)
    assert [driver for _, driver, _ in examiner.calls] == ["1.2.3", "1.2.3", "1.2.3", "1.2.4", "1.2.4"]
    (Path(model) / "quantization_config.json").unlink()


@pytest.mark.parametrize("short", [True, False])
def test_another_draft_model_is_another_engine(
    short: bool, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    examiner, draft = Examiner(monkeypatch, RIGHT), tmp_path / "draft"
    draft.mkdir()
    speculation: Any = {"model": str(draft), "num_speculative_tokens": 2, "method": "draft_model"}
    arguments: Any = {"spec_model": str(draft)} if short else {"speculative_config": speculation}
    for text in ("{}", "{ }"):
        (draft / "config.json").write_text(text)
        for _ in range(2):
            disproved_ops(EngineArgs(model=model, **arguments))
    assert len(examiner.calls) == 2


def test_a_check_for_which_memory_was_missing_is_not_forgotten(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(monkeypatch)
    examiner = Examiner(monkeypatch, UNKNOWN)
    for _ in range(2):
        caplog.clear()
        assert disproved_ops(EngineArgs(model=model)) == {}
        assert "`jaxllm selfcheck` tries them again: RESOURCE_EXHAUSTED" in caplog.text
    assert len(examiner.calls) == 1


def test_the_devices_of_an_engine_count_where_a_machine_has_several_kinds(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = set()
    for kinds in (("NVIDIA L4",), ("NVIDIA A10", "NVIDIA L4")):
        for visible in "01":
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
            paths.add(kept.report_path({"model": model}, Accelerators(kinds, "1")))
    assert len(paths) == 3


def test_a_start_that_waits_for_another_says_so(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, entered = cache / "report.json", threading.Event()

    def enter() -> None:
        with kept.alone(path):
            entered.set()

    with caplog.at_level(logging.INFO, "jaxllm"), kept.alone(path):
        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.2)
        assert "another process checks the same kernels" in caplog.text
    thread.join(10)
    assert entered.is_set()


def test_a_file_that_others_may_write_is_not_used(
    model: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(monkeypatch)
    examiner, args = Examiner(monkeypatch, RIGHT), EngineArgs(model=model)
    disproved_ops(args)
    [file] = (cache / "selfcheck").glob("*.json")
    assert json.loads(file.read_text())["verdicts"][0]["op"] == "linear"
    file.chmod(0o666)
    assert disproved_ops(args) == {}
    assert "can be written by other users" in caplog.text
    file.write_text("{")
    disproved_ops(args)
    assert len(examiner.calls) == 3
    disproved_ops(args)
    assert len(examiner.calls) == 3


def test_a_device_that_is_gone_stops_the_start_and_the_next_one_leaves_the_kernel_out(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(monkeypatch)
    args = EngineArgs(model=model)
    Examiner(monkeypatch, HUNG, problem="the device does not answer")
    with pytest.raises(RuntimeError, match=r"does not answer\. The next start leaves out linear"):
        disproved_ops(args)
    examiner = Examiner(monkeypatch, RIGHT)
    assert list(disproved_ops(args)) == ["linear"]
    assert examiner.calls[0][2] == [HUNG]
    assert list(disproved_ops(args)) == ["linear"]
    assert len(examiner.calls) == 1
    Examiner(monkeypatch, problem="the process ended")
    assert disproved_ops(EngineArgs(model=model, block_size=64)) == {}
    assert "could not be checked" in caplog.text


@pytest.mark.parametrize("reason", ["cpu", "none", "off", "open", "hosts"])
def test_nothing_is_checked(
    reason: str, model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    examiner = Examiner(monkeypatch, WRONG)
    if reason != "cpu":
        monkeypatch.setattr(start, "_is_for_cpu", lambda: False)
    accelerators = None if reason == "none" else Accelerators((NAME,), "1.2.3")
    monkeypatch.setattr(start, "find_accelerators", lambda: accelerators)
    import jax

    assert jax.devices()  # opened
    hosts: dict[str, Any] = {"nnodes": 2, "master_addr": "10.0.0.1"} if reason == "hosts" else {}
    args = EngineArgs(model=model, selfcheck=reason != "off", **hosts)
    assert disproved_ops(args) == {}
    assert not examiner.calls
    hint = "the other hosts would wait for this one. `jaxllm selfcheck` on each host checks them"
    assert (hint in caplog.text) == (reason == "hosts")
    assert ("this process has opened the devices already" in caplog.text) == (reason == "open")


def test_proven_ops_are_not_tried(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    examiner = Examiner(monkeypatch, RIGHT)
    for kind in PROVEN:
        for kinds in ((kind,), (kind, NAME)):
            monkeypatch.setattr(start, "find_accelerators", lambda kinds=kinds: Accelerators(kinds, "1"))
            assert disproved_ops(EngineArgs(model=model)) == {}
            expected = () if NAME in kinds else PROVEN[kind].ops
            assert sorted(examiner.proven[-1]) == sorted(expected)
    assert len(examiner.calls) == 2 * len(PROVEN)


def test_a_gpu_that_jax_cannot_use_now_is_checked_when_it_can(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(monkeypatch)
    Examiner(monkeypatch, platform="cpu")
    assert disproved_ops(EngineArgs(model=model)) == {}
    assert not caplog.text
    Examiner(monkeypatch, WRONG)
    assert list(disproved_ops(EngineArgs(model=model))) == ["paged_attention"]


def test_a_refusal_that_only_the_check_makes_is_told(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(monkeypatch)
    refused = VLLMValidationError("There is no such dtype.", parameter="dtype")
    monkeypatch.setattr(start, "examine", Mock(side_effect=refused))
    assert disproved_ops(EngineArgs(model=model)) == {}
    assert "they are not checked now: There is no such dtype. `jaxllm selfcheck` checks them." in caplog.text


def test_several_hosts_use_a_kept_result(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    obstacle = start._obstacle
    stand_in(monkeypatch)
    Examiner(monkeypatch, WRONG)
    first = disproved_ops(EngineArgs(model=model))
    monkeypatch.setattr(start, "_obstacle", obstacle)
    assert disproved_ops(EngineArgs(model=model, nnodes=2, master_addr="10.0.0.1")) == first != {}
    assert "not checked now" not in caplog.text


def test_devices_are_named_by_the_drivers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_NVIDIA", tmp_path)
    monkeypatch.setattr(device, "_PLUGINS", ("jax",))
    monkeypatch.setattr(device.shutil, "which", lambda _: None)
    monkeypatch.setattr(device, "_find_tpus", lambda: None)
    assert find_accelerators() is None
    for number in (1, 2):
        folder = tmp_path / "gpus" / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t\t NVIDIA L4\nIRQ:   \t\t 77\n")
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release\nGCC version:  gcc 12\n"
    (tmp_path / "version").write_text(version)
    assert find_accelerators() == Accelerators(("NVIDIA L4",), "580.95.05")


def test_proven_ops_have_results(repository: Path) -> None:
    for kind, proof in PROVEN.items():
        reports = [json.loads(path.read_text()) for path in (repository / proof.results).glob("check*.json")]
        rows = [row for each in reports if each["device"] == kind and each["complete"] for row in each["rows"]]
        right = {f"recurrent_state.{row['op']}" for row in rows if not row["missed"]}
        wrong = {f"recurrent_state.{row['op']}" for row in rows if row["missed"]}
        assert set(proof.ops) <= right - wrong


@pytest.mark.engine
def test_an_engine_runs_a_disproved_op_in_plain_xla(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(monkeypatch)
    settings: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2, "num_gpu_blocks_override": 16}
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    answers = []
    for verdicts in ([], [WRONG]):
        Examiner(monkeypatch, *verdicts)
        (Path(model) / "quantization_config.json").write_text(" " * len(verdicts))  # another key
        caplog.clear()
        with LLM(model, skip_tokenizer_init=True, enforce_eager=True, **settings) as llm:
            prompt = TokensPrompt(prompt_token_ids=list(range(3, 30)))
            answers.append(llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0].token_ids)
        line = f"attention runs in plain XLA, not in the cpu's own kernels: they gave wrong results on this {NAME}"
        assert (line in caplog.text) == bool(verdicts)
    assert answers[0] == answers[1]


def test_kernels_that_the_user_asks_for_run_with_a_warning(model: str, caplog: pytest.LogCaptureFixture) -> None:
    disproved = {"paged_attention": "they gave wrong results"}
    for backend, line in (("cpu", "backend='cpu' runs the kernels, although they gave wrong results"), ("xla", "")):
        caplog.clear()
        args = EngineArgs(model=model, attention_config=AttentionConfig(backend), skip_tokenizer_init=True)
        config = resolve(args, disproved=disproved)
        assert config.kv_groups[0].attention.implementation == backend
        assert line in caplog.text
        assert ("although" in caplog.text) == bool(line)
