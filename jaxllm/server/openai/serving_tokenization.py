"""Serve tokenization and detokenization."""

from __future__ import annotations

from http import HTTPStatus

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.engine.online.prompt_encoding import encode_prompt
from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.http.errors import RequestFailedError
from jaxllm.server.openai.serving_chat import OpenAIServingChat
from jaxllm.server.openai.tokenization_protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from jaxllm.text.prompts import ParsedPrompt
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.utils.async_utils import threaded_if_long

_MAX_IDS = 2**20
"""The maximum number of ids of a request, more than any context has."""


class OpenAIServingTokenization:
    """Converts texts to token ids and back."""

    def __init__(self, chat: OpenAIServingChat, args: ServerArgs) -> None:
        """Render conversations as `chat` does, with its engine's tokenizer."""
        self._chat, self._front, self._args = chat, chat.engine_client.front, args

    async def tokenize(self, request: TokenizeRequest) -> TokenizeResponse:
        """Return the ids of a text or of a conversation. Raises VLLMValidationError."""
        self._chat.models.check(request.model)
        request.check()
        tokenizer = self._front.require_tokenizer()
        chat = request.chat()
        with chat.fields_named("prompt" if request.messages is None else "messages"):
            if request.prompt is None:
                chat.check(trusts_template=self._args.trust_request_chat_template)
                chat.tool_use()  # check for the same errors as chat
                prompt = await self._chat.render(chat)
            else:
                prompt = ParsedPrompt(request.prompt)
            ids = await self._encode(tokenizer, prompt, request.add_special_tokens)
        max_model_len = self._chat.engine_client.model_config.max_model_len
        strings = None
        if request.return_token_strs:
            strings = await threaded_if_long(len(ids), lambda: list(map(tokenizer.token_string, ids)))
        return TokenizeResponse(count=len(ids), max_model_len=max_model_len, tokens=ids, token_strs=strings)

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse:
        """Return the text of ids. Raises VLLMValidationError for an id without a token."""
        self._chat.models.check(request.model)
        tokenizer, ids = self._front.require_tokenizer(), request.tokens
        if len(ids) > _MAX_IDS:
            message = f"tokens must have at most {_MAX_IDS} entries, got {len(ids)}."
            raise VLLMValidationError(message, parameter="tokens", value=len(ids))
        vocab_size = self._chat.engine_client.model_config.get_vocab_size()
        bad = next((each for each in ids if not 0 <= each < vocab_size), None)
        if bad is not None:
            message = f"tokens must be at least 0 and less than {vocab_size}, got {bad}."
            raise VLLMValidationError(message, parameter="tokens", value=bad)
        decode = tokenizer.decode
        return DetokenizeResponse(
            prompt=await threaded_if_long(len(ids), lambda: decode(ids, skip_special_tokens=False))
        )

    def info(self) -> TokenizerInfo:
        """Return the tokenizer's configuration. Raises RequestFailedError, 404, unless the server allows it."""
        if not self._args.enable_tokenizer_info_endpoint:
            message = "The tokenizer is not shown: start the server with --enable-tokenizer-info-endpoint."
            raise RequestFailedError(HTTPStatus.NOT_FOUND, message)
        tokenizer = self._front.require_tokenizer()
        special = tokenizer.parts.special_tokens
        return TokenizerInfo(
            vocab_size=tokenizer.backend.get_vocab_size(),
            eos_token_id=tokenizer.eos_token_id,
            **{name: special.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")},
            added_tokens=tokenizer.added_tokens,
            truncation_side=tokenizer.parts.truncation_side,
            chat_template=self._front.ready.chat_template or tokenizer.parts.chat_template,
        )

    async def _encode(self, tokenizer: Tokenizer, prompt: ParsedPrompt, adds_special_tokens: bool | None) -> list[int]:
        if not prompt.text:  # the engine refuses a prompt without tokens
            return tokenizer.encode([""], add_special_tokens=adds_special_tokens is not False)[0]
        how = {} if adds_special_tokens is None else {"add_special_tokens": adds_special_tokens}
        return (await encode_prompt(self._front.inputs, prompt, how)).token_ids
