"""Cache tokenizers on disk as transformers made them, since importing it and making one takes seconds.

Transformers changes many tokenizers on loading (another normalizer, more tokens), so the result is cached.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from importlib import metadata
from pathlib import Path

import msgspec

from jaxllm.text.tokenizer_parts import TokenizerParts
from jaxllm.utils.files import read_own, write_whole

logger = logging.getLogger(__name__)

_LIBRARIES = ("transformers", "tokenizers", "sentencepiece", "tiktoken", "protobuf")
"""The libraries that make tokenizers, if installed."""


class TokenizerCache:
    """Caches tokenizers by a digest of their source. An unusable file counts as missing."""

    def __init__(self, cache_dir: str) -> None:
        self._folder = Path(cache_dir, "tokenizers")

    def load(self, digest: str) -> TokenizerParts | None:
        """Return a tokenizer's parts; None if missing."""
        path = self._path(digest)
        try:
            return msgspec.msgpack.decode(read_own(path), type=TokenizerParts)
        except FileNotFoundError:
            return None
        except (OSError, ValueError):  # msgspec's errors are ValueErrors
            logger.warning("%s cannot be used; the tokenizer is made again", path, exc_info=True)
            return None

    def save(self, digest: str, parts: TokenizerParts) -> None:
        """Store a tokenizer's parts; log a warning if the folder is not writable."""
        try:
            write_whole(self._path(digest), msgspec.msgpack.encode(parts))
        except OSError as error:
            logger.warning("the tokenizer cannot be kept: %s", error)

    def _path(self, digest: str) -> Path:
        made_by = hashlib.sha256(digest.encode())
        for name in _LIBRARIES:
            with contextlib.suppress(metadata.PackageNotFoundError):
                made_by.update(f"{name} {metadata.version(name)} ".encode())
        for name in ("tokenizer_cache.py", "tokenizer_parts.py"):
            made_by.update(Path(__file__).with_name(name).read_bytes())
        return self._folder / made_by.hexdigest()
