"""What the asynchronous engine takes besides the engine arguments, as keywords and as flags."""

from __future__ import annotations

import argparse
import logging
from typing import Any

import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.utils.argparse_utils import FlexibleArgumentParser


def parse(*words: str) -> AsyncEngineArgs:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(allow_abbrev=False, exit_on_error=False))
    return AsyncEngineArgs.from_cli_args(parser.parse_args(words))


def test_defaults():
    args = AsyncEngineArgs("m")
    assert (args.enable_log_requests, args.max_num_queued_reqs, args.max_num_queued_tokens) == (False, None, None)
    assert args.portable() == EngineArgs("m").portable()
    assert parse("--model", "m") == args


def test_flags():
    words = ("--enable-log-requests", "--enable-sleep-mode", "--max-num-queued-reqs", "64", "--seed", "3")
    args = parse("--model", "m", *words, "--max-num-queued-tokens", "25.6k")
    assert args == AsyncEngineArgs(
        "m",
        seed=3,
        enable_log_requests=True,
        enable_sleep_mode=True,
        max_num_queued_reqs=64,
        max_num_queued_tokens=25_600,
    )
    assert AsyncEngineArgs(**args.portable()) == args


def test_its_own_flags_alone():
    parser = AsyncEngineArgs.add_cli_args(argparse.ArgumentParser(), async_args_only=True)
    assert set(vars(parser.parse_args([]))) == {
        "enable_log_requests",
        "disable_log_requests",
        "log_config_file",
        "max_log_len",
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "max_ttft_ms",
        "shutdown_timeout",
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"max_num_queued_reqs": 0},
        {"max_ttft_ms": 0},
        {"max_num_queued_reqs": 1.5},
        {"max_num_queued_tokens": -1},
        {"shutdown_timeout": -1},
        {"max_log_len": -1},
        {"log_config_file": ""},
        {"max_num_queued_tokens": "x"},
        {"enable_log_requests": 1},
        {"enable_log_requests": None},
        {"disable_log_requests": "no"},
        {"seed": -1},
    ],
)
def test_bad_values_name_their_argument(fields: dict[str, Any]):
    with pytest.raises(VLLMValidationError, match=next(iter(fields))):
        AsyncEngineArgs("m", **fields)


@pytest.mark.parametrize("name", ["max_num_queued_reqs", "enable_log_requests"])
def test_the_synchronous_engine_says_who_takes_them(name: str):
    fields: dict[str, Any] = {name: True}
    with pytest.raises(VLLMValidationError, match=f"{name}=True is not supported: .*see AsyncEngineArgs"):
        EngineArgs("m", **fields)


def test_the_older_name_for_logging_requests(caplog: pytest.LogCaptureFixture):
    assert AsyncEngineArgs("m", disable_log_requests=True) == AsyncEngineArgs("m")
    assert AsyncEngineArgs("m", disable_log_requests=False) == AsyncEngineArgs("m", enable_log_requests=True)
    assert parse("--model", "m", "--disable-log-requests") == AsyncEngineArgs("m")
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["disable_log_requests is deprecated; use enable_log_requests, which is off by default"] * 3
    with pytest.raises(VLLMValidationError, match="contradict"):
        AsyncEngineArgs("m", disable_log_requests=True, enable_log_requests=True)


def test_parts_of_a_configuration_are_elsewhere():
    config = AsyncEngineArgs("m").create_engine_config()
    assert not hasattr(config, "model_config")
    with pytest.raises(AttributeError, match=r"no 'model_config'\. .*see AsyncLLM\.vllm_config\."):
        _ = config.model_config
    with pytest.raises(AttributeError, match=r"no 'instance_id'\.$"):
        _ = config.instance_id
    assert config.profiler_config is None, "what is an argument is there"
