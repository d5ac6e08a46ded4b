"""The paths of OpenAI's routes for speech, which batch files name too."""

from __future__ import annotations

from collections.abc import Mapping

from jaxllm.speech.tokens import Task

SPEECH_TASKS: Mapping[str, Task] = {"/v1/audio/transcriptions": "transcribe", "/v1/audio/translations": "translate"}
"""The task of each path."""
