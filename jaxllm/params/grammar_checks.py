"""Bounds that keep a grammar from exhausting the stack or compiling for minutes. Every error names the bound."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.limits import MAX_DEPTH, MAX_PARENTHESES


def refuse(parameter: str, message: str) -> VLLMValidationError:
    """Return the error for an unusable constraint; `parameter` is a field of StructuredOutputsParams."""
    words = "Invalid grammar specification: " if parameter == "grammar" else ""  # vLLM's; user code matches it
    return VLLMValidationError(f"structured_outputs.{parameter}: {words}{message}", parameter=parameter)


def check_parentheses(parameter: str, text: str) -> None:
    """Raise an error for more than MAX_PARENTHESES open parentheses; escapes and character classes do not count."""
    depth = 0
    escaped = in_class = False
    for character in text:
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character == "(":
            depth += 1
            if depth > MAX_PARENTHESES:
                raise refuse(parameter, f"more than {MAX_PARENTHESES} parentheses inside each other.")
        elif character == ")":
            depth -= 1


def check_depth[Node: Hashable](parameter: str, what: str, graph: Mapping[Node, Sequence[Node]]) -> None:
    """Raise an error for a graph in which more than MAX_DEPTH nodes may lie on one path.

    A cycle counts with all its nodes, so the bound holds in whatever order a recursive compiler walks the graph.
    """
    depth: dict[int, int] = {}
    component_of, components = _components(graph)
    for index, component in enumerate(components):  # a component comes after all those it leads to
        below = [depth[component_of[end]] for node in component for end in graph[node] if component_of[end] != index]
        depth[index] = len(component) + max(below, default=0)
        if depth[index] > MAX_DEPTH:
            raise refuse(parameter, f"{what} lead more than {MAX_DEPTH} levels deep, references followed.")


def _components[Node: Hashable](graph: Mapping[Node, Sequence[Node]]) -> tuple[dict[Node, int], list[list[Node]]]:
    """Split a graph into strongly connected components (Tarjan's algorithm, without recursion)."""
    number: dict[Node, int] = {}
    low: dict[Node, int] = {}
    stack: list[Node] = []
    component_of: dict[Node, int] = {}
    components: list[list[Node]] = []
    for root in graph:
        if root in number:
            continue
        number[root] = low[root] = len(number)
        stack.append(root)
        path = [(root, iter(graph[root]))]
        while path:
            node, ends = path[-1]
            for end in ends:
                if end not in number:
                    number[end] = low[end] = len(number)
                    stack.append(end)
                    path.append((end, iter(graph[end])))
                    break
                if end not in component_of:
                    low[node] = min(low[node], number[end])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == number[node]:
                    component = [stack.pop()]
                    while component[-1] != node:
                        component.append(stack.pop())
                    component_of.update((member, len(components)) for member in component)
                    components.append(component)
    return component_of, components
