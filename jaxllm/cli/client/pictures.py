"""Pictures in files as URLs that go with a message."""

from __future__ import annotations

import base64
import mimetypes
from pathlib import Path

from jaxllm.exceptions import VLLMValidationError


def picture_url(path: str) -> str:
    """Return the data: URL of a picture's file. Raises VLLMValidationError for one that cannot be read, and for another
    kind of file by its name.
    """
    kind, _ = mimetypes.guess_type(path)
    if kind is None or not kind.startswith("image/"):
        raise VLLMValidationError(f"image: {path} is no picture by its name.", parameter="image", value=path)
    try:
        data = Path(path).expanduser().read_bytes()
    except OSError as error:
        message = f"image: {path} cannot be read: {error.strerror or error}."
        raise VLLMValidationError(message, parameter="image", value=path) from error
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
