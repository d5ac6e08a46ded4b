"""Run LangGraph against a server: a graph, a prebuilt agent with a tool, streams, memory, typed answers and errors."""

from __future__ import annotations

import sys
from typing import Any

import openai
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from weather import ANSWER, QUESTION, RESULT, check_called, get_weather

PLACE = {
    "title": "Place",
    "description": "A place on the map.",
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "inhabitants": {"type": "integer"}},
    "required": ["name", "inhabitants"],
    "additionalProperties": False,
}
ASKED: Any = {"messages": [("user", QUESTION)]}


def chat(url: str, key: str, **settings: Any) -> ChatOpenAI:
    """Return the client of a server."""
    return ChatOpenAI(
        base_url=f"{url}/v1", api_key=key, model="model", max_tokens=200, max_retries=0, timeout=300, **settings
    )


def check_graph(llm: ChatOpenAI, mode: str) -> None:
    """Run a graph of a model and its tools: until the model answers, or, with a real one, until the tool has run."""
    weather = tool(get_weather)
    choice: dict[str, Any] = {"parallel_tool_calls": False}
    bound = llm.bind_tools([weather], **(choice if mode == "replayed" else choice | {"tool_choice": "required"}))
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [bound.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([weather]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model" if mode == "replayed" else END)
    messages = graph.compile().invoke(ASKED, {"recursion_limit": 6})["messages"]
    check_called(mode)
    assert [each.content for each in messages if isinstance(each, ToolMessage)] == [RESULT], messages
    if mode == "replayed":
        assert [type(each) for each in messages][-1] is AIMessage
        assert messages[-1].content == ANSWER, messages
        assert not messages[-1].tool_calls


def check_agent(llm: ChatOpenAI) -> None:
    """Run the ready-made agent: whole, streamed by tokens, and continued from its memory."""
    agent = create_agent(llm, tools=[tool(get_weather)], checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "one"}}
    assert agent.invoke(ASKED, thread)["messages"][-1].content == ANSWER
    check_called("replayed")
    again = agent.invoke({"messages": [("user", "And again?")]}, thread)["messages"]
    assert len(again) == 6, again
    other: Any = {"configurable": {"thread_id": "two"}}
    pieces = [
        piece.content
        for piece, where in agent.stream(ASKED, other, stream_mode="messages")
        if where["langgraph_node"] == "model"
    ]
    assert "".join(pieces) == ANSWER, pieces
    assert len(pieces) > 3, pieces
    check_called("replayed")


def check_errors(url: str, key: str) -> None:
    """Check that refusals raise openai's errors."""
    for settings, secret, kind in (
        ({"temperature": -1}, key, openai.BadRequestError),
        ({}, "wrong", openai.AuthenticationError),
    ):
        agent = create_agent(chat(url, secret, **settings), tools=[tool(get_weather)])
        try:
            agent.invoke(ASKED)
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")


def main() -> None:
    url, key, mode = sys.argv[1:]
    llm = chat(url, key)
    check_graph(llm, mode)
    if mode == "replayed":
        check_agent(llm)
    typed = llm.with_structured_output(PLACE, method="json_schema")
    town = typed.invoke("Describe a town as JSON.")
    assert town.keys() == {"name", "inhabitants"}, town
    assert mode != "replayed" or town == {"name": "Ulm", "inhabitants": 126000}, town
    check_errors(url, key)


if __name__ == "__main__":
    main()
