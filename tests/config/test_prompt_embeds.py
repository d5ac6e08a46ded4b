"""Prompts of embeddings are refused at the start where they cannot be: by the model, or what else is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.logits_processors import AdapterLogitsProcessor
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.resolve.kv_cache_size import step_config
from jaxllm.resolve.media_settings import media_size
from tests.e2e.media_goldens import folder as media_folder
from tests.models.tiny import folder


class OnHost(AdapterLogitsProcessor):
    """A logits processor that is a class."""

    def is_argmax_invariant(self) -> bool:
        return True

    def new_req_logits_processor(self, params: Any) -> None:
        return None


def resolve(case: str, **fields: Any) -> Any:
    arguments: dict[str, Any] = {"max_num_batched_tokens": 64, "load_format": "dummy", "enable_prompt_embeds": True}
    return EngineArgs(
        str(media_folder(case) if case == "qwen2_vl" else folder(case)), **(arguments | fields)
    ).create_engine_config()


@pytest.mark.parametrize(
    ("case", "fields", "reason"),
    [
        ("bert", {}, "is for models that generate"),
        ("llama3_tied", {"runner": "pooling"}, "is for models that generate"),
        ("qwen2_vl", {}, "load no tower"),
        ("gemma4_e2b", {"language_model_only": True}, "whose layers look tokens up themselves"),
        ("gpt2", {}, "adds to embeddings before its first layer"),
        ("opt_350m", {}, "adds to embeddings before its first layer"),
        ("llama3_tied", {"speculative_config": {"model": "FOLDER"}}, "does not go with a draft model"),
        ("llama3_tied", {"logits_processors": [OnHost]}, "logits_processors that are classes"),
    ],
)
def test_what_cannot_take_them_is_refused_by_name(case: str, fields: dict[str, Any], reason: str) -> None:
    if "speculative_config" in fields:
        fields = {"speculative_config": {"model": str(folder(case)), "num_speculative_tokens": 2}}
    with pytest.raises(VLLMValidationError, match=f"enable_prompt_embeds .*{reason}") as caught:
        resolve(case, **fields)
    assert caught.value.parameter == "enable_prompt_embeds"


@pytest.mark.parametrize(("tokens", "num_rows"), [(64, 256), (512, 512)])
def test_the_cache_holds_a_step_or_a_part(tokens: int, num_rows: int) -> None:
    config = resolve("llama3_tied", max_num_batched_tokens=tokens)
    assert media_size(config).num_rows == step_config(config).num_media_rows == num_rows
    assert media_size(resolve("llama3_tied", enable_prompt_embeds=False)).num_rows == 0


def test_a_model_whose_tower_is_not_loaded_takes_them() -> None:
    assert media_size(resolve("gemma3_multimodal", language_model_only=True)).num_rows == 256
