"""Run llama-index against a server: a chat, and an agent that calls a tool."""

from __future__ import annotations

import asyncio
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from weather import ANSWER, QUESTION, check_called, get_weather


async def main() -> None:
    url, key, mode = sys.argv[1:]
    llm = OpenAILike(
        model="model",
        api_base=f"{url}/v1",
        api_key=key,
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=200,
        temperature=1.0,
        max_retries=0,
    )
    assert llm.chat([ChatMessage(role="user", content="Hello.")]).message.content
    tool = FunctionTool.from_defaults(get_weather)
    if mode == "replayed":
        agent = FunctionAgent(tools=[tool], llm=llm, streaming=False)
        answer = await agent.run(QUESTION)
        assert str(answer) == ANSWER, answer
        check_called(mode)
    answer = llm.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    for call in llm.get_tool_calls_from_response(answer):
        tool(**call.tool_kwargs)
    check_called(mode)


if __name__ == "__main__":
    asyncio.run(main())
