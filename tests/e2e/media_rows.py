"""Read the rows that a tower has made from an engine's feature cache, as computed embeddings for prompts."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxllm import LLM
from jaxllm.execution.model_runner import ModelRunner
from tests.e2e.inside import core_of
from tests.e2e.media_goldens import MediaGolden
from tests.e2e.tiny_engine import RecordingScheduler

WITH_SIZES = ("llama4", "ministral3", "mistral3", "smolvlm")
"""Families whose embeddings come with the size of the picture."""


def made_rows(llm: LLM, scheduler: RecordingScheduler, family: str, golden: MediaGolden) -> Any:
    """Return the images of a prompt as embeddings in vLLM's form, each image once; the prompt has run last, alone."""
    runner = core_of(llm)._runner
    assert isinstance(runner, ModelRunner)
    features_rw = np.asarray(runner.launcher.params["media"])
    encodes = [encode for plan in scheduler.plans for encode in plan.encodes]
    rows, items = [features_rw[encode.rows] for encode in encodes], [encode.item for encode in encodes]
    if golden.positions is not None:
        return {"image_embeds": np.concatenate(rows), "image_grid_thw": [item.grids[0] for item in items]}
    if family in WITH_SIZES:
        return {"image_embeds": rows, "image_sizes": np.array([item.size for item in items])}
    return rows
