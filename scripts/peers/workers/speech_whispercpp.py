"""A worker that transcribes with whisper.cpp, by its Python binding, one file at a time."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import numpy as np
from protocol import serve
from pywhispercpp.model import Model  # pyright: ignore[reportMissingImports]


class Whisper:
    """A model in ggml's format. Sounds are files of float32 samples, as `numpy.save` writes them."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.model = Model(
            settings["model"],
            n_threads=len(os.sched_getaffinity(0)),
            print_progress=False,
            print_realtime=False,
        )

    def versions(self) -> dict[str, str]:
        """Return the versions that run."""
        return {"pywhispercpp": importlib.metadata.version("pywhispercpp"), "python": platform.python_version()}

    def texts(self, sounds: list[str], language: str) -> list[str]:
        """Return the texts of sounds of any length, greedily."""
        greedy = {"greedy": {"best_of": 1}, "temperature_inc": 0.0}
        answers = []
        for sound in sounds:
            segments = self.model.transcribe(np.load(sound), language=language, no_timestamps=True, **greedy)
            answers.append("".join(segment.text for segment in segments))
        return answers


if __name__ == "__main__":
    serve(Whisper)
