"""A progress bar for a run of many prompts."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable

from jaxllm.utils.streams import losing_messages


@dataclasses.dataclass
class Counts:
    """Counts of what a run has done so far."""

    failed: int = 0
    cut_off: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


class Progress:
    """A bar on standard error with the number of finished prompts, and tokens per second."""

    def __init__(self, total: int, initial: int, *, shown: bool) -> None:
        from tqdm import tqdm

        # A terminal's line is overwritten, but lines of a log file stay, so only a few are written.
        wait = 0.2 if sys.stderr.isatty() else 10.0
        self._bar = tqdm(
            total=total,
            initial=initial,
            desc="Prompts",
            unit="prompt",
            mininterval=wait,
            file=sys.stderr,
            disable=not shown,
            delay=1e-9,  # draws nothing when it is created
        )
        with losing_messages():
            self._bar.refresh()
        self._start = time.monotonic()

    def __enter__(self) -> Callable[[int, Counts], None]:
        return self._advance

    def __exit__(self, *_error: object) -> None:
        with losing_messages():
            self._bar.close()

    def _advance(self, num_done: int, counts: Counts) -> None:
        seconds = max(time.monotonic() - self._start, 1e-6)
        tokens = {"input": counts.prompt_tokens, "output": counts.output_tokens}
        rates = [f"{name}: {number / seconds:.0f} tok/s" for name, number in tokens.items() if number]
        self._bar.set_postfix_str(", ".join(rates), refresh=False)
        with losing_messages():
            self._bar.update(num_done)
