"""Run LangChain's ChatOpenAI against a server: invoke, stream, batch, structured output.

After the server and its key, `pictures FILE` sends a picture to a model that sees, and nothing else.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from pathlib import Path

from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

CITY = {
    "title": "city",
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}},
    "required": ["name"],
    "additionalProperties": False,
}


def check_picture(url: str, key: str, file: str) -> None:
    chat = ChatOpenAI(base_url=url, api_key=key, model="tiny", temperature=0, max_tokens=8, max_retries=0)
    data = base64.b64encode(Path(file).read_bytes()).decode()
    picture = {"type": "image", "base64": data, "mime_type": "image/png"}
    text = {"type": "text", "text": "What is this?"}
    seen, read = (chat.invoke([HumanMessage(content)]).usage_metadata for content in ([picture, text], [text]))
    assert seen is not None
    assert read is not None
    assert seen["output_tokens"] > 0
    assert seen["input_tokens"] > read["input_tokens"] + 1, "a picture takes several tokens"


def main(url: str, key: str, *pictures: str) -> None:
    if pictures:
        check_picture(url, key, pictures[1])
        return
    chat = ChatOpenAI(base_url=url, api_key=key, model="smollm2", temperature=0, max_tokens=24, max_retries=0)
    answer = chat.invoke([SystemMessage("You answer briefly."), HumanMessage("Name a colour.")])
    assert answer.content
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0
    chunks = list(chat.stream("Name a colour."))
    assert len(chunks) > 2
    assert all(isinstance(each, AIMessageChunk) for each in chunks)
    chain = ChatPromptTemplate.from_messages([("user", "Name {what}.")]) | chat
    answers = chain.batch([{"what": what} for what in ("a river", "a city", "a bird", "a tree")])
    assert all(each.content for each in answers)
    assert asyncio.run(chain.ainvoke({"what": "a river"})).content == answers[0].content
    longer = ChatOpenAI(base_url=url, api_key=key, model="smollm2", temperature=0, max_tokens=60)
    structured = longer.with_structured_output(CITY, method="json_schema")
    assert structured.invoke("Name a city.").keys() == {"name"}
    text = OpenAI(base_url=url, api_key=key, model="smollm2", temperature=0, max_tokens=8)
    assert text.invoke("One, two,")


if __name__ == "__main__":
    main(sys.argv[1] + "/v1", *sys.argv[2:])
