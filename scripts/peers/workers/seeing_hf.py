"""A worker that asks Hugging Face Transformers about pictures: `generate` on one batch, padded on the left."""

from __future__ import annotations

import os
import platform
import time
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers
from pictures import draw
from protocol import serve
from transformers import AutoModelForImageTextToText, AutoProcessor


class Static:
    """A model with its processor, and pictures by number."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        dtype = getattr(torch, settings["dtype"])
        self.processor = AutoProcessor.from_pretrained(settings["model"], padding_side="left")
        self.model = AutoModelForImageTextToText.from_pretrained(settings["model"], dtype=dtype).eval()
        self.model.generation_config.eos_token_id = None
        self.pictures: dict[int, Any] = {}

    def versions(self) -> dict[str, str]:
        """Return the versions that run."""
        return {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }

    def draw(self, numbers: list[int]) -> None:
        """Draw pictures that `ask` and `answers` may then show."""
        self.pictures |= {number: draw(number) for number in numbers}

    def ask(self, prompts: list[str], pictures: list[list[int]]) -> None:
        """Compute one token for each prompt with pictures."""
        self._run(prompts, pictures)

    def answers(self, prompts: list[str], pictures: list[list[int]], top: int) -> list[Any]:
        """Return the ids of each prompt, and the likeliest next tokens as [id, log-probability]."""
        answers = []
        for prompt, numbers in zip(prompts, pictures, strict=True):
            ids, logits = self._run([prompt], [numbers], return_dict_in_generate=True, output_logits=True)
            values, tokens = torch.log_softmax(logits[0].float(), -1).topk(top)
            answers.append([ids[0].tolist(), list(zip(tokens.tolist(), values.tolist(), strict=True))])
        return answers

    @torch.inference_mode()
    def tower(self, prompt: str, numbers: list[int]) -> float:
        """Return the seconds of the tower alone for pictures, in one batch."""
        inputs = self._inputs([prompt] * len(numbers), [[number] for number in numbers])
        of_pictures = {name: inputs[name] for name in ("pixel_values", "image_grid_thw") if name in inputs}
        start = time.monotonic()
        self.model.get_image_features(**of_pictures)
        return time.monotonic() - start

    def _inputs(self, prompts: list[str], pictures: list[list[int]]) -> Any:
        """Return the model's inputs for prompts with pictures."""
        images = [[self.pictures[number] for number in numbers] for numbers in pictures]
        inputs = self.processor(text=prompts, images=images, padding=True, return_tensors="pt")
        inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        return inputs

    @torch.inference_mode()
    def _run(self, prompts: list[str], pictures: list[list[int]], **options: Any) -> Any:
        """Return the prompts' ids and the logits of the next token, if `options` ask for them."""
        inputs = self._inputs(prompts, pictures)
        out = self.model.generate(**inputs, do_sample=False, max_new_tokens=1, **options)
        return (inputs["input_ids"], out.logits[0]) if options else None


if __name__ == "__main__":
    serve(Static)
