"""A server with a model that calls tools and reasons: its core answers each prompt with a prepared text."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.async_engine.support import mock_llm, tiny_args
from tests.server.support import Served, served

TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }};{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A chat template that implies the parser hermes and no reasoning."""
THINKING_TEMPLATE = TEMPLATE.replace("<assistant>{% endif %}", "<assistant>{{ '<think>' if thinks }}{% endif %}")
"""A chat template that also implies <think>."""
WEATHER: Mapping[str, Any] = {
    "name": "get_weather",
    "description": "Say how the weather is.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
TOOL = {"type": "function", "function": WEATHER}
ARGUMENTS = '{"city": "Ulm", "days": 2}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
REPLIES = {
    "weather?": CALL,
    "both?": f"I look.\n{CALL}\n{CALL.replace('Ulm', 'Bonn')}",
    "think?": "<think>\nHm, two.\n</think>\n\nIt is 4.",
    "think and call?": f"<think>\nI ask.\n</think>\n\n{CALL}",
    "broken?": '<tool_call>\n{"name": get_weather}</tool_call>',
    "malformed?": CALL.replace("2}", "2,}"),
    "21 degrees": "It is warm.",
}
"""The model's answers by text in the prompt; the last text that a prompt contains counts."""


@contextlib.contextmanager
def tool_served(tokenizer: str, folder: Path, *words: str, template: str = THINKING_TEMPLATE) -> Iterator[Served]:
    """Serve an engine of its own, with the flags `words`; what it needs is written into the folder."""
    path = folder / "replies.json"
    replies = [{"prompt": part, "reply": reply} for part, reply in reversed(REPLIES.items())]
    path.write_text(json.dumps(replies), encoding="utf-8")
    args = tiny_args(tokenizer, chat_template=template, hf_overrides={"max_position_embeddings": 4096})
    with mock_llm(args, tokens_per_second=5000, replies=str(path)) as llm, served(llm, *words) as server:
        yield server
