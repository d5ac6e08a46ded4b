"""Encoder-decoders refuse by name what they cannot do."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm import EngineArgs
from jaxllm.exceptions import VLLMValidationError
from tests.models.whisper_cases import save_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint("turbo", tmp_path_factory.mktemp("whisper"))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"enable_lora": True}, "enable_lora"),
        ({"runner": "pooling"}, "runner"),
        ({"speculative_config": {"model": "FOLDER", "num_speculative_tokens": 2}}, "speculative_config"),
        ({"max_model_len": 49}, "max_model_len"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(folder: str, arguments: dict[str, Any], name: str) -> None:
    if "speculative_config" in arguments:
        arguments = {"speculative_config": {**arguments["speculative_config"], "model": folder}}
    with pytest.raises(VLLMValidationError) as error:
        EngineArgs(folder, dtype="float32", **arguments).create_engine_config()
    assert error.value.parameter == name


def test_a_config_with_more_tokens_than_frames_is_refused(folder: str) -> None:
    """The tokens of a prompt stand for frames."""
    overrides = {"max_target_positions": 51}
    with pytest.raises(VLLMValidationError, match="max_target_positions is 51, expected 50 frames"):
        EngineArgs(folder, hf_overrides=overrides).create_engine_config()
