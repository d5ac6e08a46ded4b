"""Gather the answers of all replicas to a call into one."""

from __future__ import annotations

from jaxllm.core_messages import RequestError
from jaxllm.engine.client.remote_core import RemoteCore
from jaxllm.engine.transport.core_client import CALLS
from jaxllm.engine.transport.wire import Reply


class GatheredCall:
    """The answers of replicas so far. A replica that has ended is not waited for."""

    def __init__(self, method: str) -> None:
        self.rule = CALLS[method]
        self._waiting: list[tuple[RemoteCore, int]] = []
        self._replies: list[Reply] = []

    def add(self, core: RemoteCore, call_id: int) -> None:
        """Wait for the answer to a call of one replica."""
        self._waiting.append((core, call_id))

    def take(self, call_id: int) -> Reply | None:
        """Return the one answer, under this id, once no replica is waited for: an error if one has failed."""
        waiting: list[tuple[RemoteCore, int]] = []
        for core, core_call_id in self._waiting:
            reply = core.take_reply(core_call_id)
            if reply is not None:
                self._replies.append(reply)
            elif core.dead_error is None:
                waiting.append((core, core_call_id))
        self._waiting = waiting
        if waiting:
            return None
        if not self._replies:
            return Reply(call_id, error=RequestError("internal", "no replica runs at the moment; one is started again"))
        error = next((reply.error for reply in self._replies if reply.error is not None), None)
        return Reply(call_id, None if error else self.rule.gather([reply.value for reply in self._replies]), error)

    def drop(self) -> None:
        """Stop waiting for answers."""
        for core, call_id in self._waiting:
            core.drop_reply(call_id)
