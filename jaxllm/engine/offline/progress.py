"""The progress bar of a batch shows requests done, and tokens per second in and out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.outputs import AnyOutput, RequestOutput
from jaxllm.params.checks import shown

type UseTqdm = bool | Callable[..., Any]


def check_use_tqdm(use_tqdm: Any) -> None:
    """Refuse a `use_tqdm` that neither switches a bar on or off nor makes one."""
    if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
        message = f"use_tqdm must be True, False or a callable that makes a bar as tqdm does, got {shown(use_tqdm)}."
        raise VLLMValidationError(message, parameter="use_tqdm", value=use_tqdm)


class Progress:
    """Counts finished requests on a bar; without one it does nothing."""

    def __init__(self, use_tqdm: UseTqdm, total: int) -> None:
        """Make a bar for `total` requests with tqdm, or with a callable that takes tqdm's arguments."""
        self._bar: Any = None
        self._start = time.monotonic()
        self._num_in = self._num_out = 0
        if use_tqdm:
            self._bar = _bar_maker(use_tqdm)(
                total=total, desc="Processed prompts", dynamic_ncols=True, postfix=self._speeds()
            )

    def update(self, output: AnyOutput) -> None:
        """Count a finished request."""
        if not isinstance(output, RequestOutput):
            self.count(len(output.prompt_token_ids), 0)
            return
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


def _bar_maker(use_tqdm: UseTqdm) -> Callable[..., Any]:
    if callable(use_tqdm):
        return use_tqdm
    from tqdm.auto import tqdm

    return tqdm
