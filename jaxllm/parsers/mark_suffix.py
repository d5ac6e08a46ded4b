"""The suffix that a checkpoint's marks may have, as `:opensource` in `<tool_call:opensource>` of Hy3."""

from __future__ import annotations

import re

_MARK = re.compile(r"(</?(?:think|tool_calls?|tool_sep|arg_key|arg_value))(?:\{\}|(:[\w.-]{1,64}))>")
"""A mark with a suffix, or with the place where a chat template puts it."""
_VARIABLE = re.compile(r"""HYTK\s*=\s*["'](:[\w.-]{1,64})["']""")
"""The variable of a chat template that holds the suffix."""


def find_suffix(template: str) -> str:
    """Return the suffix of the marks in a chat template, with its colon; "" if they have none."""
    variable = _VARIABLE.search(template)
    if variable is not None:
        return variable[1]
    return next((suffix for _, suffix in _MARK.findall(template) if suffix), "")


def without_suffix(template: str) -> str:
    """Return a chat template with plain marks."""
    return _MARK.sub(r"\1>", template)


def add_suffix(mark: str, suffix: str) -> str:
    """Return a mark such as `<think>` with the suffix before its last character."""
    return f"{mark[:-1]}{suffix}{mark[-1:]}"
