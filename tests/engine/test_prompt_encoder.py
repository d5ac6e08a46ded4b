"""Prompts of two texts are cut like others, and what texts begin with is put before texts alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from jaxllm.engine.front.params_resolver import InputLimits
from jaxllm.engine.front.prompt_encoder import PromptEncoder
from jaxllm.text.prompts import begin_with, parse_prompt
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.text.tokenizer_parts import TokenizerParts
from tests.pooling_settings import make_settings

CLS, SEP, A, B, C = range(5)


@pytest.fixture
def encoder() -> PromptEncoder:
    backend = Backend(models.WordLevel({"[CLS]": CLS, "[SEP]": SEP, "a": A, "b": B, "c": C}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    tokenizer = Tokenizer(TokenizerParts(backend.to_str().encode()), lambda: pytest.fail("transformers was loaded"))
    limits = InputLimits(vocab_size=5, max_model_len=16, max_logprobs=0, priorities=False)
    return PromptEncoder(tokenizer, limits, make_settings(has_token_types=True))


def test_only_texts_begin_with_a_prompt() -> None:
    tokens = {"prompt": "a", "prompt_token_ids": np.array([A, B])}
    assert begin_with("b ", "a") == "b a"
    assert begin_with("b ", {"prompt": "a", "text_pair": "c"}) == {"prompt": "b a", "text_pair": "c"}
    assert begin_with("b ", tokens) is tokens


PAIR = {"prompt": "a", "text_pair": "a b c"}
IDS = {"prompt_token_ids": [A, B, C, C], "token_type_ids": [0, 0, 0, 1]}


@pytest.mark.parametrize(
    ("prompt", "options", "ids", "start"),
    [
        (PAIR, {}, [CLS, A, SEP, A, B, C, SEP], 3),
        (PAIR, {"truncate_prompt_tokens": 5}, [CLS, A, SEP, A, SEP], 3),
        (PAIR, {"truncate_prompt_tokens": 5, "truncation_side": "left"}, [CLS, A, SEP, C, SEP], 3),
        (PAIR, {"truncate_prompt_tokens": 2}, [CLS, A], None),
        (IDS, {"truncate_prompt_tokens": 2}, [A, B], None),
        (IDS, {"truncate_prompt_tokens": 2, "truncation_side": "left"}, [C, C], 1),
    ],
)
def test_pairs_are_cut(
    encoder: PromptEncoder, prompt: Any, options: dict[str, Any], ids: list[int], start: int | None
) -> None:
    [encoded] = encoder.encode([parse_prompt(prompt, "prompt")], ["prompt"], options, pools=True)
    assert (encoded.token_ids, encoded.pair_start) == (ids, start)
