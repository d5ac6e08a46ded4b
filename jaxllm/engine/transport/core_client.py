"""What a front end can ask of an engine core, wherever it runs, and the client that asks one in its own thread."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from jaxllm.core_messages import EngineCoreOutputs, EngineCoreRequest, RequestError
from jaxllm.lora.request import LoRARequest
from jaxllm.sampling_params import SamplingParams


class Programs(NamedTuple):
    """How far a core has compiled its programs."""

    num_compiled: int
    """How many were compiled since its start, those found on disk not counted."""
    is_warm: bool
    """True once all are compiled; before, a step may have to wait for one."""


class Core(Protocol):
    """What an engine core does, wherever it runs."""

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request; one that the core refuses ends with an output that says why."""
        ...

    def check(self, params: SamplingParams, seconds: float | None = None) -> None:
        """Raise VLLMValidationError for params that the core would refuse.

        A grammar that has not compiled after `seconds` passes; None waits to its deadline.
        """
        ...

    def abort_requests(self, sequence_ids: Iterable[str]) -> None:
        """End sequences and free their blocks at once; unknown ids are ignored."""
        ...

    def release(self, sequence_ids: Iterable[str]) -> None:
        """Give up the blocks that ended sequences have kept for forks; unknown ids are ignored."""
        ...

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes; False when blocks are in use, unless running requests are to give theirs up."""
        ...

    def add_lora(self, request: LoRARequest) -> bool:
        """Load an adapter, if it is not there, and wait for it; return True. Raises VLLMValidationError for a bad one,
        or if there are none here.
        """
        ...

    def remove_lora(self, adapter_id: int) -> bool:
        """Forget an adapter, with which running requests go on; return False for an unknown id."""
        ...

    def list_loras(self) -> list[int]:
        """Return the ids of the adapters that are there."""
        ...

    def pin_lora(self, adapter_id: int) -> bool:
        """Keep an adapter until it is removed; return False for an unknown id."""
        ...

    def warm_up(self) -> None:
        """Wait until every program is compiled."""
        ...

    def start_profile(self, prefix: str | None, delay_iterations: int | None, max_iterations: int | None) -> None:
        """Record what host and devices do until `stop_profile`; what is None is as profiler_config says."""
        ...

    def stop_profile(self) -> None:
        """End the recording and write it to the folder of profiler_config."""
        ...

    def shutdown(self) -> None:
        """Release the device; may be called twice."""
        ...

    def drop(self) -> None:
        """Do as `shutdown` does for a garbage collection, which may run in a thread that this would wait for: a wait
        has a limit.
        """
        ...


class CoreClient(Core, Protocol):
    """A core, or several that are replicas of one another, as the front end sees them."""

    def programs(self) -> list[Programs]:
        """Return how far each replica's programs are compiled; a core alone is one replica."""
        ...

    def step(self, *, wait: bool) -> EngineCoreOutputs | None:
        """Return the outcome of a step; None if there is nothing to do, or without `wait` if none has come."""
        ...


class RunnableCore(Core, Protocol):
    """A core as the one who runs it sees it: `EngineCore`, or one without a model."""

    @property
    def is_warm(self) -> bool:
        """Say, to any thread, whether every program is compiled."""
        ...

    @property
    def num_compiled(self) -> int:
        """Return, to any thread, how many programs were compiled since the start, those found on disk not counted."""
        ...

    @property
    def is_compiling(self) -> bool:
        """Say, to any thread, whether a step waits for its program to be compiled."""
        ...

    def has_unfinished_requests(self) -> bool:
        """Say whether a step has something to do."""
        ...

    def num_computed_tokens(self, sequence_id: str) -> int:
        """Return how many of a sequence's tokens are computed; 0 unless it runs."""
        ...

    def fail(self, sequence_id: str, error: RequestError) -> None:
        """End a sequence with an error, whether or not the core has it; the next `step` reports it."""
        ...

    def step(self) -> EngineCoreOutputs:
        """Do one step and return its outcome."""
        ...


class InprocClient:
    """A client that calls an engine core in the same process and thread."""

    def __init__(self, core: RunnableCore) -> None:
        self._core = core

    def programs(self) -> list[Programs]:
        """Return how far the core's programs are compiled."""
        return [Programs(self._core.num_compiled, self._core.is_warm)]

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request; one that the core refuses ends with an output that says why."""
        self._core.add_request(request)

    def check(self, params: SamplingParams, seconds: float | None = None) -> None:
        """Raise VLLMValidationError for params that the core would refuse."""
        self._core.check(params, seconds)

    def abort_requests(self, sequence_ids: Iterable[str]) -> None:
        """End sequences and free their blocks at once; unknown ids are ignored."""
        self._core.abort_requests(list(sequence_ids))

    def release(self, sequence_ids: Iterable[str]) -> None:
        """Give up the blocks that ended sequences have kept for forks; unknown ids are ignored."""
        self._core.release(list(sequence_ids))

    def step(self, *, wait: bool) -> EngineCoreOutputs | None:
        """Do one step, whether or not anyone waits for it; None if there is nothing to do."""
        del wait
        return self._core.step() if self._core.has_unfinished_requests() else None

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes; False when blocks are in use, unless running requests are to give theirs up."""
        return self._core.reset_prefix_cache(reset_running_requests)

    def add_lora(self, request: LoRARequest) -> bool:
        """Load an adapter and wait for it."""
        return self._core.add_lora(request)

    def remove_lora(self, adapter_id: int) -> bool:
        """Forget an adapter; return False for an unknown id."""
        return self._core.remove_lora(adapter_id)

    def list_loras(self) -> list[int]:
        """Return the ids of the adapters that are there."""
        return self._core.list_loras()

    def pin_lora(self, adapter_id: int) -> bool:
        """Keep an adapter until it is removed; return False for an unknown id."""
        return self._core.pin_lora(adapter_id)

    def warm_up(self) -> None:
        """Wait until every program is compiled."""
        self._core.warm_up()

    def start_profile(self, prefix: str | None, delay_iterations: int | None, max_iterations: int | None) -> None:
        """Record what host and devices do until `stop_profile`; what is None is as profiler_config says."""
        self._core.start_profile(prefix, delay_iterations, max_iterations)

    def stop_profile(self) -> None:
        """End the recording and write it to the folder of profiler_config."""
        self._core.stop_profile()

    def shutdown(self) -> None:
        """Release the device; may be called twice."""
        self._core.shutdown()

    def drop(self) -> None:
        """Release the device without waiting for what is being compiled."""
        self._core.drop()
