"""A worker that runs sentence-transformers, which sorts texts by length and pads batches."""

from __future__ import annotations

import os
import platform
from typing import Any

import sentence_transformers
import torch
import transformers
from protocol import serve
from sentence_transformers import SentenceTransformer


class Encoder:
    """A model with the library's own defaults."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        dtype = getattr(torch, settings["dtype"])
        self.model = SentenceTransformer(settings["model"], model_kwargs={"dtype": dtype})

    def versions(self) -> dict[str, str]:
        """Return the versions that run."""
        return {
            "sentence-transformers": sentence_transformers.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }

    def warm_up(self) -> None:
        """Do nothing: it compiles nothing."""

    def embed(self, texts: list[str], batch_size: int = 32) -> None:
        """Embed texts as they are, without a prompt; `vectors` returns the embeddings."""
        self.embeddings = self.model.encode(texts, prompt="", batch_size=batch_size, show_progress_bar=False)

    def vectors(self) -> list[list[float]]:
        """Return the last embeddings."""
        return self.embeddings.tolist()


if __name__ == "__main__":
    serve(Encoder)
