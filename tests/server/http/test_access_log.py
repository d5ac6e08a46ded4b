"""The log of requests can be turned off, for all or for some paths."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.http.access_log import NotTheseEndpoints, log_settings


def record(path: str) -> logging.LogRecord:
    arguments = ("127.0.0.1:1", "GET", path, "1.1", 200)
    return logging.LogRecord("uvicorn.access", logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', arguments, None)


@pytest.mark.parametrize(
    ("path", "is_shown"), [("/health", False), ("/health?a=b", False), ("/healthy", True), ("/v1/models", True)]
)
def test_paths_that_are_not_worth_a_line(path: str, is_shown: bool) -> None:
    settings = log_settings(ServerArgs(disable_access_log_for_endpoints="/health, /metrics"))
    made = settings["log_config"]["filters"]["endpoints"]
    assert made.pop("()")(**made).filter(record(path)) is is_shown
    loggers = settings["log_config"]["loggers"]
    assert [name for name, each in loggers.items() if "filters" in each] == ["uvicorn.access"]


def test_other_records_pass() -> None:
    other = logging.LogRecord("uvicorn.error", logging.INFO, "", 0, "text", None, None)
    assert NotTheseEndpoints(["/health"]).filter(other)


def test_without_a_list_there_is_no_filter_and_the_log_can_be_off() -> None:
    settings = log_settings(ServerArgs())
    assert "filters" not in settings["log_config"]
    assert settings["access_log"]
    assert not log_settings(ServerArgs(disable_uvicorn_access_log=True))["access_log"]


def test_a_file_that_sets_the_log_up_has_no_second_word_beside_it() -> None:
    settings = log_settings(ServerArgs(disable_uvicorn_access_log=True), "log.json")
    assert settings == {"log_config": None, "log_level": None, "access_log": False}
    refused: dict[str, Any] = {"uvicorn_log_level": "debug", "disable_access_log_for_endpoints": "/health"}
    for flag, value in refused.items():
        with pytest.raises(VLLMValidationError, match=f"{flag} cannot go with log_config_file"):
            log_settings(ServerArgs(**{flag: value}), "log.json")
