"""Run openai-agents against a server, by Responses and by chat completions: an agent that calls a tool."""

from __future__ import annotations

import asyncio
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from weather import ANSWER, QUESTION, check_called, get_weather


async def check(agent: Agent, mode: str, *, streamed: bool) -> None:
    """Run the agent until it answers."""
    if streamed:
        result = Runner.run_streamed(agent, QUESTION, max_turns=4)
        kinds = [event.type async for event in result.stream_events()]
        assert "raw_response_event" in kinds
    else:
        result = await Runner.run(agent, QUESTION, max_turns=4)
    check_called(mode)
    if mode == "replayed":
        assert result.final_output == ANSWER, result.final_output


async def main() -> None:
    url, key, mode = sys.argv[1:]
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=300)
    settings = ModelSettings(temperature=1.0, max_tokens=200, tool_choice="required", parallel_tool_calls=False)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        for streamed in (False, True):
            agent = Agent(
                name="weather",
                instructions="Use the tool.",
                model=kind(model="model", openai_client=client),
                model_settings=settings,
                tools=[function_tool(get_weather)],
                # After the call the agent lets the model choose, and a small one may then write without end.
                tool_use_behavior="run_llm_again" if mode == "replayed" else "stop_on_first_tool",
            )
            await check(agent, mode, streamed=streamed)


if __name__ == "__main__":
    asyncio.run(main())
