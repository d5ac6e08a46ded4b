"""A worker that answers questions with Hugging Face's decision pipeline, which `transformers serve` runs too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers
from protocol import serve
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.decision import DecisionConfig
from transformers.pipelines.decision import DecisionPipeline


class Decider:
    """The pipeline around a chat model, which answers with a letter for each option."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings.get("threads") or len(os.sched_getaffinity(0)))
        gguf = Path(settings["gguf"])
        dense = GgufConfig(gguf_file=gguf.name, dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, quantization_config=dense, dtype=torch.float32
        ).eval()
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        self.pipeline = DecisionPipeline(model=model, tokenizer=tokenizer, decision_config=DecisionConfig())

    def versions(self) -> dict[str, str]:
        """Return the versions that run."""
        return {"transformers": transformers.__version__, "torch": torch.__version__}

    @torch.inference_mode()
    def decide(self, state: Any, questions: dict[str, Any]) -> dict[str, Any]:
        """Return, by question, the answer, the prompt's tokens and the tokens of the labels."""
        inputs = self.pipeline.preprocess({"state": state, "questions": questions})
        prompts = [
            (question.name, prompt["input_ids"][0].tolist(), self.pipeline.label_token_ids(tuple(question.labels)))
            for prompt, asked in inputs["prompts"]
            for question in asked
        ]
        answers = self.pipeline.postprocess(self.pipeline.forward(inputs))
        return {name: {"answer": answers[name], "prompt": ids, "labels": labels} for name, ids, labels in prompts}


serve(Decider)
