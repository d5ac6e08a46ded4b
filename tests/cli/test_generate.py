"""`jaxllm generate`: every prompt gets its line, in input order, whatever happens to the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxllm
from jaxllm.cli.batch import generate
from jaxllm.cli.batch.generate import make_record
from jaxllm.cli.batch.jobs import Task
from jaxllm.cli.batch.offline_run import QUEUE_LENGTH
from jaxllm.cli.main import main
from jaxllm.exceptions import VLLMValidationError
from jaxllm.logprobs import FlatLogprobs, Logprob
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams
from tests.cli.fake_engine import FakeEngine
from tests.cli.running import read_jsonl, run_generate, write_jsonl
from tests.engine.support import byte_level


def test_prompts_on_the_terminal(capsys: pytest.CaptureFixture[str]):
    engine = FakeEngine(per_step=1)
    assert run_generate(engine, "m", "--prompt", "abc", "--prompt", "xyz", "--max-tokens", "4") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[0] 'abc'"
    assert lines[1].startswith("  -> 'cba|")
    assert lines[2] == "[1] 'xyz'"
    assert engine.num_shutdowns == 1


def test_one_prompt_prints_only_its_text(capsys: pytest.CaptureFixture[str]):
    assert run_generate(FakeEngine(), "m", "--prompt", "abc") == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("cba|")
    assert captured.out.count("\n") == 1
    assert "cut off at max_tokens: 1" in captured.err
    assert "--max-tokens" in captured.err


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_results_are_in_input_order(tmp_path: Path, suffix: str):
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"p{i}", "id": f"id-{i}"} for i in range(50)])
    output = tmp_path / f"out{suffix}"
    assert run_generate(FakeEngine(), "m", "--input", source, "--output", output) == 0
    records = read_jsonl(output) if suffix == ".jsonl" else json.loads(output.read_text())
    assert [record["prompt"] for record in records] == [f"p{i}" for i in range(50)]
    assert [record["index"] for record in records] == list(range(50))
    assert [record["id"] for record in records] == [f"id-{i}" for i in range(50)]
    assert records[0]["num_prompt_tokens"] == 2
    assert records[0]["outputs"][0]["token_ids"] == [7, 8, 9]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", output.name]


def test_text_file(tmp_path: Path):
    source = tmp_path / "in.txt"
    source.write_bytes(b"\xef\xbb\xbfone\r\n\ntwo \xe2\x80\xa8 lines\n \n\xff bad\nthree")
    output = tmp_path / "out.jsonl"
    assert run_generate(FakeEngine(), "m", "--input", source, "--output", output) == 1
    records = read_jsonl(output)
    assert [record.get("prompt") for record in records] == ["one", "two \u2028 lines", None, "three"]
    assert "UTF-8" in records[2]["error"]


BAD_LINES: list[tuple[Any, str]] = [
    ("{not json", "prompt"),
    ('"a string"', "prompt"),
    ("[" * 100_000, "prompt"),
    ('{"prompt": "\\ud800"}', "prompt"),
    ({}, "prompt"),
    ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
    ({"messages": "hello"}, "messages"),
    ({"messages": []}, "messages"),
    ({"prompt": "a", "temprature": 1}, "temprature"),
    ({"prompt": "a", "best_of": 2}, "best_of"),
    ({"prompt": "a", "temperature": 5}, "temperature"),
    ('{"prompt": "a", "temperature": 1e999}', "prompt"),
    ('{"prompt": "a", "temperature": NaN}', "prompt"),
    ({"prompt": "a", "sampling_params": {"top_p": 2}}, "top_p"),
    ({"prompt": "a", "sampling_params": 3}, "sampling_params"),
    ({"prompt": "a", "sampling_params": {"prompt": "b"}}, "prompt"),
    ({"prompt": "a", "bad_words": [""]}, "bad_words"),
    ({"prompt": "a", "output_kind": 1}, "output_kind"),
    ({"prompt": "a", "structured_outputs": "[0-9]+"}, "structured_outputs"),
    ({"prompt": "a", "structured_outputs": {"regexp": "[0-9]+"}}, "regexp"),
    ({"prompt": "a", "repetition_detection": {"max_pattern_size": -1}}, "max_pattern_size"),
    ({"prompt": "a", "priority": "high"}, "priority"),
    ({"prompt": "x" * 200}, "prompt"),
]


def test_bad_lines_get_an_error_and_the_rest_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lines: list[Any] = [{"prompt": "first", "id": 1}]
    for bad, _ in BAD_LINES:
        lines += [bad, {"prompt": "good"}]
    output = tmp_path / "out.jsonl"
    source = write_jsonl(tmp_path / "in.jsonl", lines)
    assert run_generate(FakeEngine(), "m", "--input", source, "--output", output) == 1
    records = read_jsonl(output)
    assert [record["index"] for record in records] == list(range(len(lines)))
    assert [record["prompt"] for record in records[2::2]] == ["good"] * len(BAD_LINES)
    for record, (bad, parameter) in zip(records[1::2], BAD_LINES, strict=True):
        assert record["parameter"] == parameter, bad
        assert record["error"], bad
        assert len(json.dumps(record)) < 1000
    assert f"{len(BAD_LINES)} of {len(lines)} prompts failed" in capsys.readouterr().err


def test_failed_lines_keep_their_id(tmp_path: Path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a", "id": "x", "n": 0}])
    output = tmp_path / "out.jsonl"
    assert run_generate(FakeEngine(), "m", "--input", source, "--output", output) == 1
    assert read_jsonl(output)[0] | {"error": ""} == {"id": "x", "index": 0, "error": "", "parameter": "n"}


def test_sampling_parameters_of_model_flags_and_line(tmp_path: Path):
    engine = FakeEngine(default_sampling_params={"temperature": 0.6, "top_p": 0.9, "top_k": 7})
    lines = [
        {"prompt": "a"},
        {"prompt": "b", "temperature": 0.1, "sampling_params": {"temperature": 0.2, "max_tokens": None}},
        {"prompt": "c", "top_k": 9, "seed": 5, "priority": 3},
    ]
    source = write_jsonl(tmp_path / "in.jsonl", lines)
    flags = ("--top-p", "0.5", "--max-tokens", "1K", "--stop", "END", "--stop", "\n\n", "--stop-token-ids", "3", "4")
    assert run_generate(engine, "m", "--input", source, "--output", tmp_path / "out.jsonl", *flags) == 0
    first, second, third = (params for _, _, params, _ in engine.requests)
    assert (first.temperature, first.top_p, first.top_k, first.max_tokens) == (0.6, 0.5, 7, 1024)
    assert (first.stop, first.stop_token_ids) == (["END", "\n\n"], [3, 4])
    assert (second.temperature, second.top_p, second.max_tokens) == (0.2, 0.5, None)
    assert (third.top_k, third.seed) == (9, 5)
    assert [priority for *_, priority in engine.requests] == [0, 0, 3]


def test_parameters_that_are_objects(tmp_path: Path):
    engine = FakeEngine()
    line = {
        "prompt": "a",
        "structured_outputs": {"json": {"type": "object"}, "disable_any_whitespace": True},
        "sampling_params": {"repetition_detection": {"max_pattern_size": 3, "min_count": 2}},
    }
    source = write_jsonl(tmp_path / "in.jsonl", [line, line | {"structured_outputs": None}])
    assert run_generate(engine, "m", "--input", source, "--output", tmp_path / "out.jsonl") == 0
    first, second = (params for _, _, params, _ in engine.requests)
    wanted = StructuredOutputsParams(json={"type": "object"}, disable_any_whitespace=True)
    assert (first.structured_outputs, second.structured_outputs) == (wanted, None)
    assert first.repetition_detection == RepetitionDetectionParams(max_pattern_size=3, min_count=2)


def test_seeds_depend_on_the_engine_seed_and_the_place_only(tmp_path: Path):
    def seeds(lines: list[Any], seed: int) -> list[int | None]:
        engine = FakeEngine(seed=seed)
        run_generate(engine, "m", "--input", write_jsonl(tmp_path / "in.jsonl", lines), "--output", tmp_path / "o.json")
        return [params.seed for _, _, params, _ in engine.requests]

    same = {"prompt": "a"}
    first = seeds([same, same, same], 0)
    assert len(set(first)) == 3
    assert seeds([{"bad": 1}, same, same], 0) == first[1:]
    assert set(seeds([same, same, same], 1)).isdisjoint(first)


def test_outputs_and_logprobs(tmp_path: Path):
    output = tmp_path / "out.jsonl"
    words = ("--prompt", "ab", "--n", "2", "--logprobs", "0", "--output", output)
    assert run_generate(FakeEngine(), "m", *words) == 0
    (record,) = read_jsonl(output)
    assert [each["index"] for each in record["outputs"]] == [0, 1]
    assert record["outputs"][1]["cumulative_logprob"] == -1.5
    position = {"token_id": 7, "logprob": -0.5, "rank": 1, "decoded_token": "x"}
    assert record["outputs"][1]["logprobs"] == [[position]]


@pytest.mark.parametrize("is_flat", [False, True])
def test_scores_of_the_prompt(tmp_path: Path, is_flat: bool):
    output = RequestOutput("0", "ab", [1, 2], FlatLogprobs() if is_flat else [], [], True)
    assert output.prompt_logprobs is not None
    output.prompt_logprobs.extend([None, {7: Logprob(-0.5, 1, "x")}])
    output.prompt_token_id_logprobs = np.array([[-0.5, -2.0]], np.float32)
    record = make_record(0, Task({}, None, {}, None, 0), output)
    position = {"token_id": 7, "logprob": -0.5, "rank": 1, "decoded_token": "x"}
    assert record["prompt_logprobs"] == [None, [position]]
    assert record["prompt_token_id_logprobs"] == [[-0.5, -2.0]]


def test_chat(tmp_path: Path):
    engine = FakeEngine(tokenizer=byte_level())
    lines = [
        {"prompt": "hello"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "cache_salt": "x"},
        {"messages": [{"content": "no role"}]},
        {"prompt_token_ids": [1, 2]},
    ]
    source = write_jsonl(tmp_path / "in.jsonl", lines)
    assert run_generate(engine, "m", "--chat", "--input", source, "--output", tmp_path / "out.jsonl") == 1
    (_, one, _, _), (_, two, _, _), (_, ids, _, _) = engine.requests
    assert one.text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert two.text.startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu")
    assert (one.is_templated, two.salt, ids) == (True, "x", {"prompt_token_ids": [1, 2]})
    records = read_jsonl(tmp_path / "out.jsonl")
    assert records[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert (records[1]["messages"], records[2]["parameter"]) == (lines[1]["messages"], "messages")
    assert "messages" not in records[3]


def test_a_conversation_that_cannot_be_read_is_that_line_s_error(tmp_path: Path):
    engine = FakeEngine(tokenizer=byte_level())
    good = {"messages": [{"role": "user", "content": "u"}]}
    lines = [
        good,
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "function"}]}]},
        good | {"cache_salt": 5},
        good,
    ]
    source = write_jsonl(tmp_path / "in.jsonl", lines)
    assert run_generate(engine, "m", "--input", source, "--output", tmp_path / "out.jsonl") == 1
    records = read_jsonl(tmp_path / "out.jsonl")
    assert ["error" in record for record in records] == [False, True, True, False]
    assert records[2]["parameter"] == "cache_salt"
    assert len(engine.requests) == 2


def test_chat_on_the_terminal_shows_what_was_asked(capsys: pytest.CaptureFixture[str]):
    run_generate(FakeEngine(tokenizer=byte_level()), "m", "--chat", "--prompt", "hello", "--n", "2")
    captured = capsys.readouterr()
    assert captured.out.startswith("[0] 'hello'\n  -> ")
    assert "Prompts:" not in captured.err


def test_a_plain_prompt_is_not_templated(tmp_path: Path):
    engine = FakeEngine()
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "hello", "cache_salt": "x"}])
    assert run_generate(engine, "m", "--input", source, "--output", tmp_path / "out.jsonl") == 0
    assert engine.requests[0][1] == {"prompt": "hello", "cache_salt": "x"}


def test_many_prompts_are_handed_over_a_part_at_a_time(tmp_path: Path):
    engine = FakeEngine(per_step=100)
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": str(i)} for i in range(3000)])
    assert run_generate(engine, "m", "--input", source, "--output", tmp_path / "out.jsonl") == 0
    assert len(engine.requests) == 3000
    assert engine.most_waiting == QUEUE_LENGTH


def test_progress_counts_prompts_and_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": str(i)} for i in range(20)])
    run_generate(FakeEngine(), "m", "--input", source, "--output", tmp_path / "out.jsonl")
    shown = capsys.readouterr().err
    assert "20/20" in shown
    assert "output: " in shown
    assert "tok/s" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--prompt", "a"), "MODEL"),
        (("m",), "--prompt or --input"),
        (("m", "--prompt", "a", "--input", "in.jsonl"), "--prompt or --input"),
        (("m", "--input", "no-such-file.jsonl"), "no-such-file.jsonl"),
        (("m", "--input", "prompts.csv"), ".jsonl or .txt"),
        (("m", "--prompt", "a", "--output", "out.csv"), ".jsonl or .json"),
        (("m", "--prompt", "a", "--output", "no-such-folder/out.json"), "no-such-folder"),
        (("m", "--prompt", "a", "--temperature", "nan"), "temperature"),
        (("m", "--prompt", "a", "--top-p", "2"), "top_p"),
        (("m", "--prompt", "a", "--max-tokens", "0"), "max_tokens"),
        (("m", "--prompt", "a", "-pp", "2"), "pipeline_parallel_size"),
        (("m", "--prompt", "a", "--trust-remote-code"), "trust_remote_code"),
        (("m", "--prompt", "a", "--config", "no-such.yaml"), "no-such.yaml"),
    ],
)
def test_misuse_is_one_line_and_status_2(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(generate, "load_engine", lambda _args: pytest.fail("the model was loaded"))
    assert main(["generate", *words]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("jaxllm: error: ")
    assert message in shown
    assert shown.count("\n") == 1


def test_empty_input_and_own_output(tmp_path: Path):
    source = write_jsonl(tmp_path / "in.jsonl", [""])
    with pytest.raises(VLLMValidationError, match="no prompts"):
        run_generate(FakeEngine(), "m", "--input", source, "--output", tmp_path / "out.jsonl")
    write_jsonl(source, [{"prompt": "a"}])
    with pytest.raises(VLLMValidationError, match="must not be the input"):
        run_generate(FakeEngine(), "m", "--input", source, "--output", source)


@pytest.mark.parametrize("words", [["--no-such-flag"], ["generate", "m", "--prompt", "a", "--max-modle-len", "3"], []])
def test_unknown_flags(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "usage: jaxllm" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"{jaxllm.__version__}\n"


def test_help_names_flags_but_not_what_is_unsupported(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["generate", "--help=all"])
    shown = capsys.readouterr().out
    for flag in (
        "--max-model-len",
        "--dtype",
        "--gpu-memory-utilization",
        "--max-tokens",
        "--stop",
        "--chat",
        "--config",
    ):
        assert flag in shown
    assert "pipeline-parallel" not in shown
