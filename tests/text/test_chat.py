"""Conversations become prompts as the chat template says, or are refused with the message's index."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.llm import LLM
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.tokenizer import Tokenizer
from tests.engine.fake_core import FakeCore, hashed_tokens
from tests.engine.support import byte_level, make_llm

HELLO = [{"role": "user", "content": "hello"}]
PARTS_TEMPLATE = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'text' %}[{{ part.text }}]{% endif %}"
    "{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level(bos=True)


@pytest.fixture
def core() -> FakeCore:
    return FakeCore(hashed_tokens, max_model_len=500)


@pytest.fixture
def llm(core: FakeCore, tokenizer: Tokenizer) -> LLM:
    return make_llm(core, tokenizer)


def replace_template(tokenizer: Tokenizer, template: str | dict[str, str] | None) -> Tokenizer:
    parts = msgspec.structs.replace(tokenizer.parts, chat_template=template)
    return Tokenizer(parts, lambda: tokenizer.hf)


def chat(llm: LLM, messages: Any, **options: Any) -> RequestOutput:
    (output,) = llm.chat(messages, SamplingParams(max_tokens=2), use_tqdm=False, **options)
    return output


def test_a_conversation(llm: LLM, tokenizer: Tokenizer) -> None:
    output = chat(llm, HELLO)
    assert output.prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    expected = tokenizer.hf.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)
    assert output.prompt_token_ids == expected  # special tokens once, none added in front
    assert 3 not in (output.prompt_token_ids or [])


def test_a_batch_of_conversations(llm: LLM) -> None:
    outputs = llm.chat([HELLO, [{"role": "system", "content": "be"}, *HELLO]], use_tqdm=False)
    assert [output.request_id for output in outputs] == ["0", "1"]
    assert outputs[1].prompt == "<|im_start|>system\nbe<|im_end|>\n" + (outputs[0].prompt or "")
    assert llm.chat([], use_tqdm=False) == []
    assert llm.enqueue_chat([HELLO, HELLO]) == ["2", "3"]
    assert [output.prompt for output in llm.wait_for_completion(use_tqdm=False)] == [outputs[0].prompt] * 2


def test_continue_final_message(llm: LLM) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "I think"}]
    output = chat(llm, messages, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nI think"
    with pytest.raises(VLLMValidationError, match="add_generation_prompt=False"):
        chat(llm, messages, continue_final_message=True)
    output = chat(llm, HELLO, add_generation_prompt=False)
    assert output.prompt == "<|im_start|>user\nhello<|im_end|>\n"


def test_tools_and_template_kwargs(llm: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    call = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    prompt = chat(llm, messages, tools=tools, chat_template_kwargs={"prefix": "So"}).prompt or ""
    assert prompt.startswith("<|tool|>weather\n<|im_start|>user")
    assert "<|im_start|>assistant\n[weather Rome]<|im_end|>" in prompt
    assert prompt.endswith("<|im_start|>assistant\nSo")
    assert call["function"]["arguments"] == '{"city": "Rome"}'  # the user's own dict stays as it was


def test_templates(core: FakeCore, tokenizer: Tokenizer, llm: LLM) -> None:
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    assert chat(llm, HELLO, chat_template=template).prompt == "<hello>"
    assert chat(make_llm(core, tokenizer, chat_template=template), HELLO).prompt == "<hello>"
    bare = replace_template(tokenizer, None)
    with pytest.raises(VLLMValidationError, match="no chat template: pass chat_template"):
        chat(make_llm(core, bare), HELLO)
    with pytest.raises(VLLMValidationError, match="neither a Jinja template nor the name"):
        chat(llm, HELLO, chat_template="unknown")
    with pytest.raises(VLLMValidationError, match="no tokenizer"):
        chat(make_llm(core, None), HELLO)


def test_templates_by_name(core: FakeCore, tokenizer: Tokenizer) -> None:
    both = replace_template(tokenizer, {"default": "{{ 'plain' }}", "tool_use": "{{ 'tools' }}", "rag": "{{ 'rag' }}"})
    llm = make_llm(core, both)
    assert chat(llm, HELLO).prompt == "plain"
    assert chat(llm, HELLO, tools=[]).prompt == "tools"
    assert chat(llm, HELLO, chat_template="rag", tools=[]).prompt == "rag"
    assert chat(make_llm(core, both, chat_template="rag"), HELLO).prompt == "rag"
    with pytest.raises(VLLMValidationError, match="neither a Jinja template nor the name"):
        chat(llm, HELLO, chat_template="unknown")
    with pytest.raises(VLLMValidationError, match="no chat template but those named 'rag': pass chat_template"):
        chat(make_llm(core, replace_template(tokenizer, {"rag": "{{ 'rag' }}"})), HELLO)


def test_a_template_that_does_not_end_is_the_callers_error(core: FakeCore, tokenizer: Tokenizer) -> None:
    llm = make_llm(core, tokenizer)
    with pytest.raises(
        VLLMValidationError, match=r"messages: rendering the chat template was stopped: it makes more"
    ) as error:
        chat(llm, HELLO, chat_template="{{ 'a' * 10**9 }}")
    assert error.value.parameter == "chat_template"
    with pytest.raises(VLLMValidationError, match=r"refused the conversation \(a{1000}\)"):
        chat(llm, HELLO, chat_template="{{ raise_exception('a' * 5000) }}")
    assert chat(llm, HELLO).prompt


def test_content_parts(llm: LLM) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, "b", {"text": "c"}]}]
    assert "user\na\nb\nc<" in (chat(llm, messages).prompt or "")
    assert chat(llm, messages, chat_template=PARTS_TEMPLATE).prompt == "[a][b][c]"
    assert chat(llm, HELLO, chat_template=PARTS_TEMPLATE).prompt == "[hello]"
    with pytest.raises(VLLMValidationError, match="The decoder prompt cannot be empty"):
        chat(llm, HELLO, chat_template=PARTS_TEMPLATE, chat_template_content_format="string")


BOTH_TEMPLATE = (
    "{# tools #}{% for m in messages %}{% if m.content is string %}{{ m.role }}={{ m.content }};"
    "{% else %}{{ m.role }}=[{% for part in m.content %}{{ part.text }}{% endfor %}];{% endif %}{% endfor %}"
)


def test_content_keeps_its_form_where_the_template_reads_both(llm: LLM) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [*HELLO, {"role": "user", "content": parts}, {"role": "tool", "content": parts}]
    assert chat(llm, messages, chat_template=BOTH_TEMPLATE).prompt == "user=hello;user=[ab];tool=a\nb;"
    forms = {"string": "user=hello;user=a\nb;tool=a\nb;", "openai": "user=[hello];user=[ab];tool=[ab];"}
    for form, text in forms.items():
        assert chat(llm, messages, chat_template=BOTH_TEMPLATE, chat_template_content_format=form).prompt == text


def test_content_keeps_its_form_beside_tools_that_the_template_does_not_know(llm: LLM) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    tools = [{"type": "function", "function": {"name": "w"}}]
    call = {"type": "function", "id": "1", "function": {"name": "w", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": parts},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": parts, "tool_calls": [call]},
        {"role": "tool", "content": parts},
    ]
    prompt = chat(llm, messages, tools=tools, chat_template=BOTH_TEMPLATE.replace("{# tools #}", "")).prompt or ""
    assert prompt.startswith("system=a\nb\n\nYou can call functions.")
    assert ";user=[ab];assistant=a\nb\n<tool_call>\n" in prompt
    assert prompt.endswith(";user=<tool_response>\na\nb\n</tool_response>;")


ROLES_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}<{{ m.content }}>"
    "{% elif m.role in ('user', 'assistant') %}{{ m.content }};{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("roles", "text"),
    [
        (["developer", "user"], "<0>1;"),
        (["system", "developer", "user"], "<0\n\n1>2;"),
        (["user", "assistant", "developer"], "<2>0;1;"),
        (["developer", "user", "system", "developer"], "<0\n\n2\n\n3>1;"),
        (["user", "system", "user"], "0;<1>2;"),  # nothing has to move
    ],
)
def test_a_developer_is_the_system_where_the_template_does_not_name_it(llm: LLM, roles: list[str], text: str) -> None:
    messages = [{"role": role, "content": str(i)} for i, role in enumerate(roles)]
    assert chat(llm, messages, chat_template=ROLES_TEMPLATE).prompt == text
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    assert chat(llm, parts, chat_template=ROLES_TEMPLATE).prompt == text
    named = "{% for m in messages %}{% if m.role == 'developer' %}d{% endif %}{{ m.content }};{% endfor %}"
    expected = "".join(f"{'d' if role == 'developer' else ''}{i};" for i, role in enumerate(roles))
    assert chat(llm, messages, chat_template=named).prompt == expected


def test_a_developer_is_told_of_tools_that_the_template_does_not_know(llm: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    messages = [{"role": "developer", "content": "be"}, *HELLO]
    prompt = chat(llm, messages, tools=tools, chat_template=ROLES_TEMPLATE).prompt or ""
    assert prompt.startswith("<be\n\nYou can call functions.")
    assert prompt.endswith(">hello;")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_reaches_the_template_by_each_of_its_names(llm: LLM, name: str) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "a", name: "hm"}]
    for read in ("reasoning", "reasoning_content", "thinking"):
        template = f"{{% for m in messages %}}{{{{ m.{read} }}}},{{% endfor %}}"
        assert chat(llm, messages, chat_template=template).prompt == ",hm,"


@pytest.mark.parametrize("arguments", ['{"x', "[" * 5000, "[1]", "7", [1], 7])
def test_arguments_that_are_no_json_object_do_not_end_the_conversation(
    llm: LLM, arguments: Any, caplog: pytest.LogCaptureFixture
) -> None:
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": arguments}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    template = "{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    expected = '[{"type": "function", "id": "1", "function": {"name": "f", "arguments": {}}}]'
    assert chat(llm, messages, tools=[], chat_template=template + "{# tools #}").prompt == expected
    assert "messages[1]['tool_calls'][0]: 'arguments' is not a JSON object, as in 1 calls in all" in caplog.text
    many = [*HELLO, {"role": "assistant", "tool_calls": [call] * 50}]
    caplog.clear()
    chat(llm, many, tools=[], chat_template="{{ messages[0].content }}{# tools #}")
    assert len(caplog.records) == 1


def test_no_calls_are_no_list_of_calls(llm: LLM) -> None:
    template = (
        "{% for m in messages %}{% if m.tool_calls is defined and m.tool_calls is not none %}calls"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    messages = [*HELLO, {"role": "assistant", "content": "hi", "tool_calls": [], "function_call": None}]
    assert chat(llm, messages, chat_template=template).prompt == "hellohi"


HEADER = "x-anthropic-billing-header: cc_version=2.1.63.a43; cc_entrypoint=cli; cch=00000;"


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([HEADER, "be"], "<be>hello;"),
        (f"{HEADER}\nbe", "<be>hello;"),
        (f"{HEADER}\n\nbe\nkind", "<be\nkind>hello;"),
        ([{"type": "text", "text": "be"}, {"type": "text", "text": HEADER}], "<be>hello;"),
        (HEADER, "hello;"),
        (["be", "", "kind"], "<be\n\nkind>hello;"),
        (f"say {HEADER}", f"<say {HEADER}>hello;"),
    ],
)
def test_the_systems_text_has_no_billing_header(llm: LLM, role: str, content: Any, text: str) -> None:
    messages = [{"role": role, "content": content}, *HELLO]
    assert chat(llm, messages, chat_template=ROLES_TEMPLATE).prompt == text
    said = [{"role": "user", "content": HEADER}]
    assert chat(llm, said, chat_template=ROLES_TEMPLATE).prompt == f"{HEADER};"


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ("hello", "messages must be a list"),
        ([HELLO, "hello"], r"messages\[1\]: a conversation is a list"),
        ([[]], r"messages\[0\]: a conversation is a list of at least one"),
        ([HELLO, [{"content": "x"}]], r"messages\[1\]\[0\]: needs a 'role'"),
        ([*HELLO, {"role": "user", "content": 3}], r"messages\[1\]\['content'\]: must be a str"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], r"\[0\]: parts of type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"\['content'\]\[0\]: needs 'text'"),
        ([{"role": "user", "content": [3]}], "a part is a dict"),
        ([{"role": "a", "tool_calls": 3}], r"\['tool_calls'\]: must be a list"),
        ([{"role": "a", "tool_calls": [3]}], "a tool call is a dict"),
    ],
)
def test_refused_messages(llm: LLM, core: FakeCore, messages: Any, match: str) -> None:
    with pytest.raises(VLLMValidationError, match=match) as error:
        llm.chat(messages)
    assert error.value.parameter == "messages"
    assert core.seen == []


def test_refused_options(llm: LLM) -> None:
    with pytest.raises(VLLMValidationError, match="must not contain 'chat_template'"):
        chat(llm, HELLO, chat_template_kwargs={"chat_template": "{{ 1 }}"})
    for bad in (3, ["a"], {1: 2}, "prefix"):
        with pytest.raises(VLLMValidationError, match="chat_template_kwargs must be a dict with strings as keys"):
            chat(llm, HELLO, chat_template_kwargs=bad)
    for bad in (3, b"{{ 1 }}", ["{{ 1 }}"]):
        with pytest.raises(VLLMValidationError, match="chat_template must be a str"):
            chat(llm, HELLO, chat_template=bad)
    for bad in (3, {"type": "function"}, ["weather"]):
        with pytest.raises(VLLMValidationError, match="tools must be a list of dicts"):
            chat(llm, HELLO, tools=bad)
    with pytest.raises(VLLMValidationError, match="add_generation_prompt must be True or False"):
        chat(llm, HELLO, add_generation_prompt="yes")
    with pytest.raises(VLLMValidationError, match="chat_template_content_format must be one of"):
        chat(llm, HELLO, chat_template_content_format="html")
    with pytest.raises(VLLMValidationError, match=r"messages: the chat template refused .*no tools here"):
        chat(llm, HELLO, chat_template="{{ raise_exception('no tools here') }}")
    with pytest.raises(VLLMValidationError, match=r"messages\[1\]: This model's maximum context length is 500 tokens"):
        llm.chat([HELLO, [{"role": "user", "content": "x" * 600}]])
