"""Tokenizers are kept on disk as transformers made them: to import it and make one takes longer than a step's program.

Many kinds are changed when they are loaded (another normalizer, more whole tokens), so what is kept is the result.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer as Backend

from jaxllm.utils.files import read_own, write_whole

logger = logging.getLogger(__name__)

LIBRARIES = ("transformers", "tokenizers", "sentencepiece", "tiktoken", "protobuf")
"""The libraries that make tokenizers, as far as they are there."""


class KeptTokenizer(NamedTuple):
    """The parts of a tokenizer that the engine needs besides chat templates."""

    backend: Backend
    eos_token_id: int | None


class TokenizerCache:
    """This keeps tokenizers by a digest of what they are made from. A file that cannot be used counts as none."""

    def __init__(self, cache_dir: str) -> None:
        self._folder = Path(cache_dir, "tokenizers")

    def load(self, digest: str) -> KeptTokenizer | None:
        """Return a tokenizer, None if it is not there."""
        path = self._path(digest)
        try:
            head, _, body = read_own(path).decode().partition("\n")
            facts = json.loads(head)
            return KeptTokenizer(Backend.from_str(body), facts["eos_token_id"])
        except FileNotFoundError:
            return None
        except Exception:  # the library raises bare ones
            logger.warning("%s cannot be used; the tokenizer is made again", path, exc_info=True)
            return None

    def save(self, digest: str, tokenizer: KeptTokenizer) -> None:
        """Keep a tokenizer; a folder that cannot be written is a warning."""
        head = json.dumps({"eos_token_id": tokenizer.eos_token_id})
        try:
            write_whole(self._path(digest), f"{head}\n{tokenizer.backend.to_str()}".encode())
        except OSError as error:
            logger.warning("the tokenizer cannot be kept: %s", error)

    def _path(self, digest: str) -> Path:
        made_by = hashlib.sha256(digest.encode())
        for name in LIBRARIES:
            with contextlib.suppress(metadata.PackageNotFoundError):
                made_by.update(f"{name} {metadata.version(name)} ".encode())
        for path in (Path(__file__), Path(__file__).with_name("tokenizer.py")):
            made_by.update(path.read_bytes())
        return self._folder / made_by.hexdigest()
