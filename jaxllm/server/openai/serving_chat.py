"""Serve chat completions: render the prompt, queue it, and make the answer or its events from the outputs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, NamedTuple

from msgspec import UNSET

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.engine.online.prompt_encoding import encode_prompt
from jaxllm.exceptions import VLLMValidationError
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.params.checks import check_int
from jaxllm.parsers.pieces import gather
from jaxllm.server.http.caller import Caller
from jaxllm.server.http.errors import ErrorResponse, error_response
from jaxllm.server.http.request_ids import headers_of, new_request_id
from jaxllm.server.http.sse import EngineOutputs, EventStream, raise_if_failed
from jaxllm.server.openai.answer_grammar import answer_grammar
from jaxllm.server.openai.chat_events import ChatEvents
from jaxllm.server.openai.chat_protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    FunctionCall,
    ToolCallMessage,
)
from jaxllm.server.openai.logprobs import chat_logprobs, prompt_logprobs
from jaxllm.server.openai.model_tasks import check_generates
from jaxllm.server.openai.output_parsers import OutputParsers
from jaxllm.server.openai.serving_models import OpenAIServingModels
from jaxllm.server.openai.turns import AnswerReader, Turn
from jaxllm.server.openai.usage import PromptTokensDetails, make_usage
from jaxllm.text.prompts import ParsedPrompt
from jaxllm.text.template_limits import TemplateLimitError
from jaxllm.utils.async_utils import LONG

_NO_CHAT = "The model does not support Chat Completions API"


class OpenAIServingChat:
    """Answers chat completions."""

    def __init__(
        self, engine_client: AsyncLLM, models: OpenAIServingModels, args: ServerArgs, reasoning_parser: str = ""
    ) -> None:
        """Answer with an engine. Without a `reasoning_parser` it is found from the chat template."""
        self.engine_client = engine_client
        self.models = models
        self.args = args
        self.parsers = OutputParsers(args, reasoning_parser, _template(engine_client))

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Any = None
    ) -> AsyncGenerator[bytes, None] | ChatCompletionResponse | ErrorResponse:
        """Answer a request, like vLLM's method. A stream yields its events as bytes and must be closed."""
        headers = headers_of(raw_request)
        try:
            return await self.answer(request, Caller.of(self.engine_client, headers, *new_request_id(headers)))
        except Exception as error:  # noqa: BLE001 - each has an answer
            return error_response(error)

    async def answer(
        self,
        request: ChatCompletionRequest,
        caller: Caller,
        failed: Callable[[BaseException], bytes] | None = None,
    ) -> EventStream | ChatCompletionResponse:
        """Answer a request; a stream is returned once it is admitted. `failed` makes a stream's last frame from an
        error, or raises it.

        Raises exceptions that `error_response` handles.
        """
        shown_id = caller.shown_id("chatcmpl", request.request_id)
        start = _Start(shown_id, int(time.time()), self.models.shown(request.model), self._role(request))
        with request.fields_named("messages"):
            if request.use_beam_search:
                self.check(request)
                output = await self._search(request, caller)
                return await self._response(request, start, output, AnswerReader())
            turn = await self.begin(request, caller)
            output = None if request.stream else await turn.whole()
        if output is None:
            return EventStream(ChatEvents(request, self.args, *start).frames(turn), turn.outputs, failed=failed)
        return await self._response(request, start, output, turn.reader)

    def check(self, request: ChatCompletionRequest) -> None:
        """Check the fields before any work is done. Raises exceptions that `error_response` handles."""
        check_generates(self.engine_client, "Chat Completions")
        self.models.check(request.model)
        request.check(trusts_template=self.args.trust_request_chat_template)
        self.check_top_logprobs(request.top_logprobs)

    async def begin(
        self,
        request: ChatCompletionRequest,
        caller: Caller,
        prompt: ParsedPrompt | None = None,
        *,
        streams_calls: bool = True,
    ) -> Turn:
        """Queue a request; it is admitted once this returns. Raises exceptions that `error_response` handles.

        A `prompt` replaces the rendered messages. Unless `streams_calls`, calls are held until they are whole and
        incomplete ones are text, except where the answer has to be a call and can only have been cut short.
        """
        self.check(request)
        use = request.tool_use()
        parser = self.parsers.tool_parser(use)
        ready = self.engine_client.front.ready
        params = request.sampling_params(ready, max_tokens=request.most_tokens, logprobs=request.num_logprobs)
        self.engine_client.admission.check_room(params.n)  # before the prompt is rendered
        prompt = prompt or await self.render(request)
        text = self.parsers.opened(prompt.text or "", self._variables(request))
        reasoning = None if self._constrains_reasoning else self.parsers.reasoning
        params.structured_outputs = answer_grammar(params.structured_outputs, use, parser, reasoning, text)
        special = self.engine_client.front.require_tokenizer().special_texts
        if not special.isdisjoint(self.parsers.marks(parser)):
            params.skip_special_tokens = False
        stream = await self.engine_client.add_request(
            caller.request_id,
            prompt,
            params,
            tokenization_kwargs=request.tokenization_kwargs(),
            trace_headers=caller.trace_headers,
            priority=request.priority,
            data_parallel_rank=caller.data_parallel_rank,
            lora_request=self.models.adapter(request.model),
            reasoning_ended=True,  # the grammar has begun where it has to
        )
        reader = AnswerReader(
            self.parsers.maker(
                parser,
                use.tools,
                text,
                holds_calls=not (request.stream and streams_calls) and not use.is_required,
            ),
            shows_reasoning=request.include_reasoning,
            is_named=use.is_named,
            counted_by=None if self.parsers.reasoning is None else self.engine_client.front.tokenizer,
        )
        return Turn(EngineOutputs(self.engine_client, stream), reader)

    @property
    def _constrains_reasoning(self) -> bool:
        """Return whether constraints hold in reasoning too."""
        return self.engine_client.vllm_config.structured_outputs_config.enable_in_reasoning

    async def _search(self, request: ChatCompletionRequest, caller: Caller) -> RequestOutput:
        """Run a beam search."""
        inputs, longest = self.engine_client.front.inputs, self.engine_client.model_config.max_model_len
        most = request.bounded(request.most_tokens, self.engine_client.front.ready)
        request.beam_search_params(most or 1)  # check its errors before the work
        if request.tool_use().tools:
            raise VLLMValidationError("tools are not called in a beam search: leave them out.", parameter="tools")
        prompt = await self.render(request)
        encoded = await encode_prompt(inputs, prompt, request.tokenization_kwargs())
        params = request.beam_search_params(max(1, longest - len(encoded.token_ids)) if most is None else most)
        search = self.engine_client.beam_search(
            encoded,
            caller.request_id,
            params,
            self.models.adapter(request.model),
            trace_headers=caller.trace_headers,
            data_parallel_rank=caller.data_parallel_rank,
        )
        async with contextlib.aclosing(search) as outputs:
            output = await anext(outputs)
        raise_if_failed(output)
        return output

    async def render(self, request: ChatCompletionRequest) -> ParsedPrompt:
        """Return the conversation of a checked request as a prompt. Raises VLLMValidationError."""
        if not self.has_template(request):
            raise VLLMValidationError(
                f"{_NO_CHAT}: it has no chat template. Use /v1/completions, or --chat-template at the start."
            )
        prompt = None if _is_long(request) else self._render_briefly(request)
        if prompt is None:
            prompt = await asyncio.to_thread(self._render_now, request)
        return prompt if request.cache_salt is None else dataclasses.replace(prompt, salt=request.cache_salt)

    def has_template(self, request: ChatCompletionRequest) -> bool:
        """Return whether there is a chat template: the request's, the server's or the model's."""
        front = self.engine_client.front
        if front.tokenizer is None:
            return False
        return bool(request.chat_template or _template(self.engine_client))

    def template_knows(self, variable: str) -> bool:
        """Return whether the model's chat template, or one of several, has a variable."""
        template = _template(self.engine_client)
        texts = [template] if isinstance(template, str) else (template or {}).values()
        return any(variable in text for text in texts)

    def _render_briefly(self, request: ChatCompletionRequest) -> ParsedPrompt | None:
        """Return the prompt; None if the template takes too long, though the conversation is short."""
        with contextlib.suppress(TemplateLimitError):
            return self._render_now(request, is_brief=True)

    def _variables(self, request: ChatCompletionRequest) -> dict[str, Any]:
        """Return the variables that the server and a request set in the chat template."""
        fields = {name: getattr(request, name) for name in ("documents", "reasoning_effort")}
        variables = {name: value for name, value in fields.items() if value is not None}
        if request.reasoning_effort is not None:
            variables["enable_thinking"] = request.reasoning_effort != "none"
        request_variables = request.chat_template_kwargs or {}
        return {**self.args.default_chat_template_kwargs, **variables, **request_variables}

    def _render_now(self, request: ChatCompletionRequest, *, is_brief: bool = False) -> ParsedPrompt:
        hides_tools = request.tool_choice == "none" and self.args.exclude_tools_when_tool_choice_none
        return self.engine_client.front.chat_renderer.render(
            request.messages,
            "messages",
            tools=None if hides_tools else request.tools or None,
            chat_template=request.chat_template,
            content_format=self.args.chat_template_content_format,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            chat_template_kwargs=self._variables(request),
            mm_processor_kwargs=request.mm_processor_kwargs,
            media_io_kwargs=request.media_io_kwargs,
            is_brief=is_brief,
        )

    def check_top_logprobs(self, num_top: int | None) -> None:
        """Check how many likely tokens a request wants to see at each token. Raises VLLMValidationError."""
        config = self.engine_client.model_config
        if num_top is not None:
            low = -1 if config.max_logprobs >= config.get_vocab_size() else 0
            check_int("top_logprobs", num_top, low, config.max_logprobs)

    def _role(self, request: ChatCompletionRequest) -> str:
        if request.add_generation_prompt or not request.messages:
            return self.args.response_role
        return str(request.messages[-1].get("role"))

    async def _response(
        self, request: ChatCompletionRequest, start: _Start, output: RequestOutput, reader: AnswerReader
    ) -> ChatCompletionResponse:
        prompt_ids = output.prompt_token_ids or []
        details = PromptTokensDetails.of(output) if self.args.enable_prompt_tokens_details else None
        choices = [self.choice(request, each, reader) for each in output.outputs]
        num_tokens = sum(len(each.token_ids) for each in output.outputs)
        return ChatCompletionResponse(
            id=start.id,
            created=start.created,
            model=start.model,
            choices=choices,
            usage=make_usage(len(prompt_ids), num_tokens, details, await reader.num_reasoning_tokens()),
            prompt_logprobs=prompt_logprobs(output.prompt_logprobs),
            prompt_token_ids=prompt_ids if request.return_token_ids else None,
            prompt_text=output.prompt if request.return_prompt_text else None,
        )

    def choice(
        self, request: ChatCompletionRequest, output: CompletionOutput, reader: AnswerReader
    ) -> ChatCompletionResponseChoice:
        """Return an answer that has ended, which `reader` has not read before."""
        role, parsed = self._role(request), gather(reader.pieces(output))
        text, reasoning = request.echoed(role) + parsed.text, parsed.reasoning or None
        calls = [
            ToolCallMessage(id=each.id, function=FunctionCall(name=each.name, arguments=each.arguments))
            for each in parsed.calls
        ]
        logprobs = None
        if request.logprobs and output.logprobs is not None:
            as_ids = request.shows_token_ids(self.args.return_tokens_as_token_ids)
            logprobs = chat_logprobs(output.token_ids, output.logprobs, request.num_logprobs, as_token_ids=as_ids)
        return ChatCompletionResponseChoice(
            index=output.index,
            message=ChatMessage(
                role=role,
                content=text if text or not (calls or reasoning) else None,
                reasoning=reasoning,
                reasoning_content=reasoning,
                tool_calls=calls or UNSET,
            ),
            logprobs=logprobs,
            finish_reason=reader.finish_reason(output),
            stop_reason=output.stop_reason,
            token_ids=list(output.token_ids) if request.return_token_ids else None,
        )


class _Start(NamedTuple):
    """The fields that an answer and each of its events begin with."""

    id: str
    created: int
    model: str
    role: str


def _template(engine_client: AsyncLLM) -> str | Mapping[str, str] | None:
    """Return an engine's chat template, several by name, or None."""
    front = engine_client.front
    return front.ready.chat_template or (front.tokenizer and front.tokenizer.parts.chat_template)


def _is_long(request: ChatCompletionRequest) -> bool:
    """Return whether rendering may take long: anything but plain text counts as long."""
    if request.chat_template or request.chat_template_kwargs or request.documents or request.tools:
        return True
    total = 0
    for message in request.messages:
        content = message.get("content")
        if not isinstance(content, str) or len(message) > 2:
            return True
        total += len(content)
    return total > LONG
