"""Run a follower: a host without requests, which launches the steps that the first host sends."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, NoReturn

import jax
import msgspec

from jaxllm.engine.core.hosts.host_group import BEAT_SECONDS, REASON_SECONDS, SILENCE_SECONDS
from jaxllm.engine.core.hosts.join import join
from jaxllm.engine.core.hosts.link import Link
from jaxllm.engine.core.hosts.wire import Agreement, Beat, End, Failed, Message, Ready
from jaxllm.engine.core.startup import Prepared, agreement, make_launchers, prepare
from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.launcher import Launch, StepLaunch
from jaxllm.resolve.resolve_engine import resolve
from jaxllm.selfcheck.start import disproved_ops
from jaxllm.utils.log import show_log

if TYPE_CHECKING:
    from jaxllm.resolve.engine_args import EngineArgs
    from jaxllm.usage.usage_lib import UsageContext

logger = logging.getLogger(__name__)


def follow(engine_args: EngineArgs, usage_context: UsageContext) -> NoReturn:
    """Join the hosts of a model, launch what the first one sends until it is shut down, and end this process.

    The exit status is 0 after a shutdown, and 1 if this host or another one has failed. SIGTERM is ignored: the
    first host may have requests that it lets end first. `usage_context` is the first host's.
    """
    show_log()
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, lambda *_: logger.info("SIGTERM: this host ends when host 0 does"))
    [link] = join(engine_args)
    follower = _Follower(link)
    try:
        follower.run(engine_args, usage_context)
        logger.info("host %d of %d ends with the engine", engine_args.node_rank, engine_args.nnodes)
        jax.distributed.shutdown()  # host 0 does the same
    except BaseException as error:  # noqa: BLE001 (the process ends)
        follower.give_up(error)
    sys.exit(0)


class _Follower:
    def __init__(self, link: Link) -> None:
        self._link = link
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._heard = time.monotonic()
        self._is_over = threading.Event()
        for run in (self._listen, self._beat):
            threading.Thread(target=run, name=f"jaxllm-host{run.__name__}", daemon=True).start()

    def run(self, engine_args: EngineArgs, usage_context: UsageContext) -> None:
        config = resolve(engine_args, disproved=disproved_ops(engine_args), usage_context=usage_context)
        first = self._inbox.get()
        if isinstance(first, End):
            return
        assert isinstance(first, Agreement)
        config = dataclasses.replace(
            config,
            num_gpu_blocks_override=first.num_blocks,
            max_model_len=first.max_model_len,
            max_num_seqs=first.max_num_seqs,
            max_model_len_can_shrink=False,
            max_num_seqs_can_shrink=False,
        )
        self._serve(prepare(config), first)

    def _serve(self, prepared: Prepared, first: Agreement) -> None:
        _check(agreement(prepared).facts, first.facts)
        model, draft = make_launchers(prepared)
        self._link.send(Ready())
        while not isinstance(message := self._inbox.get(), End):
            assert isinstance(message, Launch)
            is_draft = isinstance(message, StepLaunch) and message.is_draft
            launcher = draft if is_draft else model
            assert launcher is not None
            launcher.launch(message)

    def give_up(self, error: BaseException) -> NoReturn:
        """End this process after an error; report the loss of another host if that caused it."""
        time.sleep(REASON_SECONDS)  # the listening thread may end the process meanwhile
        logger.critical("this host has failed", exc_info=error)
        with contextlib.suppress(OSError):
            self._link.send(Failed(f"{type(error).__name__}: {error}"))
        _exit()

    def _listen(self) -> None:
        """Receive in a thread of its own: a launch may wait for a host that is gone."""
        try:
            while True:
                message = self._link.receive()
                self._heard = time.monotonic()
                match message:
                    case Failed(why):
                        self._fail(why)
                    case Beat():
                        pass
                    case _:
                        self._inbox.put(message)
                        if isinstance(message, End):
                            self._is_over.set()
                            return
        except (EOFError, OSError):
            self._fail(f"{self._link}, which schedules, is lost: its process has ended.")
        except msgspec.MsgspecError as error:
            self._fail(f"what {self._link} says cannot be read ({error}): does it have another version?")

    def _beat(self) -> None:
        while not self._is_over.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):
                self._link.send(Beat())
            if time.monotonic() - self._heard > SILENCE_SECONDS:
                self._fail(f"{self._link}, which schedules, is lost: it has said nothing for {SILENCE_SECONDS:.0f} s.")

    def _fail(self, why: str) -> NoReturn:
        logger.critical("%s", why)
        _exit()


def _exit() -> NoReturn:
    """End at once: the main thread may wait for a device for ever, and JAX's exit hook for hosts that are gone."""
    logging.shutdown()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)


def _check(facts: dict[str, str], first: dict[str, str]) -> None:
    different = [name for name in first if facts.get(name) != first[name]]
    if different:
        message = f"this host differs from the first one in {', '.join(different)}: start all alike."
        raise VLLMValidationError(message, parameter="node_rank")
