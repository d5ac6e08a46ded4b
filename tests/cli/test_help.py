"""`--help` of commands with an engine's flags is short; a word asks for a group, or for flags that have it."""

from __future__ import annotations

import dataclasses
import re

import pytest

from jaxllm.cli.flags.help import GROUPS
from jaxllm.cli.main import main
from jaxllm.config.kinds import Unsupported
from jaxllm.config.server_arguments import ServerArgs
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.resolve.engine_args import EngineArgs

COMMANDS = (
    "serve",
    "generate",
    "embed",
    "chat",
    "run-batch",
    "check",
    "bench throughput",
    "bench latency",
    "bench startup",
)


def shown(capsys: pytest.CaptureFixture[str], command: str, word: str) -> str:
    """Return what the command's help shows on standard output."""
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), word])
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "")
    return out


def flags(text: str) -> set[str]:
    """Return the flags that a help explains, without switches' second names."""
    lines = re.findall(r"^  (-.*?)(?:  |$)", text, re.MULTILINE)
    return {name for line in lines for name in re.findall(r"--[\w-]+", line) if not name.startswith("--no-")}


def fields_of(*groups: str, kinds: tuple[type, ...] = (AsyncEngineArgs, ServerArgs)) -> set[str]:
    """Return the flags that the arguments of some groups have."""
    return {
        "--" + field.name.replace("_", "-")
        for kind in kinds
        for field in dataclasses.fields(kind)
        if field.metadata["group"] in groups and field.metadata["kind"].flag() and field.name != "disable_log_requests"
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_plain_help_is_short_and_names_the_groups(command: str, capsys: pytest.CaptureFixture[str]):
    text = shown(capsys, command, "--help")
    assert len(text.splitlines()) < 80
    assert "--max-num-seqs" not in text
    assert re.search(r"^  SchedulerConfig +\w", text, re.MULTILINE)
    assert "--help=all" in text
    assert "--config FILE.yaml" in text
    assert shown(capsys, command, "-h") == text


@pytest.mark.parametrize("command", COMMANDS)
def test_all_flags_are_shown_when_asked_for(command: str, capsys: pytest.CaptureFixture[str]):
    engine = {each.metadata["group"] for each in dataclasses.fields(EngineArgs)} - {""}
    missing = fields_of(*engine, kinds=(EngineArgs,)) - flags(shown(capsys, command, "--help=all"))
    assert missing == set()


def test_groups(capsys: pytest.CaptureFixture[str]):
    for word in ("SchedulerConfig", "schedulerconfig"):
        text = shown(capsys, "serve", f"--help={word}")
        assert flags(text) == fields_of("SchedulerConfig")
        assert "enable-lora" not in text
    names = shown(capsys, "serve", "--help=listgroup").splitlines()
    fields = (*dataclasses.fields(AsyncEngineArgs), *dataclasses.fields(ServerArgs))
    assert set(names) == {field.metadata["group"] for field in fields} - {""}
    assert set(names) == set(GROUPS), "each group is explained"
    frontend = [name for name in names if name.startswith("Frontend")]
    assert flags(shown(capsys, "serve", "--help=frontend")) == fields_of(*frontend)


def test_words(capsys: pytest.CaptureFixture[str]):
    text = shown(capsys, "serve", "--help=max_num_seqs")
    assert flags(text) == {"--max-num-seqs"}
    text = shown(capsys, "serve", "--help=max-num")
    taken, refused = text.split("not supported:")
    assert "--max-num-batched-tokens" in taken
    assert "--max-num-partial-prefills\n                        see long_prefill_token_threshold\n" in refused
    assert {name for name in flags(text) if "max-num" not in name} == set()
    assert flags(shown(capsys, "serve", "--help=OpenSSL")) == {"--ssl-ciphers"}, "said of it, not its name"


def test_refused_flags_say_why(capsys: pytest.CaptureFixture[str]):
    for kind in (AsyncEngineArgs, ServerArgs):
        field = next(each for each in dataclasses.fields(kind) if isinstance(each.metadata["kind"], Unsupported))
        text = " ".join(shown(capsys, "serve", "--help=" + field.name).split())
        assert field.metadata["kind"].reason in text


def test_what_nothing_has_is_misuse(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help=frobnicate"])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert "no group and no flag has 'frobnicate' in its name" in err
