"""Read forms of fields and files: bodies of the type multipart/form-data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from jaxllm.exceptions import VLLMValidationError

_MAX_PARTS = 100
_MAX_FIELD = 1 << 16
"""The most bytes of a field that is no file."""
_MAX_NAME = 100
_MAX_BOUNDARY = 70
"""As in RFC 2046."""


class Form(NamedTuple):
    """The parts of a form by their names."""

    fields: dict[str, str | list[str]]
    """The texts; a list for a name that ends in []. The last of several others counts."""
    files: dict[str, bytes]


def read_form(body: bytes, content_type: bytes) -> Form:
    """Return the parts of a form. Raises VLLMValidationError for what is none, has too many parts or too long texts."""
    boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
    if not 0 < len(boundary) <= _MAX_BOUNDARY:
        raise VLLMValidationError("The form's Content-Type has no boundary: let the HTTP client set that header.")
    reader = _Reader()
    parser = MultipartParser(boundary, reader.callbacks())  # which bounds the number and length of headers
    try:
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        message = "The body is not a form of the type multipart/form-data."
        if str(error).startswith("Maximum header"):
            message = "The form has a part with too many or too long headers: shorten its name or its file's name."
        raise VLLMValidationError(message) from error
    if not reader.is_ended:
        raise VLLMValidationError("The form ends early: its last boundary is missing.")
    return Form(reader.fields, reader.files)


class _Reader:
    """Takes the parts of a form from a parser."""

    def __init__(self) -> None:
        self.fields: dict[str, str | list[str]] = {}
        self.files: dict[str, bytes] = {}
        self.is_ended = False
        self._num_parts = 0
        self._header: list[bytearray] = [bytearray(), bytearray()]
        self._disposition = b""
        self._name, self._is_file = "", False
        self._data = bytearray()

    def callbacks(self) -> Any:
        """Return the functions that the parser calls."""
        return {
            "on_part_begin": self._begin_part,
            "on_header_field": lambda data, start, end: self._add_header(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._add_header(1, data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._add_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise VLLMValidationError(f"The form has more than {_MAX_PARTS} parts.")
        self._disposition, self._data = b"", bytearray()

    def _add_header(self, part: int, data: bytes) -> None:
        self._header[part] += data

    def _end_header(self) -> None:
        field, value = map(bytes, self._header)
        self._header = [bytearray(), bytearray()]
        if field.lower() == b"content-disposition":
            self._disposition = value

    def _end_headers(self) -> None:
        options: Mapping[bytes, bytes] = parse_options_header(self._disposition)[1]
        if b"name" not in options:
            raise VLLMValidationError("The form has a part without a name.")
        self._name = _text(options[b"name"], "a name")
        if len(self._name) > _MAX_NAME:
            raise VLLMValidationError(f"The form has a part whose name has more than {_MAX_NAME} characters.")
        self._is_file = b"filename" in options or b"filename*" in options

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if not self._is_file and len(self._data) + end - start > _MAX_FIELD:
            message = f"{self._name}: a field of a form has at most {_MAX_FIELD} bytes."
            raise VLLMValidationError(message, parameter=self._name)
        self._data += memoryview(data)[start:end]

    def _end_part(self) -> None:
        if self._is_file:
            if self._name in self.files:
                raise VLLMValidationError(f"{self._name}: send one file.", parameter=self._name)
            self.files[self._name] = bytes(self._data)
            return
        text = _text(bytes(self._data), self._name)
        if not self._name.endswith("[]"):
            self.fields[self._name] = text
            return
        texts = self.fields.setdefault(self._name, [])
        assert isinstance(texts, list)
        texts.append(text)

    def _end(self) -> None:
        self.is_ended = True


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise VLLMValidationError(f"The form has text that is not UTF-8: {name[:40]}.") from error
