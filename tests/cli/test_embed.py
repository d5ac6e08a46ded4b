"""`jaxllm embed` over a fake engine: inputs, outputs, what the flags do, errors, and going on after a kill."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxllm.cli.batch import embed, result_files
from jaxllm.cli.main import main
from jaxllm.exceptions import VLLMValidationError
from tests.cli.fake_engine import FakeEngine
from tests.cli.running import read_jsonl, run_embed, write_jsonl
from tests.params.embedder import EMBEDDER

LINES: list[Any] = [{"text": "w " * i + "end"} for i in range(20)]
PROMPTS = msgspec.structs.replace(EMBEDDER, prompts={"query": "Q: ", "passage": "P: "})
CLASSIFIER = msgspec.structs.replace(
    EMBEDDER, tasks=("classify",), activation="softmax", num_labels=3, id2label={"0": "long", "1": "wordy", "2": "none"}
)


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


def make_engine(**changes: Any) -> FakeEngine:
    settings: dict[str, Any] = {"pooling": EMBEDDER} | changes
    return FakeEngine(**settings)


def run(tmp_path: Path, lines: list[Any], name: str, *flags: object, engine: FakeEngine | None = None) -> int:
    """Embed lines into a file of tmp_path."""
    source = write_jsonl(tmp_path / "in.jsonl", lines)
    return run_embed(engine or make_engine(), "m", "--input", source, "--output", tmp_path / name, *flags)


def test_lines_keep_their_fields_and_their_order(tmp_path: Path):
    big = 2**70
    lines = [
        {"id": "a", "text": "one two", "tags": ["x\u2028y", big]},
        json.dumps("alone"),
        {"prompt": "p", "embedding": "old", "index": 9},
        {"prompt_token_ids": [5, 6], "priority": 2},
    ]
    engine = make_engine()
    assert run(tmp_path, lines, "out.jsonl", engine=engine) == 0
    records = read_jsonl(tmp_path / "out.jsonl")
    tenth = float(np.float32(0.1))
    assert records == [
        lines[0] | {"index": 0, "num_prompt_tokens": 2, "embedding": [7.0, 2.0, tenth]},
        {"text": "alone", "index": 1, "num_prompt_tokens": 2, "embedding": [5.0, 1.0, tenth]},
        {"prompt": "p", "embedding": [1.0, 1.0, tenth], "index": 2, "num_prompt_tokens": 2},
        lines[3] | {"index": 3, "num_prompt_tokens": 2, "embedding": [0.0, 0.0, tenth]},
    ]
    assert [prompt for _, prompt, _, _ in engine.requests] == [
        {"prompt": "one two"},
        {"prompt": "alone"},
        {"prompt": "p"},
        {"prompt_token_ids": [5, 6]},
    ]
    assert [priority for *_, priority in engine.requests] == [0, 0, 0, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_text_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = tmp_path / "in.txt"
    source.write_bytes(b"one\n\n\xff\nthree words here\n")
    output = tmp_path / "out.jsonl"
    assert run_embed(make_engine(), "m", "--input", source, "--output", output) == 1
    records = read_jsonl(output)
    assert [record.get("text") for record in records] == ["one", None, "three words here"]
    assert "UTF-8" in records[1]["error"]
    shown = capsys.readouterr().err
    assert "1 of 3 prompts failed" in shown
    assert "input: " in shown
    assert "output: " not in shown, "no tokens are generated"


@pytest.mark.parametrize("num_early", [0, 3])
def test_matrix(tmp_path: Path, num_early: int):
    lines = [{"text": 7, "id": i} for i in range(num_early)] + [*LINES, {"text": "NaN"}, {"text": "last"}]
    assert run(tmp_path, lines, "out.npy") == 1
    matrix = np.load(tmp_path / "out.npy", mmap_mode="r")
    assert (matrix.shape, matrix.dtype) == ((len(lines), 3), np.float32)
    good = [[2.0 * i + 3, i + 1, np.float32(0.1)] for i in range(20)]
    bad = [[np.nan] * 3]
    np.testing.assert_array_equal(matrix, np.array([*bad * num_early, *good, *bad, [4, 1, np.float32(0.1)]], "<f4"))
    errors = read_jsonl(tmp_path / "out.npy.errors.jsonl")
    assert [each["index"] for each in errors] == [*range(num_early), num_early + 20]
    assert errors[-1]["error"] == "no finite numbers"
    assert run(tmp_path, LINES, "out.npy") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.npy"], "errors of before are gone"


def test_matrix_of_errors_only(tmp_path: Path):
    assert run(tmp_path, [{"text": 7}, {}], "out.npy") == 1
    assert np.load(tmp_path / "out.npy").shape == (2, 0)
    assert len(read_jsonl(tmp_path / "out.npy.errors.jsonl")) == 2


def test_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(result_files, "GROUP_ROWS", 2)
    lines = [{"text": "one two", "id": "a"}, {"text": 7, "id": 5}, {"prompt_token_ids": [1]}]
    engine = make_engine(pooling=CLASSIFIER)
    assert run(tmp_path, lines, "out.parquet", "--task", "classify", engine=engine) == 1
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["index", "id", "text", "num_prompt_tokens", "label", "probs", "error"]
    assert table["probs"].to_pylist() == [[7, 2, np.float32(0.1)], None, [0, 0, np.float32(0.1)]]
    assert table["id"].to_pylist() == ["a", "5", None]
    assert table["label"].to_pylist() == ["long", None, "none"]
    assert [error is None for error in table["error"].to_pylist()] == [True, False, True]


def test_table_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "pyarrow" else find(name))
    monkeypatch.setattr(embed, "load_engine", lambda _args: pytest.fail("the model was loaded"))
    source = write_jsonl(tmp_path / "in.jsonl", LINES)
    assert main(["embed", "m", "--input", str(source), "--output", str(tmp_path / "out.parquet")]) == 2
    assert "pip install 'jaxllm[parquet]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [source]


def test_classes(tmp_path: Path):
    engine = make_engine(pooling=CLASSIFIER)
    lines = [{"text": "one two"}, {"text": "a", "text_pair": "b"}, {"text": ""}]
    assert run(tmp_path, lines, "out.jsonl", "--task", "classify", engine=engine) == 0
    records = read_jsonl(tmp_path / "out.jsonl")
    assert [record["label"] for record in records] == ["long", "long", "none"]
    assert records[0]["probs"] == [7.0, 2.0, float(np.float32(0.1))]
    assert [params.task for _, _, params, _ in engine.requests] == ["classify"] * 3
    assert engine.requests[1][1] == {"prompt": "a", "text_pair": "b"}
    assert engine.requests[2][1] == {"prompt": ""}


BAD_LINES: list[tuple[Any, str]] = [
    ("{not json", "prompt"),
    ("3", "prompt"),
    ("[" * 100_000, "prompt"),
    ({}, "prompt"),
    ({"text": "a", "prompt": "b"}, "prompt"),
    ({"messages": [{"role": "user", "content": "u"}]}, "prompt"),
    ({"text": 5}, "text"),
    ({"text": "a", "dimensions": 2}, "dimensions"),
    ({"text": "a", "use_activation": False}, "use_activation"),
    ({"text": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"text": "a", "priority": "high"}, "priority"),
    ({"text": "x" * 200}, "prompt"),
]


def test_bad_lines_get_an_error_and_the_rest_go_on(tmp_path: Path):
    lines: list[Any] = []
    for bad, _ in BAD_LINES:
        lines += [bad, {"text": "good"}]
    assert run(tmp_path, lines, "out.jsonl") == 1
    records = read_jsonl(tmp_path / "out.jsonl")
    assert [record["text"] for record in records[1::2]] == ["good"] * len(BAD_LINES)
    for record, (bad, parameter) in zip(records[::2], BAD_LINES, strict=True):
        assert record["parameter"] == parameter, bad
        assert record["error"], bad
        assert len(json.dumps(record)) < 1000


@pytest.mark.parametrize(
    ("flags", "default", "text"),
    [
        ((), None, "hello"),
        ((), "passage", "P: hello"),
        (("--prompt-name", "query"), "passage", "Q: hello"),
        (("--prompt-prefix", "search: "), "passage", "search: hello"),
        (("--prompt-prefix", ""), "passage", "hello"),
    ],
)
def test_prompts_of_the_folder(tmp_path: Path, flags: tuple[str, ...], default: str | None, text: str):
    engine = make_engine(pooling=msgspec.structs.replace(PROMPTS, default_prompt_name=default))
    assert run(tmp_path, [{"text": "hello"}, {"prompt_token_ids": [1]}], "out.jsonl", *flags, engine=engine) == 0
    assert [prompt for _, prompt, _, _ in engine.requests] == [{"prompt": text}, {"prompt_token_ids": [1]}]
    assert read_jsonl(tmp_path / "out.jsonl")[0]["text"] == "hello", "the line's own"


def test_classes_are_of_texts_without_the_default_prompt(tmp_path: Path):
    prompts = {"prompts": PROMPTS.prompts, "default_prompt_name": "passage"}
    engine = make_engine(pooling=msgspec.structs.replace(CLASSIFIER, **prompts))
    assert run(tmp_path, [{"text": "hello"}], "out.jsonl", "--task", "classify", engine=engine) == 0
    assert [prompt for _, prompt, _, _ in engine.requests] == [{"prompt": "hello"}]


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [((), (None, True)), (("--no-normalize",), (None, False)), (("--dimensions", "2", "--normalize"), (2, True))],
)
def test_params(tmp_path: Path, flags: tuple[str, ...], wanted: tuple[int | None, bool]):
    engine = make_engine(pooling=msgspec.structs.replace(EMBEDDER, is_matryoshka=True))
    assert run(tmp_path, LINES[:1], "out.jsonl", *flags, engine=engine) == 0
    [(_, _, params, _)] = engine.requests
    assert ((params.dimensions, params.use_activation), params.task) == (wanted, "embed")


@pytest.mark.parametrize(("flags", "wanted"), [((), {}), (("--truncate-prompt-tokens", "-1"), -1)])
def test_truncation(tmp_path: Path, flags: tuple[str, ...], wanted: Any):
    engine = make_engine()
    assert run(tmp_path, LINES[:1], "out.jsonl", *flags, engine=engine) == 0
    assert engine.tokenization_kwargs == [wanted and {"truncate_prompt_tokens": wanted}]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--prompt-name", "document"), "query, passage"),
        (("--dimensions", "2"), "Matryoshka"),
        (("--task", "classify"), "Classification API"),
        (("--truncate-prompt-tokens", "1000"), "max_model_len=128"),
    ],
)
def test_what_the_model_cannot_ends_the_run(tmp_path: Path, flags: tuple[str, str], message: str):
    engine = make_engine(pooling=PROMPTS)
    with pytest.raises(VLLMValidationError, match=message):
        run(tmp_path, LINES, "out.npy", *flags, engine=engine)
    assert engine.num_shutdowns == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--input", "in.jsonl", "--output", "out.npy"), "MODEL"),
        (("m", "--output", "out.npy"), "--input FILE"),
        (("m", "--input", "in.jsonl"), "--output FILE"),
        (("m", "--input", "no-such-file.jsonl", "--output", "out.npy"), "no-such-file.jsonl"),
        (("m", "--input", "in.jsonl", "--output", "out.csv"), ".jsonl or .npy or .parquet"),
    ],
)
def test_misuse_is_one_line_and_status_2(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", LINES)
    monkeypatch.setattr(embed, "load_engine", lambda _args: pytest.fail("the model was loaded"))
    assert main(["embed", *words]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("jaxllm: error: ")
    assert message in shown
    assert shown.count("\n") == 1


def test_one_prompt_only(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(["embed", "m", "--prompt-name", "query", "--prompt-prefix", "x"])
    assert caught.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


def test_the_engine_is_started_for_pooling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    runners: list[str] = []
    monkeypatch.setattr(embed, "load_engine", lambda args: runners.append(args.runner) or make_engine())
    source = write_jsonl(tmp_path / "in.jsonl", LINES)
    command = ["embed", "m", "--input", str(source), "--output", str(tmp_path / "out.npy")]
    assert main(command) == 0
    assert main([*command, "--runner", "generate"]) == 0
    assert runners == ["pooling", "generate"]


@pytest.mark.parametrize("suffix", ["jsonl", "npy"])
def test_resumed_equals_uninterrupted(tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]):
    run(tmp_path, LINES, f"whole.{suffix}")
    with pytest.raises(Killed):
        run(tmp_path, LINES, f"out.{suffix}", engine=make_engine(per_step=1, crash=Killed(), crash_after=7))
    assert not (tmp_path / f"out.{suffix}").exists()
    engine = make_engine()
    assert run(tmp_path, LINES, f"out.{suffix}", engine=engine) == 0
    assert len(engine.requests) == 13
    assert (tmp_path / f"out.{suffix}").read_bytes() == (tmp_path / f"whole.{suffix}").read_bytes()
    assert "7 of 20 prompts are done already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "num_again"),
    [
        (("--max-num-seqs", "8"), 13),
        (("--no-normalize",), 20),
        (("--dimensions", "2"), 20),
        (("--prompt-name", "query"), 20),
        (("--prompt-prefix", "x"), 20),
        (("--truncate-prompt-tokens", "5"), 20),
        (("--dtype", "float32"), 20),
    ],
)
def test_other_settings_start_over(tmp_path: Path, flags: tuple[str, ...], num_again: int):
    settings = msgspec.structs.replace(PROMPTS, is_matryoshka=True)
    dying = make_engine(pooling=settings, per_step=1, crash=Killed(), crash_after=7)
    with pytest.raises(Killed):
        run(tmp_path, LINES, "out.npy", engine=dying)
    engine = make_engine(pooling=settings)
    assert run(tmp_path, LINES, "out.npy", *flags, engine=engine) == 0
    assert len(engine.requests) == num_again


def test_interrupt_keeps_what_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    engine = make_engine(per_step=1, crash=KeyboardInterrupt(), crash_after=4)
    assert run(tmp_path, LINES, "out.npy", engine=engine) == 130
    assert "4 of 20 prompts are done. Start the same command again" in capsys.readouterr().err
    assert len(read_jsonl(tmp_path / "out.npy.partial.jsonl")) == 4
