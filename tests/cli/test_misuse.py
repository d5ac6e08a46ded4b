"""What users of other programs type, or nearly type, is refused with what to use here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from jaxllm.cli.flags.sampling_flags import talk_defaults
from jaxllm.cli.main import main
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.hardware import find_topology
from tests.e2e.tiny_tokenizer import save_tokenizer
from tests.models.tiny import folder


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("run", "jaxllm chat --model"),
        ("download", "it is `jaxllm pull`"),
        ("ps", "/v1/models"),
        ("servee", "did you mean 'serve'?"),
        ("zzzz", "there are bench, chat"),
    ],
)
def test_commands_of_other_programs(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "MODEL"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["serve", "m", "--max-num-seq", "4"], "--max-num-seqs"),
        (["generate", "m", "--temprature=0"], "--temperature"),
        (["bench", "serve", "--num_prompt", "4"], "--num-prompts"),
    ],
)
def test_the_nearest_flag_is_named(words: list[str], flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert f"did you mean {flag}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("topology", "near"), [("H100", "h100"), ("v5e", "v5e:1x1"), ("v6e:3x3", "v6e:1x1"), ("h10", "h100")]
)
def test_the_nearest_topology_is_named(topology: str, near: str) -> None:
    with pytest.raises(VLLMValidationError, match=f"Did you mean '{near}'"):
        find_topology(topology)


def test_a_talk_with_a_model_that_does_not_say_how_to_sample(capsys: pytest.CaptureFixture[str]) -> None:
    assert talk_defaults({"max_tokens": 9}, {}) == {"temperature": 0.7, "min_p": 0.05}
    assert capsys.readouterr().err.count("temperature 0.7 and min_p 0.05") == 1
    assert talk_defaults({}, {"temperature": 0.0}) == {"min_p": 0.05}
    capsys.readouterr()
    assert talk_defaults({"top_p": 0.9}, {}) == {}
    assert talk_defaults(None, {}) == {}
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("words", [["chat", "--quick", "hi", "--model"], ["generate", "--chat", "--prompt", "hi"]])
def test_a_model_without_a_template_is_refused_before_its_weights_are_looked_for(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(folder("llama3_tied") / "config.json", tmp_path)
    assert main([*words, save_tokenizer(tmp_path)]) == 2
    assert "has no chat template: name one with --chat-template" in capsys.readouterr().err
