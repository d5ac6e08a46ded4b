"""The progress bar of a batch: requests done, and tokens per second in and out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from jaxllm.outputs import RequestOutput


class Progress:
    """Counts finished requests on a bar; without one it does nothing."""

    def __init__(self, use_tqdm: bool | Callable[..., Any], total: int) -> None:
        """Make a bar for `total` requests with tqdm, or with a callable that takes tqdm's arguments."""
        self._bar: Any = None
        self._start = time.monotonic()
        self._num_in = self._num_out = 0
        if use_tqdm:
            self._bar = _bar_maker(use_tqdm)(
                total=total, desc="Processed prompts", dynamic_ncols=True, postfix=self._speeds()
            )

    def update(self, output: RequestOutput) -> None:
        """Count a finished request."""
        num_in = len(output.prompt_token_ids or ()) * len(output.outputs)
        self.count(num_in, sum(len(completion.token_ids) for completion in output.outputs))

    def count(self, num_in: int, num_out: int) -> None:
        """Count something finished, by its tokens."""
        if self._bar is None:
            return
        self._num_in += num_in
        self._num_out += num_out
        self._bar.postfix = self._speeds()
        self._bar.update(1)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()

    def _speeds(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        num_in, num_out = self._num_in / seconds, self._num_out / seconds
        return f"est. speed input: {num_in:.2f} toks/s, output: {num_out:.2f} toks/s"


def _bar_maker(use_tqdm: bool | Callable[..., Any]) -> Callable[..., Any]:
    if callable(use_tqdm):
        return use_tqdm
    from tqdm.auto import tqdm

    return tqdm
