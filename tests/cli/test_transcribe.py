"""`jaxllm transcribe` keeps an engine busy with the clips of all files, and one broken file ends no other."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxllm.cli.batch import transcribe
from jaxllm.cli.main import main, make_parser
from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.items import ClipInput
from jaxllm.outputs import RequestOutput
from tests.media.sounds import encode
from tests.speech.support import (
    MAX_LEN,
    MULTILINGUAL,
    RATE,
    make_alignment,
    make_output,
    make_tokenizer,
    make_tokens,
    noise,
    spell,
)

TOKENS = make_tokens()


class SpeechEngine:
    """Answers requests in random order: each clip's text is its length. Clips of `failing` seconds fail, those of
    `refused` seconds are refused.
    """

    def __init__(self, *, transcribes: bool = True, failing: float = -1, refused: float = -1) -> None:
        self._failing, self._refused = failing, refused
        media = SimpleNamespace(clips=ClipInput(num_mels=80, num_frames=1_500, start_token_id=TOKENS.start))
        ready = SimpleNamespace(transcribes=transcribes, media=media, vocab_size=MULTILINGUAL)
        self.front = SimpleNamespace(ready=ready, require_tokenizer=make_tokenizer)
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=2))
        self.model_config = SimpleNamespace(seed=0, max_model_len=MAX_LEN, model="whisper")
        self.most = self.num_shutdowns = 0
        self.seeds: set[int] = set()
        self._waiting: dict[str, RequestOutput] = {}

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        samples, rate = prompt["multi_modal_data"]["audio"]
        seconds = len(samples) / rate
        if abs(seconds - self._refused) < 0.1:
            raise VLLMValidationError("the clip is refused.", parameter="multi_modal_data")
        ids = [TOKENS.languages["de"]] if params.allowed_token_ids else spell(TOKENS, 0.0, f" {seconds:.0f} s", seconds)
        output = make_output([*ids, TOKENS.end], -0.1, None)
        if abs(seconds - self._failing) < 0.1:
            output.outputs[0].finish_reason, output.outputs[0].stop_reason = "error", "no finite numbers"
        output.request_id = request_id
        if not params.allowed_token_ids:
            self.seeds.add(params.seed)
        self._waiting[request_id] = output
        self.most = max(self.most, len(self._waiting))

    def step(self) -> list[RequestOutput]:
        assert self._waiting
        chosen = random.sample(list(self._waiting), min(2, len(self._waiting)))
        return [self._waiting.pop(request_id) for request_id in chosen]

    def abort_request(self, request_ids: str) -> None:
        del self._waiting[request_ids]

    def align(self, prompt: Any, token_ids: list[int]) -> Any:
        return make_alignment(len(token_ids))

    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting)

    def shutdown(self) -> None:
        self.num_shutdowns += 1


def save(path: Path, seconds: float) -> Path:
    path.write_bytes(encode(noise(seconds)[:, None], RATE))
    return path


def run(engine: SpeechEngine, *words: object) -> int:
    args = make_parser()[0].parse_args(["transcribe", *map(str, words), "--model", "whisper"])
    return transcribe.run(args, lambda _args: engine)  # type: ignore[arg-type, return-value]


def test_files_of_any_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine, lengths = SpeechEngine(), {f"file{i}": random.randint(3, 100) for i in range(7)}
    lengths["file0"] = 150  # clips enough for the engine, however slowly the other files are read
    files = [save(tmp_path / f"{name}.wav", seconds) for name, seconds in lengths.items()]
    assert run(engine, *files, "--output-dir", tmp_path / "out", "--language", "en") == 0
    for name, seconds in lengths.items():
        lines = (tmp_path / "out" / f"{name}.txt").read_text().splitlines()
        assert len(lines) == -(-seconds // 30) or seconds > 29
        assert sum(int(line.removesuffix(" s")) for line in lines) == pytest.approx(seconds, abs=len(lines))
    assert len(list((tmp_path / "out").iterdir())) == len(files)
    assert engine.most == 4, "twice the sequences of a batch are in the engine"
    assert engine.num_shutdowns == 1
    assert len(engine.seeds) == len(files)
    assert "100%" in capsys.readouterr().err


def test_rounding_does_not_pass_the_end_of_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with transcribe._progress() as advance:
        advance(0.0, 0.3)
        advance(0.1, 0.0)
        advance(0.2, 0.0)  # the sum is above 0.3
    assert "100%" in capsys.readouterr().err


def test_a_broken_file_ends_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.mp3"
    broken.write_bytes(b"no sound")
    failing, refused = save(tmp_path / "failing.wav", 1), save(tmp_path / "refused.wav", 2)
    good, last = save(tmp_path / "good.wav", 40), save(tmp_path / "last.wav", 5)
    files = [broken, good, failing, tmp_path / "missing.wav", refused, last]
    random.shuffle(files)
    engine = SpeechEngine(failing=1, refused=2)
    assert run(engine, *files, "--output-dir", tmp_path / "out", "--output-format", "json") == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["good.json", "last.json"]
    shown = json.loads((tmp_path / "out" / "good.json").read_text())
    assert (shown["language"], len(shown["segments"])) == ("de", 2)
    errors = capsys.readouterr().err
    for words in (
        f"{broken}: file: the audio is not a WAV",
        f"{failing}: no finite numbers.",
        f"{refused}: the clip is refused.",
        f"{tmp_path / 'missing.wav'}: No such file",
        "4 of 6 files failed.",
    ):
        assert words in errors


def test_all_formats(tmp_path: Path) -> None:
    assert run(SpeechEngine(), save(tmp_path / "a.wav", 5), "--output-dir", tmp_path, "--output-format", "all") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.srt", "a.tsv", "a.txt", "a.vtt", "a.wav"]


@pytest.mark.parametrize(
    ("words", "engine", "named"),
    [
        (("a.wav", "b/a.mp3"), {}, "a.wav and b/a.mp3 would have the same name"),
        (("a.wav", "--word-timestamps"), {}, "word-timestamps writes times into JSON"),
        (("a.wav", "--language", "xx"), {}, "language must be one of de, en, ja"),
        (("a.wav", "--prompt", "<|en|>"), {}, ""),
        (("a.wav",), {"transcribes": False}, "does not turn speech into text"),
    ],
)
def test_misuse(
    words: tuple[str, ...],
    engine: dict[str, bool],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(transcribe, "load_engine", lambda _args: SpeechEngine(**engine))
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "a.wav", 3)
    status = main(["transcribe", *words, "--model", "whisper"])
    assert status == (2 if named else 1)
    assert named in capsys.readouterr().err
