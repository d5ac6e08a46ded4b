"""A worker that transcribes with jaxllm: all clips of all sounds are requests of one engine."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import numpy as np
from protocol import serve

from jaxllm import LLM
from jaxllm.speech.sound import Sound
from jaxllm.speech.tokens import SpeechTokens
from jaxllm.speech.transcription import Ask, SpeechOptions, Transcription

CLIP_SECONDS = 30.0


class Whisper:
    """A model with its engine. Sounds are files of float32 samples, as `numpy.save` writes them."""

    def __init__(self, settings: dict[str, Any]) -> None:
        llm = LLM(settings["model"], dtype=settings["dtype"], **settings["engine"])
        self.engine = llm.llm_engine
        front = self.engine.front
        self.tokens = SpeechTokens.of(front.require_tokenizer(), front.ready.vocab_size)
        self.max_model_len = self.engine.model_config.max_model_len

    def versions(self) -> dict[str, str]:
        """Return the versions that run."""
        return {"jax": importlib.metadata.version("jax"), "python": platform.python_version()}

    def texts(self, sounds: list[str], language: str) -> list[str]:
        """Return the texts of sounds of any length. Nothing is known of them from a call before."""
        self.engine.reset_encoder_cache()
        self.engine.reset_prefix_cache()
        options = SpeechOptions(language)
        transcriptions = [
            Transcription(Sound(np.load(sound), CLIP_SECONDS), self.tokens, options, self.max_model_len)
            for sound in sounds
        ]
        running: dict[str, tuple[Transcription, int]] = {}
        while not all(transcription.is_done for transcription in transcriptions):
            for index, transcription in enumerate(transcriptions):
                while isinstance(ask := transcription.next_ask(), Ask):
                    request_id = f"{index}-{ask.number}"
                    running[request_id] = transcription, ask.number
                    self.engine.add_request(request_id, ask.prompt, ask.params)
            for output in self.engine.step():
                if output.finished:
                    transcription, number = running.pop(output.request_id)
                    transcription.take(number, output)
        return [transcription.transcript().text for transcription in transcriptions]


if __name__ == "__main__":
    serve(Whisper)
