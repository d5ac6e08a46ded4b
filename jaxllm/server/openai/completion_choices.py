"""Make the choices of a completion: text with log-probabilities, whole or streamed."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.logprobs import LogprobsOnePosition
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.server.openai.completion_protocol import CompletionRequest, CompletionResponseChoice
from jaxllm.server.openai.logprobs import CompletionLogprobs, completion_logprobs, prompt_logprobs
from jaxllm.server.openai.usage import PromptTokensDetails
from jaxllm.text.tokenizer import Tokenizer


class PromptChoices:
    """Makes choices from the outputs for one prompt. It tracks what was shown, so that pieces continue each other."""

    def __init__(
        self, request: CompletionRequest, first_index: int, tokenizer: Tokenizer | None, *, as_token_ids: bool
    ) -> None:
        self._request, self._first_index, self._tokenizer = request, first_index, tokenizer
        self._as_token_ids = as_token_ids
        self._offsets: dict[int, int] = {}
        """The text offset of the next token of each choice that has begun."""
        self._scores: Sequence[LogprobsOnePosition | None] = ()
        """The prompt's log-probabilities, which are reported once."""
        self.num_prompt_tokens = self.num_tokens = 0
        self.prompt_details = PromptTokensDetails()

    def of(self, output: RequestOutput) -> list[CompletionResponseChoice]:
        """Return the choices of an output, which is whole or the delta since the last."""
        self.num_prompt_tokens = len(output.prompt_token_ids or ())
        self._scores = output.prompt_logprobs or self._scores
        self.prompt_details = PromptTokensDetails.of(output)
        return [self._choice(output, each) for each in output.outputs]

    @property
    def is_plain(self) -> bool:
        """Return whether the pieces of a choice between its first and its last are text alone."""
        return not (self._request.shows_logprobs or self._request.return_token_ids)

    def has_begun(self, output: CompletionOutput) -> bool:
        """Return whether a piece is neither the first nor the last one of its choice."""
        return output.index in self._offsets and output.finish_reason is None

    def take_plain(self, output: CompletionOutput) -> tuple[int, str]:
        """Return the choice's index and the text of a plain piece."""
        self.num_tokens += len(output.token_ids)
        return self._first_index + output.index, output.text

    def _choice(self, output: RequestOutput, completion: CompletionOutput) -> CompletionResponseChoice:
        request = self._request
        is_first = completion.index not in self._offsets
        prompt_ids = list(output.prompt_token_ids or ()) if is_first else []
        token_ids = [] if request.only_scores else list(completion.token_ids)
        self.num_tokens += len(token_ids)
        echoes = request.echo and is_first
        text = "" if request.only_scores else completion.text
        return CompletionResponseChoice(
            index=self._first_index + completion.index,
            text=(self._prompt_text(output) if echoes else "") + text,
            logprobs=self._logprobs(completion, prompt_ids if echoes else [], token_ids),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            token_ids=token_ids if request.return_token_ids else None,
            prompt_token_ids=prompt_ids if request.return_token_ids and is_first else None,
            prompt_logprobs=prompt_logprobs(output.prompt_logprobs) if request.prompt_logprobs is not None else None,
        )

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None or self._tokenizer is None:
            return output.prompt or ""
        # Include special tokens, which the offsets of log-probabilities count.
        return self._tokenizer.decode(output.prompt_token_ids or [], skip_special_tokens=False)

    def _logprobs(
        self, completion: CompletionOutput, prompt_ids: list[int], token_ids: list[int]
    ) -> CompletionLogprobs | None:
        offset = self._offsets.setdefault(completion.index, 0)
        if not self._request.shows_logprobs:
            return None
        positions: list[LogprobsOnePosition | None] = []
        if prompt_ids:
            positions += self._scores or [None] * len(prompt_ids)
        if token_ids:
            positions += completion.logprobs or []
        shown = completion_logprobs(
            [*prompt_ids, *token_ids],
            positions,
            as_token_ids=self._as_token_ids,
            text_offset=offset,
            tokenizer=self._tokenizer,
        )
        self._offsets[completion.index] = offset + sum(map(len, shown.tokens))
        return shown
