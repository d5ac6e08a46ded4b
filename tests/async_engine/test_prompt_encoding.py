"""Prompts are encoded beside the event loop where they take long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

from jaxllm.engine.front.prompt_encoder import EncodedPrompt
from jaxllm.engine.online.prompt_encoding import encode_prompt
from jaxllm.utils.async_utils import LONG

ENCODED = EncodedPrompt([1], None, None)
PICTURE = {"prompt": "a", "multi_modal_data": {"image": "https://a.example/a.png"}}


class Encoder:
    """Notes its threads, and waits for the event loop where that is asked of it."""

    def __init__(self, *, waits: bool = False) -> None:
        self.threads: list[str] = []
        self.was_called, self.may_end = threading.Event(), threading.Event()
        if not waits:
            self.may_end.set()

    def encode(
        self, prompt: Any, tokenization_kwargs: Mapping[str, Any] | None = None, *, pools: bool = False
    ) -> EncodedPrompt:
        del prompt, tokenization_kwargs, pools
        self.threads.append(threading.current_thread().name)
        self.was_called.set()
        assert self.may_end.wait(10), "the event loop waits for a prompt"
        return ENCODED


def test_the_loop_goes_on_while_a_short_prompt_waits_for_its_picture() -> None:
    encoder = Encoder(waits=True)

    async def run() -> None:
        encoding = asyncio.create_task(encode_prompt(encoder, PICTURE))
        while not encoder.was_called.is_set():
            await asyncio.sleep(0)
        encoder.may_end.set()
        assert await encoding == ENCODED

    asyncio.run(run())
    assert encoder.threads[0].startswith("jaxllm-media-prompt")


def test_texts_take_a_thread_only_if_they_are_long_and_never_one_of_pictures() -> None:
    encoder = Encoder()

    async def run() -> None:
        await encode_prompt(encoder, "short")
        await encode_prompt(encoder, "x" * (LONG + 1))
        assert await encode_prompt(encoder, ENCODED) is ENCODED

    asyncio.run(run())
    short, long = encoder.threads
    assert short == threading.current_thread().name
    assert long != short
    assert not long.startswith("jaxllm-media-prompt")
