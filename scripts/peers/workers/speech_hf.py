"""A worker that transcribes with Hugging Face Transformers: `generate` on clips, its pipeline on whole files."""

from __future__ import annotations

import os
import platform
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers
from protocol import serve
from transformers import AutoProcessor, WhisperForConditionalGeneration, pipeline

RATE = 16_000
CLIP_SECONDS = 30


class Whisper:
    """A model with its processor. Sounds are files of float32 samples, as `numpy.save` writes them."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings.get("threads") or len(os.sched_getaffinity(0)))
        attention = {"attn_implementation": settings["attention"]} if "attention" in settings else {}
        self.processor = AutoProcessor.from_pretrained(settings["model"])
        self.model = WhisperForConditionalGeneration.from_pretrained(
            settings["model"], dtype=getattr(torch, settings["dtype"]), **attention
        ).eval()
        self.pipeline = pipeline(
            "automatic-speech-recognition",
            model=self.model,
            tokenizer=self.processor.tokenizer,
            feature_extractor=self.processor.feature_extractor,
        )

    def versions(self) -> dict[str, str]:
        """Return the versions that run."""
        return {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }

    @torch.inference_mode()
    def tokens(self, sounds: list[str], languages: list[str | None], kind: str) -> list[Any]:
        """Return the decoder's prompt, the greedy tokens and their log-probabilities of clips of at most 30 s.

        The kind is "text" or "timestamps".
        """
        timestamps = kind == "timestamps"
        answers = []
        for sound, language in zip(sounds, languages, strict=True):
            features = self._features(sound)
            options = {"language": language, "task": "transcribe", "return_timestamps": timestamps}
            # One pass: HF else decodes what comes after the last timestamp once more, as a clip of its own.
            options["force_unique_generate_call"] = True
            [ids] = self.model.generate(features, do_sample=False, num_beams=1, **options).tolist()
            prompt = self._prompt(features, language, timestamps=timestamps)
            if ids[: len(prompt)] == prompt:
                ids = ids[len(prompt) :]
            end = self.model.generation_config.eos_token_id
            ids = ids[: ids.index(end)] if end in ids else ids
            logits = self.model(features, decoder_input_ids=torch.tensor([prompt + ids])).logits[0]
            rows = torch.log_softmax(logits[len(prompt) - 1 : -1].double(), dim=-1)
            answers.append([prompt, ids, [float(row[token]) for row, token in zip(rows, ids, strict=True)]])
        return answers

    def words(self, sounds: list[str], languages: list[str | None]) -> list[list[Any]]:
        """Return the words of each clip, as [text, start, end]."""
        answers = []
        for sound, language in zip(sounds, languages, strict=True):
            options = {"language": language, "task": "transcribe", "num_beams": 1}
            words = self._transcribe([sound], options, return_timestamps="word")[0]["chunks"]
            answers.append([[word["text"], *word["timestamp"]] for word in words])
        return answers

    def texts(self, sounds: list[str], language: str, batch_size: int) -> list[str]:
        """Return the texts of sounds of any length, cut into clips that are transcribed in batches."""
        options = {"language": language, "task": "transcribe", "num_beams": 1}
        done = self._transcribe(sounds, options, batch_size=batch_size, chunk_length_s=CLIP_SECONDS)
        return [each["text"] for each in done]

    def _transcribe(self, sounds: list[str], generate: dict[str, Any], **options: Any) -> list[Any]:
        inputs: Any = [{"raw": np.load(sound), "sampling_rate": RATE} for sound in sounds]
        with torch.inference_mode():
            return self.pipeline(inputs, generate_kwargs=generate, **options)

    def _features(self, sound: str) -> Any:
        features = self.processor(np.load(sound), sampling_rate=RATE, return_tensors="pt").input_features
        return features.to(self.model.dtype)

    def _prompt(self, features: Any, language: str | None, *, timestamps: bool) -> list[int]:
        """Return the decoder's prompt; without a language, with the one that the model hears."""
        config = self.model.generation_config
        heard = config.lang_to_id[f"<|{language}|>"] if language else int(self.model.detect_language(features)[0])
        prompt = [config.decoder_start_token_id, heard, config.task_to_id["transcribe"]]
        return prompt if timestamps else [*prompt, config.no_timestamps_token_id]


if __name__ == "__main__":
    serve(Whisper)
