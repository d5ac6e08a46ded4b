"""The process that `jaxllm bench startup` starts: it makes one engine and one token, and times each part."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from jaxllm import LLM, EngineArgs, SamplingParams, TokensPrompt, __version__
from jaxllm.cli.bench.startup import Part, Request, Startup
from jaxllm.utils.child_process import reply
from jaxllm.utils.log import show_log

_MISS = "/jax/compilation_cache/cache_misses"


class _Marks(logging.Handler):
    """Records when each part of the start-up ended, and the compile time of each program."""

    def __init__(self, started: float) -> None:
        super().__init__(logging.DEBUG)
        self.parts: list[Part] = []
        self.programs: list[Part] = []
        self._since = started

    def emit(self, record: logging.LogRecord) -> None:
        phase, seconds = getattr(record, "phase", None), getattr(record, "seconds", None)
        if phase is None:
            return
        if seconds is not None:
            self.programs.append(Part(name=phase, seconds=seconds))
        else:
            self.mark(phase, record.created)

    def mark(self, name: str, now: float) -> None:
        """Record the end of a part; `now` is time.time()."""
        self.parts.append(Part(name=name, seconds=now - self._since))
        self._since = now


def main() -> int:
    """Start an engine and print the times."""
    show_log()
    return reply(Request, lambda request: measure(EngineArgs(**request.engine_args), request.started))


def measure(engine_args: EngineArgs, started: float) -> Startup:
    """Start the engine, generate a token, wait for all programs."""
    marks, misses = _Marks(started), []
    logger = logging.getLogger("jaxllm")
    logger.setLevel(logging.DEBUG)
    for handler in logger.handlers:
        handler.setLevel(logging.INFO)
    logger.addHandler(marks)
    import jax

    def count(event: str, **_: Any) -> None:
        if event == _MISS:
            misses.append(event)

    jax.monitoring.register_event_listener(count)
    llm = LLM.from_engine_args(engine_args)
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    llm.generate(TokensPrompt(prompt_token_ids=[0]), params, use_tqdm=False)
    marks.mark("first step", time.time())
    first_token = time.time() - started
    llm.llm_engine.warm_up()
    all_programs = time.time() - started
    device = jax.devices()[0]
    return Startup(
        versions={"jaxllm": __version__, "jax": jax.__version__},
        device=f"{jax.device_count()} {device.device_kind}",
        parts=marks.parts,
        first_token=first_token,
        programs=marks.programs,
        all_programs=all_programs,
        num_compilations=len(misses),
    )


if __name__ == "__main__":
    sys.exit(main())
