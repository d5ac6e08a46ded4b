"""Read a model's small JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.utils.files import read_text


def read_json(path: Path, source: str) -> dict[str, Any]:
    """Read a file that must hold one JSON object; errors name the file and the model `source`."""
    value = read_json_value(path, source)
    if not isinstance(value, dict):
        raise model_error(f"{path.name} holds {type(value).__name__}, not an object", source)
    return value


def read_json_value(path: Path, source: str) -> Any:
    """Read a JSON file with a value of any type."""
    try:
        return json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise model_error(f"{path.name} cannot be read: {error}", source) from None


def model_error(message: str, source: str) -> VLLMValidationError:
    """Return the error for a model with unusable files. `source` is the model as the user named it."""
    return VLLMValidationError(f"{source}: {message}.", parameter="model", value=source)
