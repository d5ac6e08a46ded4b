"""Convert gRPC messages to completion requests, and the engine's outputs to messages."""

from __future__ import annotations

from jaxllm.exceptions import VLLMValidationError
from jaxllm.logprobs import LogprobsOnePosition
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.server.grpc.fields import read_fields
from jaxllm.server.grpc.inference_pb2 import (
    GenerateRequest,
    GenerateResponse,
    PositionLogprobs,
    PromptInfo,
    SequenceOutput,
    TokenLogprob,
    Usage,
)
from jaxllm.server.openai.completion_protocol import CompletionRequest
from jaxllm.server.openai.usage import make_usage

PROMPT = ("text", "token_ids")
"""The fields that can hold the prompt. All other fields have HTTP's names."""


def completion_request(data: bytes, *, stream: bool) -> CompletionRequest:
    """Return the unchecked request in a `GenerateRequest`. Raises VLLMValidationError for a malformed message, or one
    without a prompt.
    """
    fields = read_fields(data, GenerateRequest)
    prompts = [fields.pop(name) for name in PROMPT if name in fields]
    if not prompts:
        raise VLLMValidationError("give a prompt: either text or token_ids.", parameter="prompt")
    return CompletionRequest(prompt=prompts[0], stream=stream, **fields)


class Responses:
    """Makes messages from one request's outputs; pieces of a stream continue each other."""

    def __init__(self, request: CompletionRequest, request_id: str, model: str, *, tells_cached: bool) -> None:
        """Show `request_id` and the `model`'s name in the first message, and with `tells_cached` cached tokens."""
        self._shows_ids, self._tells_cached = request.return_token_ids, tells_cached
        self._opening: PromptInfo | None = PromptInfo(request_id=request_id, model=model)
        self._num_tokens = self._num_cached = 0

    def of(self, output: RequestOutput) -> GenerateResponse:
        """Return the message of an output, which is whole or the delta since the last."""
        outputs = [self._sequence(each) for each in output.outputs]
        self._num_cached = output.num_cached_tokens or self._num_cached
        opening, self._opening = self._opening, None
        if opening is not None:
            if self._shows_ids:
                opening.token_ids.extend(output.prompt_token_ids or ())
            opening.logprobs.extend(map(_position, output.prompt_logprobs or ()))
        usage = self._usage(len(output.prompt_token_ids or ())) if output.finished else None
        return GenerateResponse(prompt_info=opening, outputs=outputs, usage=usage)

    def _sequence(self, output: CompletionOutput) -> SequenceOutput:
        self._num_tokens += len(output.token_ids)
        made = SequenceOutput(
            index=output.index,
            text=output.text,
            token_ids=output.token_ids if self._shows_ids else None,
            logprobs=map(_position, output.logprobs or ()),
            finish_reason=output.finish_reason,
        )
        if isinstance(output.stop_reason, int):
            made.stop_token_id = output.stop_reason
        elif output.stop_reason is not None and output.finish_reason == "stop":
            made.stop_string = output.stop_reason
        return made

    def _usage(self, num_prompt_tokens: int) -> Usage:
        usage = make_usage(num_prompt_tokens, self._num_tokens)
        return Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
            cached_tokens=self._num_cached if self._tells_cached else None,
        )


def _position(position: LogprobsOnePosition | None) -> PositionLogprobs:
    tokens = (
        TokenLogprob(token_id=token_id, token=each.decoded_token, logprob=each.logprob, rank=each.rank)
        for token_id, each in (position or {}).items()
    )
    return PositionLogprobs(tokens=tokens)
