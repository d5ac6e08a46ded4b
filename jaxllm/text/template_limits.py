"""A Jinja sandbox that ends templates which take too much time or memory, from within their thread.

Compiled templates count their work: each block entered, and the size of each value made. The result of a single
operation is estimated first, so that no step between two counts is long.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter
from typing import Any, override

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import TemplateError
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, _PassArg

MAX_SECONDS = 10.0
MAX_TEXT = 2**24
"""The maximum characters of the rendered text and of any value. An item of a list or dict counts as `_ITEM`."""
_MAX_MADE = 2**28
"""The maximum characters of all values that a render makes, kept or not, which bounds its memory."""
MAX_SOURCE = 2**17
"""The maximum characters of a template; models' longest have some ten thousand."""
_MAX_BITS = 2**16
_MAX_COMPARED = 2**31
"""The maximum number of character comparisons of methods with quadratic time."""
_ITEM = 32
_FEW = 2**16
_MAX_INPUT = {"striptags": _FEW, "sum": _FEW, "title": 2**20, "urlize": 2**12, "wordcount": 2**20, "wordwrap": 2**12}
"""The maximum input of filters that take much memory or quadratic time."""
_LISTING = {"batch", "groupby", "join", "list", "map", "max", "min", "slice", "sort", "unique"}
_LISTING |= {"reject", "rejectattr", "select", "selectattr"}
"""Filters that treat a text as a list of characters."""
_COMPARING = {"in", "==", "!=", "<", "<=", ">", ">=", "eq", "ne", "lt", "le", "gt", "ge", "equalto"}
_COMPARING |= {"lessthan", "greaterthan"}
_SEARCHES = {"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim"}
_REFUSED = {"encode", "expandtabs", "format_map", "maketrans", "striptags", "to_bytes", "translate", "unescape"}
"""Methods that are refused: no template needs them, and their results can have any size."""
_DICT_NAMES = frozenset(dir(dict))
_TEXT_NAMES = frozenset(name for name in dir(str) if not name.startswith("_")) - _REFUSED - {"format"}
_LOOP_NAMES = frozenset(name for name in dir(LoopContext) if not name.startswith("_"))
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS = (dict, list, tuple, set, frozenset, *_VIEWS)
_NUMBERS = re.compile(r"\d{1,9}")


class TemplateLimitError(TemplateError):
    """A template takes too much time or memory."""


def check_size(size: int) -> None:
    """Raise TemplateLimitError for a value of too many characters."""
    if size > MAX_TEXT:
        raise TemplateLimitError(f"it makes more than {MAX_TEXT} characters of text")


def value_size(value: Any, per_level: int = 0) -> int:
    """Return the approximate number of characters of a value written out, with `per_level` before each item.

    Raises TemplateLimitError if there are too many, as in lists that hold the same list several times.
    """
    size, depth, level = 0, 1, [value]
    while level:
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, _CONTAINERS):
                size += len(item) * (_ITEM + depth * per_level)
                check_size(size)
                below.extend(item)
                if isinstance(item, dict):
                    below.extend(item.values())
            elif isinstance(item, int):
                size += _ITEM
                if item.bit_length() > _MAX_BITS:
                    raise TemplateLimitError(f"it makes a number of more than {_MAX_BITS} bits")
            elif isinstance(item, Namespace) and depth > 1:
                raise TemplateLimitError("it puts a namespace into another value")
        check_size(size)
        level, depth = below, depth + 1
    return size


class _Meter:
    """Counts the work of a render, and ends it when it is too much."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._end = seconds, perf_counter() + seconds
        self._left = _MAX_MADE

    def tick(self, size: int = 0) -> None:
        """Count `size` characters. Raises TemplateLimitError when the time is over, or the characters are too many."""
        self._left -= size
        if self._left < 0:
            raise TemplateLimitError(f"it makes more than {_MAX_MADE} characters of text on its way")
        if perf_counter() > self._end:
            raise TemplateLimitError(f"it takes longer than {self._seconds:g} s")

    def made(self, value: Any) -> Any:
        """Count a value that the template has made, and return it."""
        kind = type(value)
        if kind is str:
            size = len(value)
            if size > MAX_TEXT:
                check_size(size)
        elif kind is bool or value is None or (kind is int and -_FEW < value < _FEW):
            size = 0
        else:
            size = value_size(value)
        self.tick(size)
        return value

    def cut(self, value: Any) -> Any:
        """Count a slice of a value, and return it."""
        self.tick(len(value) if isinstance(value, str) else _ITEM * len(value))
        return value


class _LimitedContext(Context):
    """The variables of a template, and the meter of this render."""

    def __init__(self, environment: LimitedEnvironment, *args: Any, **kwargs: Any) -> None:
        super().__init__(environment, *args, **kwargs)
        self.meter = _Meter(environment.seconds)

    def derived(self, locals: dict[str, Any] | None = None) -> _LimitedContext:  # noqa: A002 (jinja2's name)
        """Return a context for a block with its own variables and the same meter."""
        context = super().derived(locals)
        assert isinstance(context, _LimitedContext)
        context.meter = self.meter
        return context


class _LimitedCodeGenerator(CodeGenerator):
    """Compiles templates to code that counts its work."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        """Write a block of statements, such as the body of a loop, condition or macro."""
        statements = list(nodes)
        self.writeline(f"context.meter.tick({_fix_outputs(statements)})")
        super().blockvisit(statements, frame)

    @override
    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._write_made(node, frame, super().visit_List, is_fixed=_are_fixed(node.items))

    @override
    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        self._write_made(node, frame, super().visit_Tuple, is_fixed=node.ctx != "load" or _are_fixed(node.items))

    @override
    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._write_made(node, frame, super().visit_Dict, is_fixed=_are_fixed([pair.value for pair in node.items]))

    @override
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self._write_made(node, frame, super().visit_Concat)

    @override
    def visit_Add(self, node: nodes.Add, frame: Frame) -> None:
        self._write_made(node, frame, self._write_sum)

    def _write_sum(self, node: nodes.Add, frame: Frame) -> None:
        """Write a sum. Parts with a literal are counted with the whole."""
        self.write("(")
        for side, sign in ((node.left, " + "), (node.right, ")")):
            if isinstance(side, nodes.Add) and nodes.Const in (type(side.left), type(side.right)):
                self._write_sum(side, frame)
            else:
                self.visit(side, frame)
            self.write(sign)

    @override
    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        is_fixed = all(operand.op not in ("in", "notin") and _are_fixed([operand.expr]) for operand in node.ops)
        self._write_made(node, frame, super().visit_Compare, is_fixed=is_fixed)

    @override
    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        is_fixed = not isinstance(node.arg, nodes.Slice)
        self._write_made(node, frame, super().visit_Getitem, is_fixed=is_fixed, count="cut")

    def _write_made(
        self, node: Any, frame: Frame, write: Callable[[Any, Frame], None], is_fixed: bool = False, count: str = "made"
    ) -> None:
        self.write("(" if is_fixed else f"context.meter.{count}(")
        write(node, frame)
        self.write(")")


def _are_fixed(items: Iterable[nodes.Node]) -> bool:
    return all(isinstance(item, nodes.Const) for item in items)


def _fix_outputs(statements: Iterable[nodes.Node]) -> int:
    """Convert literal outputs to template text, and return the number of characters of text."""
    size = 0
    for statement in statements:
        if isinstance(statement, nodes.Output):
            statement.nodes = [
                nodes.TemplateData(child.value)
                if isinstance(child, nodes.Const) and type(child.value) is str
                else child
                for child in statement.nodes
            ]
            size += sum(len(child.data) for child in statement.nodes if isinstance(child, nodes.TemplateData))
    return size


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with templates that count their work."""

    code_generator_class = _LimitedCodeGenerator
    context_class = _LimitedContext
    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, seconds: float, **options: Any) -> None:
        """Limit each render to `seconds`; the options are jinja2's."""
        # Do not compute constants when compiling, where nothing is counted.
        super().__init__(optimized=False, finalize=_finalize, **options)
        self.seconds = seconds
        self.filters = {name: limited(name, function) for name, function in self.filters.items()}
        self.tests |= {name: limited(name, function) for name, function in self.tests.items() if name in _COMPARING}
        del self.globals["lipsum"]

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute or an item, like the sandbox, but faster for types known to be safe."""
        kind = type(obj)
        if kind is dict and attribute in obj and attribute not in _DICT_NAMES:
            return obj[attribute]
        if (kind is str and attribute in _TEXT_NAMES) or (kind is LoopContext and attribute in _LOOP_NAMES):
            return getattr(obj, attribute)
        if (
            issubclass(kind, Namespace)
            and not attribute.startswith("_")
            and (value := getattr(obj, attribute, None)) is not None
        ):
            return value
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may read an attribute."""
        return super().is_safe_attribute(obj, attr, value) and not (isinstance(obj, (str, int)) and attr in _REFUSED)

    def call(self, context: _LimitedContext, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, method or macro."""
        method = getattr(obj, "__wrapped__", obj)  # str.format is wrapped by the sandbox
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            args = _check_call(method.__name__, text, args, kwargs)
        context.meter.tick()
        return context.meter.made(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: _LimitedContext, operator: str, left: Any, right: Any) -> Any:  # type: ignore[override]
        """Compute `left operator right`."""
        if operator == "*":
            _check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if right > 0 and left.bit_length() * right > _MAX_BITS:
                raise TemplateLimitError(f"it makes a number of more than {_MAX_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            check_size(_formatted_size(left, right))
        return context.meter.made(super().call_binop(context, operator, left, right))


@pass_context
def _finalize(context: _LimitedContext, value: Any) -> Any:
    return context.meter.made(value)


def limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter or test that checks its input and counts its output."""
    passed = _PassArg.from_obj(function)

    @pass_context
    def checked(context: _LimitedContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "join" and not isinstance(value, str):
            value = list(value)
        _check_filter(name, value, args, kwargs)
        context.meter.tick()
        first: dict[Any, tuple[Any, ...]] = {
            _PassArg.context: (context,),
            _PassArg.eval_context: (context.eval_ctx,),
            _PassArg.environment: (context.environment,),
        }
        return context.meter.made(function(*first.get(passed, ()), value, *args, **kwargs))

    return checked


def _check_call(name: str, text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Refuse a method call of `text` with too large a result, and return the arguments to call it with."""
    if name == "join" and args:
        args = (list(args[0]), *args[1:])
        _check_join(args[0], text)
    elif name in ("format", "format_map"):
        check_size(_formatted_size(text, (args, kwargs), "{"))
    elif name == "replace":
        _check_replace(text, args)
    elif name in _SEARCHES:
        _check_search(text, args)
    elif name in ("center", "ljust", "rjust", "zfill"):
        _check_numbers(name, args)
    return args


def _check_filter(name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse a filter that would make too large a result from `value`."""
    values = (*args, *kwargs.values())
    if name in _MAX_INPUT and value_size((value, values)) > _MAX_INPUT[name]:
        raise TemplateLimitError(f"it gives more than {_MAX_INPUT[name]} characters to the filter {name!r}")
    if name in _LISTING and isinstance(value, str):
        check_size(_ITEM * len(value))
    if name == "join":
        _check_join(value, *values[:1])
    elif name == "format" and isinstance(value, str):
        check_size(_formatted_size(value, values))
    elif name == "replace" and isinstance(value, str):
        _check_replace(value, values)
    elif name == "trim" and isinstance(value, str):
        _check_search(value, values)
    elif name in ("batch", "center", "indent", "round", "slice"):
        _check_numbers(name, values)
        if name == "indent" and isinstance(value, str):
            widths = [
                len(width) if isinstance(width, str) else width for width in values if isinstance(width, (str, int))
            ]
            check_size(len(value) + max(widths, default=4) * (1 + len(value.splitlines())))


def _check_numbers(name: str, values: Iterable[Any]) -> None:
    """Refuse excessive widths and counts."""
    if any(isinstance(each, int) and each > _FEW for each in values):
        raise TemplateLimitError(f"it gives {name!r} a number above {_FEW}")


def _check_product(left: Any, right: Any) -> None:
    """Refuse to repeat a sequence too often."""
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
            check_size(value_size(sequence) * count)


def _check_join(items: list[Any] | str, separator: Any = "", *_: Any) -> None:
    check_size(value_size(items) + len(items) * value_size(separator))


def _check_replace(text: str, values: tuple[Any, ...]) -> None:
    if len(values) > 1 and isinstance(values[0], str) and isinstance(values[1], str):
        check_size(len(text) + text.count(values[0]) * len(values[1]))


def _check_search(text: str, values: Iterable[Any]) -> None:
    if any(isinstance(each, str) and len(text) * len(each) > _MAX_COMPARED for each in values):
        raise TemplateLimitError("it searches for a long text in a long text")


def _formatted_size(text: str, values: Any, field: str = "%") -> int:
    """Return an upper bound of a formatted text's length. Raises for widths that are arguments themselves."""
    bare = text.replace(field * 2, "")
    if re.search(r"%[^a-zA-Z%]*\*" if field == "%" else r"\{[^{}]*\{", bare):
        raise TemplateLimitError("it formats to a width that is not written in the format")
    widths = sum(int(number) for number in _NUMBERS.findall(text))
    return len(text) + widths + text.count(field) * value_size((values,))
