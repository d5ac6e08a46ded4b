"""`LLM(reasoning_parser=...)`: structured outputs hold after the reasoning, and leave the reasoning alone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm import LLM, SamplingParams, TokensPrompt
from jaxllm.engine.front.reasoning_grammar import ReasoningGrammar
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.structured_outputs import StructuredOutputsParams
from tests.async_engine.support import read_one, tiny_args
from tests.constraints.grammar_walks import make_compiler, takes
from tests.e2e.tiny_tokenizer import save_tokenizer
from tests.server.support import served

pytestmark = pytest.mark.engine

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"

PATTERN = "[0-9]{3}"
PLAIN = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
FORMED = SamplingParams(temperature=0.0, max_tokens=12, structured_outputs=StructuredOutputsParams(regex=PATTERN))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def llm(tokenizer: str) -> Iterator[LLM]:
    args = tiny_args(tokenizer, chat_template=TEMPLATE, batch_invariant=True, reasoning_parser="qwen3")
    with LLM.from_engine_args(args) as llm:
        yield llm


def texts(llm: LLM, prompts: list[object], params: SamplingParams) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]  # pyright: ignore[reportArgumentType]


def test_the_constraint_begins_where_reasoning_has_ended(llm: LLM) -> None:
    ended, begun, implied = "is it? <think>yes</think>", "is it? <think>", "is it?"
    ids = llm.get_tokenizer().encode(ended)
    formed = texts(llm, [ended, begun, implied, TokensPrompt(prompt_token_ids=ids)], FORMED)
    plain = texts(llm, [ended, begun, implied, TokensPrompt(prompt_token_ids=ids)], PLAIN)
    assert re.fullmatch(PATTERN, formed[0])
    assert formed[3] == formed[0]
    assert not re.fullmatch(PATTERN, plain[0][:3])
    assert formed[1] == plain[1], "reasoning is the model's own"
    assert "\ufffd" in plain[2], "bytes that are no text, which a grammar does not allow in reasoning either"
    assert not re.search("[0-9]", formed[2])
    assert "</think>" not in "".join(formed), "the model does not end its reasoning by chance"


def test_the_asynchronous_engine_does_the_same(llm: LLM, tokenizer: str) -> None:
    prompts = ["is it? <think>yes</think>", "is it? <think>"]
    args = tiny_args(tokenizer, chat_template=TEMPLATE, batch_invariant=True, reasoning_parser="qwen3")

    async def ask(engine: AsyncLLM) -> list[str]:
        outputs = [await read_one(engine, prompt, FORMED, prompt) for prompt in prompts]
        stream = engine.generate(prompts[1], FORMED, "at once", reasoning_ended=True)
        outputs += [output async for output in stream][-1:]
        return [output.outputs[0].text for output in outputs]

    with AsyncLLM.from_engine_args(args, disable_frontend_multiprocessing=True) as engine:
        *same, at_once = asyncio.run(ask(engine))
    assert same == texts(llm, list(prompts), FORMED)
    assert re.fullmatch(PATTERN, at_once)


def test_params_are_left_as_they_are(llm: LLM) -> None:
    before = repr(FORMED)
    texts(llm, ["a", "b</think>"], FORMED)
    assert repr(FORMED) == before


@pytest.mark.parametrize(
    ("parser", "prompt", "taken", "refused"),
    [
        ("qwen3", "user", ["so</think>123", "</think>\n\n123"], ["123", "so</think>12", "so</think>\n\n\n123"]),
        ("qwen3", "user<think>", ["so</think>123"], ["123"]),
        ("qwen3", "<think>so</think>\n", ["123"], ["so</think>123"]),
        ("deepseek_v3", "user", ["123", "<think>so</think>123"], ["so</think>123"]),
        ("openai_gptoss", "user", ["<|channel|>final<|message|>123"], ["123"]),
    ],
)
def test_what_outputs_may_be(
    llm: LLM, smollm2_path: str, parser: str, prompt: str, taken: list[str], refused: list[str]
) -> None:
    compiler = make_compiler(smollm2_path)
    [params] = ReasoningGrammar(parser, llm.llm_engine.front).behind_reasoning([prompt], [FORMED])
    assert [text for text in taken if not takes(compiler, smollm2_path, params.structured_outputs, text)] == []
    assert [text for text in refused if takes(compiler, smollm2_path, params.structured_outputs, text)] == []


def test_prompts_that_allow_it_share_their_params(llm: LLM) -> None:
    grammar = ReasoningGrammar("qwen3", llm.llm_engine.front)
    one, two, three, four = grammar.behind_reasoning(["a", "b", "c</think>", "d"], [FORMED, FORMED, FORMED, PLAIN])
    assert one is two
    assert three is not one
    assert four is PLAIN


def test_a_constraint_that_nothing_can_stand_before_is_refused(llm: LLM) -> None:
    tag = '{"type": "structural_tag", "structures": [], "triggers": ["<f"]}'
    params = SamplingParams(structured_outputs=StructuredOutputsParams(structural_tag=tag))
    with pytest.raises(VLLMValidationError, match=r"prompts\[0\].*after reasoning"):
        llm.generate("a", params, use_tqdm=False)


def test_without_a_tokenizer_it_is_refused_at_once(tokenizer: str) -> None:
    with pytest.raises(VLLMValidationError, match="reasoning_parser needs a tokenizer"):
        tiny_args(tokenizer, skip_tokenizer_init=True, reasoning_parser="qwen3")


def test_reasoning_may_be_constrained_too(tokenizer: str) -> None:
    config = {"enable_in_reasoning": True}
    args = tiny_args(tokenizer, reasoning_parser="qwen3", structured_outputs_config=config)
    with LLM.from_engine_args(args) as llm:
        assert all(re.fullmatch(PATTERN, text) for text in texts(llm, ["a", "a<think>"], FORMED))


def test_a_server_may_constrain_reasoning_too(tokenizer: str) -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "temperature": 0, "max_tokens": 12}
    chat["structured_outputs"] = {"regex": PATTERN}
    for is_constrained in (False, True):
        config = {"enable_in_reasoning": is_constrained}
        args = tiny_args(tokenizer, chat_template=TEMPLATE, reasoning_parser="qwen3", structured_outputs_config=config)
        engine = AsyncLLM.from_engine_args(args, disable_frontend_multiprocessing=True)
        with engine, served(engine, "--reasoning-parser", "qwen3") as server:
            [choice] = server.post("/v1/chat/completions", chat).json["choices"]
            assert bool(re.fullmatch(PATTERN, choice["message"]["reasoning"])) == is_constrained
            fields = {"prompt": "a<think>", "structured_outputs": {"regex": PATTERN}, "temperature": 0}
            [choice] = server.post("/v1/completions", fields | {"max_tokens": 12}).json["choices"]
            assert bool(re.fullmatch(PATTERN, choice["text"])) == is_constrained
