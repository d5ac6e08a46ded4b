"""Start the two halves of an engine: the core in this thread, another thread or processes, and its front end."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import zmq

from jaxllm.config.environment import default_cache_dir
from jaxllm.engine.client.in_process import InprocClient
from jaxllm.engine.core.engine_tokenizer import load_engine_tokenizer
from jaxllm.engine.front.front_end import FrontEnd
from jaxllm.exceptions import VLLMValidationError
from jaxllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from jaxllm.engine.client.fork_server import ForkServer
    from jaxllm.engine.client.remote_client import RemoteClient
    from jaxllm.engine.client.remote_core import RemoteCore
    from jaxllm.resolve.engine_args import EngineArgs
    from jaxllm.usage.usage_lib import UsageContext


def start_in_place(engine_args: EngineArgs, usage_context: UsageContext) -> tuple[InprocClient, FrontEnd]:
    """Start a core that does its steps when it is called; the front end shares its tokenizer."""
    from jaxllm.engine.core.startup import start_core  # imports JAX

    follow_if_not_first(engine_args, usage_context)
    tokenizers: list[Tokenizer | None] = []
    core, ready = start_core(engine_args, usage_context, tokenizers.append)
    return InprocClient(core), FrontEnd(ready, tokenizers[0], core.check)


def start_in_process(
    engine_args: EngineArgs, usage_context: UsageContext, *, asks_core: bool = True, command: Sequence[str] = ()
) -> tuple[RemoteClient, FrontEnd]:
    """Start a core in a process of its own, or as a Ray actor, or data_parallel_size of them.

    This process loads neither JAX nor transformers.

    With `asks_core` the front end asks the core about a request with a grammar, and waits until it is accepted.
    `command` is another program to run as a core; see `CoreProcess`.
    """
    return meet(start_processes(engine_args, usage_context, command), engine_args, asks_core=asks_core)


def start_processes(
    engine_args: EngineArgs,
    usage_context: UsageContext,
    command: Sequence[str] = (),
    forks: ForkServer | None = None,
) -> RemoteClient:
    """Begin to start a core, or data_parallel_size of them, as `start_in_process` does, and return their client.

    They are forks of the server `forks`, if there is one.
    """
    from jaxllm.engine.client.remote_core import RemoteCore
    from jaxllm.engine.client.replicated_core import ReplicatedCore

    follow_if_not_first(engine_args, usage_context)

    def start(replica: int | None = None) -> RemoteCore:
        if uses_ray(engine_args):
            from jaxllm.engine.client.core_actor import CoreActor  # imports Ray

            return RemoteCore(CoreActor(engine_args, usage_context, replica), zmq.Context())
        return RemoteCore.in_process(engine_args, usage_context, command, replica=replica, forks=forks)

    count = engine_args.data_parallel_size
    return start() if count == 1 else ReplicatedCore(start, count)


def uses_ray(engine_args: EngineArgs) -> bool:
    """Return whether cores are actors of a Ray cluster.

    Raises VLLMValidationError if Ray is missing, or cannot start the hosts that the arguments ask for.
    """
    names = ("distributed_executor_backend", "data_parallel_backend")
    name = next((each for each in names if getattr(engine_args, each) == "ray"), None)
    if name is None:
        return False
    message, nnodes = None, engine_args.nnodes
    of_host = [each for each in ("node_rank", "master_addr", "master_port") if _is_set(engine_args, each)]
    if importlib.util.find_spec("ray") is None:
        message = "Ray is a package of its own: pip install 'jaxllm[ray]'."
    elif nnodes > 1 and of_host:
        message = f"Ray starts all hosts of a model and chooses {' and '.join(of_host)}: start one program, leave them "
        message += "out, and give nnodes as a number."
    elif nnodes > 1 and engine_args.data_parallel_size > 1:
        message = "replicas of a model over several hosts are not supported: start them by themselves."
    elif engine_args.tensor_parallel_size % nnodes:
        size = engine_args.tensor_parallel_size
        message = f"nnodes={nnodes} does not divide tensor_parallel_size={size}, the devices of all hosts."
    if message is not None:
        raise VLLMValidationError(message, parameter=name, value="ray")
    return True


def _is_set(engine_args: EngineArgs, name: str) -> bool:
    return getattr(engine_args, name) != getattr(type(engine_args), name)


def start_in_thread(
    engine_args: EngineArgs, usage_context: UsageContext, *, asks_core: bool = True
) -> tuple[RemoteCore, FrontEnd]:
    """Start a core in a thread of this process; otherwise as `start_in_process`.

    Raises VLLMValidationError for several replicas, which take processes.
    """
    if engine_args.data_parallel_size > 1:
        message = "replicas run in processes of their own: leave disable_frontend_multiprocessing off."
        raise VLLMValidationError(message, parameter="data_parallel_size", value=engine_args.data_parallel_size)
    from jaxllm.engine.client.remote_core import RemoteCore
    from jaxllm.engine.core.startup import start_core  # imports JAX

    follow_if_not_first(engine_args, usage_context)
    core = RemoteCore.in_thread(lambda on_tokenizer: start_core(engine_args, usage_context, on_tokenizer))
    return meet(core, engine_args, asks_core=asks_core)


def follow_if_not_first(engine_args: EngineArgs, usage_context: UsageContext) -> None:
    """On a host other than a model's first one, follow the first until it ends, then end this process.

    Raises as `uses_ray` does.
    """
    if engine_args.node_rank > 0 and not uses_ray(engine_args):
        from jaxllm.engine.core.follower import follow

        follow(engine_args, usage_context)


def meet[C: RemoteClient](core: C, engine_args: EngineArgs, *, asks_core: bool) -> tuple[C, FrontEnd]:
    """Wait for a core that starts, and make its front end; the tokenizer is parsed while the core loads weights."""
    try:
        parts = core.wait_tokenizer()
        tokenizer = None
        if parts is not None:
            tokenizer = Tokenizer(parts, lambda: _load_hf(engine_args))
            _ = tokenizer.backend  # parsed now, so that the first request does not wait for it
        return core, FrontEnd(core.wait_ready(), tokenizer, core.check if asks_core else None)
    except BaseException:
        core.kill()
        raise


def _load_hf(engine_args: EngineArgs) -> PreTrainedTokenizerBase:
    """Load transformers' tokenizer anew, for a user who asks for it: the core has sent only its parts."""
    from jaxllm.loading.open import open_checkpoint

    checkpoint = open_checkpoint(
        engine_args.model,
        load_format=engine_args.load_format,
        revision=engine_args.revision,
        token=engine_args.hf_token,
        download_dir=engine_args.download_dir,
        sees=False,
    )
    tokenizer = load_engine_tokenizer(engine_args, checkpoint, default_cache_dir())
    assert tokenizer is not None
    return tokenizer.hf
