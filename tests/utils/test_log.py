"""A file sets the log up, of an engine's core too, or is refused by name."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.utils.log import configure_log
from tests.async_engine.support import mock_llm, tiny_args

SETTINGS: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"short": {"format": "<%(name)s %(message)s>"}},
    "handlers": {"file": {"class": "logging.FileHandler", "formatter": "short", "filename": "log.txt"}},
    "loggers": {"jaxllm": {"handlers": ["file"], "level": "WARNING", "propagate": False}},
}


def write_settings(folder: Path) -> Path:
    """Write the settings, which log to log.txt beside them."""
    handler = SETTINGS["handlers"]["file"] | {"filename": str(folder / "log.txt")}
    file = folder / "log.json"
    file.write_text(json.dumps(SETTINGS | {"handlers": {"file": handler}}))
    return file


def test_a_file_takes_the_place_of_what_showed_the_log(tmp_path: Path):
    """A process of its own: logging is set up for all of one."""
    program = (
        "import logging, sys; from jaxllm.utils.log import configure_log, show_log\n"
        "show_log(); configure_log(sys.argv[1]); show_log()\n"
        "logging.getLogger('jaxllm.a').warning('shown'); logging.getLogger('jaxllm.a').info('not shown')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(write_settings(tmp_path))], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert (tmp_path / "log.txt").read_text() == "<jaxllm.a shown>\n"


@pytest.mark.parametrize(
    "content", [None, "{", "[]", '{"version": 2}', '{"version": 1, "handlers": {"a": {"class": "no.such"}}}']
)
def test_files_that_cannot_be_used(content: str | None, tmp_path: Path):
    file = tmp_path / "log.json"
    if content is not None:
        file.write_text(content)
    before = logging.getLogger("jaxllm").handlers[:]
    with pytest.raises(VLLMValidationError, match="log_config_file") as refused:
        configure_log(str(file))
    assert refused.value.parameter == "log_config_file"
    assert logging.getLogger("jaxllm").handlers == before
    with pytest.raises(VLLMValidationError, match="log_config_file"):
        AsyncLLM.from_engine_args(AsyncEngineArgs("no such model", log_config_file=str(file)))


def test_the_cores_process_is_set_up_too(tmp_path: Path):
    """Its front end here is not: `AsyncLLM.from_engine_args` does that."""
    args = tiny_args(log_config_file=str(write_settings(tmp_path)))
    with mock_llm(args, in_process=True):
        assert (tmp_path / "log.txt").exists()
