"""Encode prompts for an event loop, which never waits for one that takes long."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from jaxllm.engine.front.prompt_encoder import EncodedPrompt
from jaxllm.utils.async_utils import threaded_if_long

_NUM_MEDIA_PROMPTS = 8
"""The most prompts with media that are read at once; others wait."""


class _Encoder(Protocol):
    """What encodes a prompt, as `InputProcessor` does."""

    def encode(
        self, prompt: Any, tokenization_kwargs: Mapping[str, Any] | None = None, *, pools: bool = False
    ) -> EncodedPrompt:
        """Check a prompt and tokenize it."""
        ...


async def encode_prompt(
    inputs: _Encoder, prompt: Any, options: Mapping[str, Any] | None = None, *, pools: bool = False
) -> EncodedPrompt:
    """Check a prompt and tokenize it, in a thread if it is long or has media; an encoded one is returned as it is.

    Raises what the encoder raises.
    """
    if isinstance(prompt, EncodedPrompt):
        return prompt
    if _has_media(prompt):
        return await in_media_thread(inputs.encode, prompt, options, pools=pools)
    return await threaded_if_long(len(_text(prompt)), inputs.encode, prompt, options, pools=pools)


async def in_media_thread[**P, T](function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that reads media, in one of a few threads for that."""
    call = functools.partial(function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_media_threads(), call)


@functools.cache
def _media_threads() -> ThreadPoolExecutor:
    """Return threads for prompts with media: they may wait for other hosts, and prompts of text must not."""
    return ThreadPoolExecutor(_NUM_MEDIA_PROMPTS, thread_name_prefix="jaxllm-media-prompt")


def _text(prompt: Any) -> str:
    """Return the text of a prompt, as far as it is one; whether the prompt is well formed is seen later."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else getattr(prompt, "text", prompt)
    pair = prompt.get("text_pair") if isinstance(prompt, Mapping) else None
    return (text if isinstance(text, str) else "") + (pair if isinstance(pair, str) else "")


def _has_media(prompt: Any) -> bool:
    if isinstance(prompt, Mapping):
        has_embeds = prompt.get("prompt_embeds") is not None
        return has_embeds or bool(prompt.get("multi_modal_data") or prompt.get("encoder_prompt"))
    return bool(getattr(prompt, "media", None)) or getattr(prompt, "sound", None) is not None
