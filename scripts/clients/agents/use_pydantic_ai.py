"""Run pydantic-ai against a server by chat completions, Responses and Anthropic's Messages: tools and typed answers."""

from __future__ import annotations

import sys

from anthropic import AsyncAnthropic
from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from weather import ANSWER, QUESTION, check_called, get_weather


class Place(BaseModel):
    """A town."""

    name: str = Field(max_length=30)
    inhabitants: int = Field(ge=0, le=10**8)


def main() -> None:
    url, key, mode = sys.argv[1:]
    openai = OpenAIProvider(base_url=f"{url}/v1", api_key=key)
    anthropic = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=url, api_key=key, max_retries=0))
    models = [
        OpenAIChatModel("model", provider=openai),
        OpenAIResponsesModel("model", provider=openai),
        AnthropicModel("model", provider=anthropic),
    ]
    for model in models:
        if mode == "replayed":
            agent = Agent(model, tools=[get_weather])
            assert agent.run_sync(QUESTION).output == ANSWER
            check_called(mode)
        # A typed answer is a required call of a tool that returns it.
        agent = Agent(model, output_type=Place, model_settings={"max_tokens": 400, "temperature": 1.0})
        town = agent.run_sync("Name a town.").output
        assert isinstance(town, Place), town
        if mode == "replayed":
            assert town == Place(name="Ulm", inhabitants=126000)


if __name__ == "__main__":
    main()
