"""`LLM` keeps its promises on a real model: HF's tokens, text, limits, stops, seeds, log-probabilities, lifetimes.

One engine with one bucket serves all: two programs are compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm import LLM, CompletionOutput, RequestOutput, SamplingParams, TokensPrompt
from jaxllm.exceptions import VLLMValidationError
from jaxllm.sampling_params import RequestOutputKind
from tests.e2e.goldens import NUM_TOKENS, assert_equal_to_hf, generate_rows, load_rows
from tests.e2e.inside import core_of, scheduler_of
from tests.engine.fake_core import BytesClient

pytestmark = pytest.mark.usefixtures("quick_compile")

CONTEXT = 96
HI = [{"role": "user", "content": "Say hi"}]
GOING_ON = {"continue_final_message": True, "add_generation_prompt": False}
EMOJI = "Emoji: 😀 🎉 😀 🎉 😀 🎉 😀"


@pytest.fixture(scope="module")
def engine(smollm2_path: str) -> Iterator[LLM]:
    limits: dict[str, Any] = {"max_num_batched_tokens": 8, "max_num_seqs": 8, "max_model_len": CONTEXT}
    with LLM(smollm2_path, dtype="float32", enforce_eager=True, block_size=16, **limits) as llm:
        # All that the tests below send crosses as bytes, both ways.
        llm.llm_engine._core = BytesClient(core_of(llm))
        yield llm


@pytest.fixture
def llm(engine: LLM) -> Iterator[LLM]:
    """Start the engine; every test must leave it idle and consistent."""
    yield engine
    assert not engine.llm_engine.has_unfinished_requests()
    scheduler = scheduler_of(engine)
    scheduler.check()
    assert scheduler.stats().num_blocks_in_use == 0


def generate(llm: LLM, prompts: Any, *params: SamplingParams, **fields: Any) -> list[RequestOutput]:
    wanted = list(params) or SamplingParams(**{"temperature": 0.0, "max_tokens": 6} | fields)
    return llm.generate(prompts, wanted, use_tqdm=False)


def chat(llm: LLM, messages: list[Any], template: dict[str, Any] | None = None, **fields: Any) -> list[RequestOutput]:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 6} | fields)
    return llm.chat(messages, params, use_tqdm=False, **(template or {}))


def stream(llm: LLM, request_id: str, prompt: Any, **fields: Any) -> list[RequestOutput]:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 6} | fields)
    llm.llm_engine.add_request(request_id, prompt, params)
    outputs: list[RequestOutput] = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
    return outputs


def test_forms_of_prompts_and_a_list_of_params(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("The capital of France is")
    prompts = ["The capital of France is", ids, TokensPrompt(prompt_token_ids=ids, prompt="as ids")]
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (6, 3, 1)]
    outputs = generate(llm, prompts, *params)
    first = int(outputs[0].request_id)
    assert [output.request_id for output in outputs] == [str(first + i) for i in range(3)]
    assert [output.prompt for output in outputs] == ["The capital of France is", None, "as ids"]
    assert all(output.prompt_token_ids == ids and output.finished for output in outputs)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6, 3, 1]
    assert outputs[0].outputs[0].text.startswith(" Paris")
    assert outputs[0].outputs[0].finish_reason == "length"
    assert outputs[0].metrics is not None
    stats = outputs[0].metrics
    assert stats.queued_ts <= stats.scheduled_ts <= stats.first_token_ts <= stats.last_token_ts
    assert stats.num_generation_tokens == 6


def test_short_prompts_equal_hf(llm: LLM) -> None:
    """The others are in test_smollm2.py."""
    rows = [row for row in load_rows("smollm2-135m-instruct-q4_1") if len(row["prompt_ids"]) <= CONTEXT - NUM_TOKENS]
    assert len(rows) == 9
    assert_equal_to_hf(generate_rows(llm, rows), rows)


def test_lengths_up_to_the_context(llm: LLM) -> None:
    (longest,) = generate(llm, [[5] * (CONTEXT - 1)], max_tokens=None, ignore_eos=True)
    assert (len(longest.outputs[0].token_ids), longest.outputs[0].finish_reason) == (1, "length")
    (full,) = generate(llm, [[5] * (CONTEXT - 9)], max_tokens=None, ignore_eos=True)
    assert len(full.outputs[0].token_ids) == 9
    with pytest.raises(VLLMValidationError, match=rf"prompts\[1\]: The decoder prompt \(length {CONTEXT}\) plus"):
        generate(llm, [[5], [5] * CONTEXT])


def test_streamed_pieces_are_the_whole(llm: LLM) -> None:
    delta = RequestOutputKind.DELTA
    for fields in ({"max_tokens": 7, "n": 2}, {"max_tokens": 7, "stop": ["city of Nova"]}):
        (whole,) = generate(llm, "Once upon a time", **fields)
        pieces = stream(llm, "mine", "Once upon a time", output_kind=delta, **fields)
        for index, completion in enumerate(whole.outputs):
            parts = [part for piece in pieces for part in piece.outputs if part.index == index]
            assert len(parts) > 4
            assert "".join(part.text for part in parts) == completion.text
            assert [token for part in parts for token in part.token_ids] == completion.token_ids
            assert (parts[-1].finish_reason, parts[-1].stop_reason) == (
                completion.finish_reason,
                completion.stop_reason,
            )


def test_stop_strings(llm: LLM) -> None:
    (free,) = generate(llm, "Count: 1 2 3 4")
    assert free.outputs[0].text == " 5 6 7"
    (cut,) = generate(llm, "Count: 1 2 3 4", stop=["no", " 6"])
    assert (cut.outputs[0].text, cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == (" 5", "stop", " 6")
    (kept,) = generate(llm, "Count: 1 2 3 4", stop=" 6", include_stop_str_in_output=True)
    assert kept.outputs[0].text == " 5 6"
    (long,) = generate(llm, "Count: 1 2 3 4", stop=["x" * 4096])
    assert long.outputs[0].text == free.outputs[0].text


def test_an_id_may_be_used_again_at_once(llm: LLM) -> None:
    first = stream(llm, "same", "Count: 1 2 3 4", stop=[" 6"])[-1]
    assert first.outputs[0].finish_reason == "stop"
    again = stream(llm, "same", "Count: 1 2 3 4")[-1]
    assert (again.outputs[0].text, again.outputs[0].finish_reason) == (" 5 6 7", "length")
    llm.llm_engine.add_request("same", "Count: 1 2 3 4", SamplingParams())
    llm.llm_engine.step()
    llm.llm_engine.abort_request("same")
    assert stream(llm, "same", "Count: 1 2 3 4")[-1].outputs[0].text == " 5 6 7"


def test_what_ends_an_output(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    eos = tokenizer.eos_token_id

    def answer(**fields: Any) -> CompletionOutput:
        begun = [*HI, {"role": "assistant", "content": "Hi! How can I help"}]
        return chat(llm, begun, GOING_ON, **{"max_tokens": 8} | fields)[0].outputs[0]

    plain = answer()
    ids = list(plain.token_ids)
    assert (len(ids), plain.finish_reason, plain.stop_reason, ids[-1]) == (4, "stop", None, eos)
    assert plain.text == " you today?"

    ignoring = answer(ignore_eos=True, skip_special_tokens=False)
    assert (len(ignoring.token_ids), ignoring.finish_reason) == (8, "length")
    assert ignoring.text.startswith(" you today?<|im_end|>")
    assert answer(ignore_eos=True).text.startswith(" you today?\n")
    longer = answer(min_tokens=6)
    assert longer.token_ids[:3] == ids[:3]
    assert eos not in longer.token_ids[:6]

    stopped = answer(stop_token_ids=[ids[1]])
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == (ids[:2], "stop", ids[1])
    assert stopped.text == " you"
    assert answer(stop_token_ids=[ids[1]], include_stop_str_in_output=True).text == " you today"
    assert ids[1] not in answer(stop_token_ids=[ids[1]], min_tokens=3).token_ids[:3]


def test_greedy_outputs_are_equal(llm: LLM) -> None:
    (output,) = generate(llm, "The sky", n=10)
    assert [completion.index for completion in output.outputs] == list(range(10))
    assert len({completion.text for completion in output.outputs}) == 1


def test_a_seed_decides_alone_and_in_any_batch(llm: LLM) -> None:
    def tokens(output: RequestOutput) -> list[Any]:
        return [completion.token_ids for completion in output.outputs]

    seeded = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=6)
    alone = tokens(generate(llm, "The sky", seeded)[0])
    others = [SamplingParams(temperature=1.0, max_tokens=5), SamplingParams(temperature=0, max_tokens=7, logprobs=1)]
    among = generate(llm, ["x", "The sky", "A longer prompt of several tokens"], others[0], seeded, others[1])
    assert tokens(among[1]) == alone
    assert alone[0] != alone[1] != alone[2]
    child = SamplingParams(temperature=1.0, seed=4, max_tokens=6)
    assert tokens(generate(llm, "The sky", child)[0]) == [alone[1]]


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=6, logprobs=3)
    (output,) = generate(llm, "The capital of France is", params)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    total = 0.0
    for token, entries in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(entries)) == token
        assert len(entries) == (3 if entries[token].rank in (1, 2, 3) else 4)
        best = [entry for other, entry in entries.items() if other != token or entry.rank in (1, 2, 3)]
        assert sorted(entry.rank or 0 for entry in best) == [1, 2, 3]
        values = [entry.logprob for entry in sorted(best, key=lambda entry: entry.rank or 0)]
        assert values == sorted(values, reverse=True)
        assert all(entry.decoded_token == llm.get_tokenizer().decode([other]) for other, entry in entries.items())
        total += entries[token].logprob
    assert completion.cumulative_logprob == pytest.approx(total)
    assert any(len(entries) == 4 for entries in completion.logprobs), "every sampled token was among the top 3"
    (bare,) = generate(llm, "The capital of France is", logprobs=0)
    assert all(list(entries) == [token] for token, entries in zip(*_rows(bare), strict=True))
    with pytest.raises(VLLMValidationError, match="greater than max allowed: 20"):
        generate(llm, "a", logprobs=21)


def _rows(output: RequestOutput) -> tuple[Any, Any]:
    return output.outputs[0].token_ids, output.outputs[0].logprobs


def test_text_never_shows_half_a_character(llm: LLM) -> None:
    (whole,) = generate(llm, EMOJI, max_tokens=7, ignore_eos=True)
    pieces = stream(llm, "mine", EMOJI, max_tokens=7, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    assert any(piece.outputs[0].text == "" for piece in pieces), "no character takes two tokens here"
    assert "".join(piece.outputs[0].text for piece in pieces) == whole.outputs[0].text
    for cut in range(1, 4):
        text = generate(llm, EMOJI, max_tokens=cut, ignore_eos=True)[0].outputs[0].text
        assert "\N{REPLACEMENT CHARACTER}" not in text
        assert whole.outputs[0].text.startswith(text)


def test_chat(llm: LLM) -> None:
    french = [{"role": "user", "content": "Say bonjour"}]
    one, two = chat(llm, [HI, french], max_tokens=2)
    assert one.prompt is not None
    assert one.prompt.endswith("<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>assistant\n")
    assert two.prompt == one.prompt.replace("hi<", "bonjour<")
    assert chat(llm, HI, max_tokens=2)[0].outputs[0].token_ids == one.outputs[0].token_ids

    begun = [*HI, {"role": "assistant", "content": "Hello, my"}]
    (continued,) = chat(llm, begun, GOING_ON, max_tokens=2)
    assert (continued.prompt or "").endswith("<|im_start|>assistant\nHello, my")

    template = "{% for tool in tools %}{{ tool.function.name }};{% endfor %}{{ messages[0].content }}"
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {}}}]
    (with_tools,) = chat(llm, HI, {"tools": tools, "chat_template": template}, max_tokens=1)
    assert with_tools.prompt == "clock;Say hi"


def test_prefix_cache_is_used_and_reset(llm: LLM) -> None:
    prompt = list(range(40, 80))
    assert llm.reset_prefix_cache() is True
    num_cached = [generate(llm, [prompt], max_tokens=1)[0].num_cached_tokens for _ in range(2)]
    assert num_cached == [0, 32]  # two full blocks of 16
    assert llm.reset_prefix_cache() is True
    assert generate(llm, [prompt], max_tokens=1)[0].num_cached_tokens == 0
    metrics = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    assert metrics["vllm:prefix_cache_hits"] >= 32
    assert metrics["vllm:num_requests_running"] == 0


def test_an_error_in_the_middle_leaves_nothing_running(llm: LLM) -> None:
    class Bar:
        postfix = ""

        def __init__(self, **_options: Any) -> None: ...

        def update(self, _count: int) -> None:
            raise RuntimeError("no space left on the terminal")

        def refresh(self) -> None: ...

        def close(self) -> None: ...

    with pytest.raises(RuntimeError, match="no space left"):
        llm.generate(["a", "b"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=50)], use_tqdm=Bar)
    assert generate(llm, "Count: 1 2 3 4")[0].outputs[0].text == " 5 6 7"
