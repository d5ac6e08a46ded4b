"""vLLM's `StructuredOutputsParams`: the constraint that an output must match."""

from __future__ import annotations

import json as json_text
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import check_bool, check_str, check_strings, shown
from jaxllm.params.limits import MAX_GRAMMAR_LENGTH, MAX_JSON_NESTING

logger = logging.getLogger(__name__)

_MAX_CHOICES = 2**16
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_JSON_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
_TAKES_JSON_OPTIONS = ("json", "json_object", "structural_tag")


class _DropsBackend(msgspec.StructMeta):
    """Warn about the argument `backend`, which vLLM ignores too: the only backend is llguidance."""

    if not TYPE_CHECKING:  # a __call__ seen by type checkers would hide the fields from them

        def __call__(cls, *args, **fields):  # noqa: N805
            if "backend" in fields:
                backend = fields.pop("backend")
                logger.warning("%s(backend=%s) is ignored: llguidance does the work.", cls.__name__, shown(backend))
            return super().__call__(*args, **fields)


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True, metaclass=_DropsBackend):
    """The output must match exactly one of json, regex, choice, grammar, json_object, structural_tag."""

    json: Any = None
    """A JSON Schema: a dict, JSON text, or a Pydantic model class (a dict once made)."""
    regex: str | None = None
    """A regular expression for the whole output, in the syntax of Rust's regex crate: no look-around, no \\1."""
    choice: list[str] | None = None
    """The output is one of these strings."""
    grammar: str | None = None
    """A grammar in llguidance's Lark syntax (`start: ...`) or in GBNF (`root ::= ...`)."""
    json_object: bool | None = None
    """True: any JSON object."""
    disable_any_whitespace: bool = False
    """Allow compact JSON only. Applies to json, json_object and the schemas of structural_tag, as do the next two."""
    disable_additional_properties: bool = False
    """Objects with a list of properties and no rule for others have no others. An engine sets this for all requests
    unless its structured_outputs_config is {"backend": "guidance"}.
    """
    whitespace_pattern: str | None = None
    """A regular expression for the whitespace between JSON tokens, matched at most once between two tokens."""
    structural_tag: str | None = None
    """JSON text that describes tags in free text and the constraints of their contents."""

    def __post_init__(self) -> None:
        """Normalise and check; also runs when decoded from msgpack."""
        constraints = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        if len(constraints) != 1:
            raise VLLMValidationError(
                f"StructuredOutputsParams takes exactly one of {', '.join(_CONSTRAINTS)}; "
                f"got {', '.join(constraints) if constraints else 'none'}.",
                parameter="structured_outputs",
                value=constraints,
            )
        for name in ("regex", "grammar", "structural_tag", "whitespace_pattern"):
            if getattr(self, name) is not None:
                check_str(name, getattr(self, name), MAX_GRAMMAR_LENGTH)
        if self.json is not None:
            self.json = _check_json(self.json)
        if self.choice is not None:
            self.choice = _check_choices(self.choice)
        if self.json_object is not None:  # False is refused with the request, as in vLLM
            check_bool("json_object", self.json_object)
        self._check_options(constraints[0])

    def _check_options(self, kind: str) -> None:
        check_bool("disable_any_whitespace", self.disable_any_whitespace)
        check_bool("disable_additional_properties", self.disable_additional_properties)
        for name in _JSON_OPTIONS:
            if getattr(self, name) and kind not in _TAKES_JSON_OPTIONS:
                message = f"{name} goes with {', '.join(_TAKES_JSON_OPTIONS)}; remove it, or do not use {kind}."
                raise VLLMValidationError(message, parameter=name, value=getattr(self, name))
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            message = "whitespace_pattern and disable_any_whitespace exclude each other; give one of them."
            raise VLLMValidationError(message, parameter="whitespace_pattern", value=self.whitespace_pattern)

    @property
    def kind(self) -> str:
        """The name of the constraint that is set."""
        return next(name for name in _CONSTRAINTS if getattr(self, name) is not None)

    def all_constraints_none(self) -> bool:
        """True if no constraint is set."""
        return all(getattr(self, name) is None for name in _CONSTRAINTS)

    def with_defaults(
        self, *, disable_any_whitespace: bool, disable_additional_properties: bool
    ) -> StructuredOutputsParams:
        """Return these params with an engine's options switched on, as far as they apply to the constraint."""
        if self.kind not in _TAKES_JSON_OPTIONS:
            return self
        compact = self.disable_any_whitespace or (disable_any_whitespace and self.whitespace_pattern is None)
        closed = self.disable_additional_properties or disable_additional_properties
        return msgspec.structs.replace(self, disable_any_whitespace=compact, disable_additional_properties=closed)


def _check_json(schema: Any) -> str | dict[str, Any]:
    """Return a schema as text or dict; a class gives its `model_json_schema()`."""
    if isinstance(schema, str):
        if not schema:
            return schema  # it is refused with the request, as in vLLM
        return check_str("json", schema, MAX_GRAMMAR_LENGTH)
    if isinstance(schema, type):
        to_schema = getattr(schema, "model_json_schema", None)
        if to_schema is None:
            message = f"json={schema.__name__} is not a Pydantic model (it has no model_json_schema method)."
            raise VLLMValidationError(message, parameter="json", value=schema)
        schema = to_schema()
    if not isinstance(schema, dict):
        message = f"json must be a dict, a JSON string or a Pydantic model class, got {type(schema).__name__}."
        raise VLLMValidationError(message, parameter="json", value=schema)
    if not _is_bounded(schema):
        limits = f"{MAX_GRAMMAR_LENGTH} characters as JSON and {MAX_JSON_NESTING} levels of nesting"
        message = f"json must be a schema of at most {limits}."
        raise VLLMValidationError(message, parameter="json", value=None)
    try:
        text = json_text.dumps(schema, allow_nan=False, ensure_ascii=False)
        schema = json_text.loads(text)  # lists for tuples, strings for keys, and nobody else's to change
        msgspec.msgpack.encode(schema)  # as it will be encoded: no lone surrogates, integers of 64 bits
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        message = f"json must be a schema that can be written as JSON: {error}."
        raise VLLMValidationError(message, parameter="json", value=schema) from error
    if len(text) > MAX_GRAMMAR_LENGTH:
        message = f"json must have at most {MAX_GRAMMAR_LENGTH} characters, got {len(text)}."
        raise VLLMValidationError(message, parameter="json", value=schema)
    return schema


def _is_bounded(schema: dict[str, Any]) -> bool:
    """Return whether a value has at most MAX_GRAMMAR_LENGTH parts in MAX_JSON_NESTING levels and so is safe to copy: a
    value that contains itself is endless.
    """
    num_parts = 0
    pending: list[tuple[Any, int]] = [(schema, 1)]
    while pending:
        value, level = pending.pop()
        num_parts += 1 + len(value)
        if num_parts > MAX_GRAMMAR_LENGTH or level > MAX_JSON_NESTING:
            return False
        inside = value.values() if isinstance(value, dict) else value
        pending.extend((part, level + 1) for part in inside if isinstance(part, (dict, list, tuple)))
    return True


def _check_choices(choices: Any) -> list[str]:
    checked = check_strings("choice", choices, _MAX_CHOICES, MAX_GRAMMAR_LENGTH)
    length = sum(map(len, checked))
    if not checked or length > MAX_GRAMMAR_LENGTH:
        wanted = f"between 1 string and {MAX_GRAMMAR_LENGTH} characters in all"
        message = f"choice must have {wanted}, got {len(checked)} strings of {length} characters."
        raise VLLMValidationError(message, parameter="choice", value=choices)
    return checked
