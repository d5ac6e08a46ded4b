"""limit_mm_per_prompt names the modalities that models take here; those of vLLM alone may be 0."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.config.arguments import EngineArguments
from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.items import Modality
from jaxllm.resolve.media_settings import media_limits


def limits(values: dict[str, Any]) -> dict[Modality, int]:
    return dict(media_limits(EngineArguments(model="a", limit_mm_per_prompt=values)))


def test_limits_of_what_no_model_takes_may_be_zero():
    assert limits({"image": 2, "video": {"count": 3}, "audio": 4, "vision_chunk": {"count": 0}}) == {
        "image": 2,
        "video": 3,
        "audio": 4,
    }


@pytest.mark.parametrize(("name", "value"), [("sound", 1), ("images", 0), ("vision_chunk", {})])
def test_other_modalities_are_refused(name: str, value: Any):
    with pytest.raises(VLLMValidationError, match=f"'{name}' is not supported") as caught:
        limits({name: value})
    assert caught.value.parameter == "limit_mm_per_prompt"
