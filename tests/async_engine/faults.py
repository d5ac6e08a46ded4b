"""Logits processors that a core loads by name, and that fail when a request asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import numpy as np

from jaxllm import SamplingParams
from jaxllm.logits_processors import AdapterLogitsProcessor
from jaxllm.sampling.processors import LogitsState

TENTH = 10
SLOW_SECONDS = 2.0


class Faults(AdapterLogitsProcessor):
    """Fails at a request's tenth step as its extra_args["fault"] says: "raise", "memory" or "hang"."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., np.ndarray] | None:
        fault = (params.extra_args or {}).get("fault")

        def fail(output_ids: list[int], logits: np.ndarray) -> np.ndarray:
            if len(output_ids) < TENTH - 1:
                return logits
            if fault == "raise":
                raise ZeroDivisionError("the tenth step")
            if fault == "memory":
                raise MemoryError("no room for the tenth step")
            time.sleep(600)
            return logits

        return fail if fault else None


def slow_to_compile(logits_sv: jax.Array, state: LogitsState) -> jax.Array:
    """Take long to be traced, and fail to be for steps of more than eight rows."""
    del state
    time.sleep(SLOW_SECONDS)
    if logits_sv.shape[0] > 8:
        raise NotImplementedError("rows beyond eight")
    return logits_sv
