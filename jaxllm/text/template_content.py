"""Find out from a chat template's syntax tree whether it reads a message's content as a list of parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from jinja2 import nodes

_PASSES = 8
"""The maximum number of assignments to follow a value through against their order in the template."""


def loops_over_content(template: nodes.Template) -> bool:
    """Return whether a template has a loop over the parts of a message's content.

    Messages are followed through assignments, namespaces, loops and arguments of macros. A loop over a variable named
    "content" counts too, except in a macro, where it is a parameter.
    """
    flow = _Flow(template)
    in_macros = {id(loop) for macro in template.find_all(nodes.Macro) for loop in macro.find_all(nodes.For)}
    return any(
        "content" in flow.kinds_of(loop.iter)
        or (isinstance(loop.iter, nodes.Name) and loop.iter.name == "content" and id(loop) not in in_macros)
        for loop in template.find_all(nodes.For)
    )


class _Flow:
    """The variables of a template, with the kinds that their values may have: "messages", "message" or "content"."""

    def __init__(self, template: nodes.Template) -> None:
        self._kinds: defaultdict[str, set[str]] = defaultdict(set, {"messages": {"messages"}})
        steps = list(_assignments(template))
        for _ in range(_PASSES):
            changes = [self._assign(*step) for step in steps]
            if not any(changes):
                break

    def kinds_of(self, value: nodes.Node | None) -> set[str]:
        """Return the kinds that an expression's value may have."""
        match value:
            case nodes.Name():
                return self._kinds.get(value.name, set())
            case nodes.Filter() | nodes.Getitem(arg=nodes.Slice()):
                return self.kinds_of(value.node)
            case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
                return {"content"} if "message" in self.kinds_of(value.node) else set()
            case nodes.Getattr(node=nodes.Name(name=owner), attr=attribute):
                return self._kinds.get(f"{owner}.{attribute}", set())
            case nodes.CondExpr():
                return self.kinds_of(value.expr1) | self.kinds_of(value.expr2)
            case nodes.Or() | nodes.And():
                return self.kinds_of(value.left) | self.kinds_of(value.right)
        return set()

    def _assign(self, name: str, value: nodes.Node, is_item: bool) -> bool:
        """Add the kinds of a value, or of its items, to a name, and return whether any is new."""
        kinds = self.kinds_of(value)
        if is_item:
            kinds = {"message"} if "messages" in kinds else set()
        if kinds <= self._kinds[name]:
            return False
        self._kinds[name] |= kinds
        return True


def _assignments(template: nodes.Template) -> Iterator[tuple[str, nodes.Node, bool]]:
    """Yield each name with a value that it may have, and whether it takes the value's items in turn."""
    for loop in template.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name):
            yield loop.target.name, loop.iter, True
    for assign in template.find_all(nodes.Assign):
        match assign.target:
            case nodes.NSRef(name=owner, attr=attribute):
                yield f"{owner}.{attribute}", assign.node, False
            case nodes.Name(name=name):
                yield name, assign.node, False
                match assign.node:
                    case nodes.Call(node=nodes.Name(name="namespace"), kwargs=given):
                        yield from ((f"{name}.{each.key}", each.value, False) for each in given)
    macros = {macro.name: [each.name for each in macro.args] for macro in template.find_all(nodes.Macro)}
    for call in template.find_all(nodes.Call):
        parameters = macros.get(call.node.name, []) if isinstance(call.node, nodes.Name) else []
        yield from ((name, value, False) for name, value in zip(parameters, call.args, strict=False))
        yield from ((each.key, each.value, False) for each in call.kwargs if each.key in parameters)
