"""`AsyncEngineArgs`: the engine arguments, and the arguments of the asynchronous engine."""

# Fields are declared by calls that make dataclass fields, which ruff takes for shared default values.

from __future__ import annotations

import argparse
import dataclasses
import logging
from typing import Any, Self

from jaxllm.config.kinds import Integer, Number, Switch, Text, add_flags, argument
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import INT32_MAX
from jaxllm.resolve.engine_args import EngineArgs, refuse_headless

_GROUP = "AsyncEngineArgs"

logger = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True)
class AsyncEngineArgs(EngineArgs):
    """Engine arguments with those of the asynchronous engine, all vLLM's; the synchronous engine refuses the latter."""

    enable_log_requests: bool = argument(
        False, Switch(), _GROUP, "log each request's id and parameters; at level DEBUG its prompt too"
    )
    max_log_len: int | None = argument(
        None,
        Integer(0, INT32_MAX, optional=True, sized=True),
        _GROUP,
        "most characters, or token ids, of a prompt in the log",
    )
    log_config_file: str | None = argument(
        None,
        Text(),
        _GROUP,
        "JSON file that sets the log up, a server's own too, as Python's logging.config.dictConfig",
    )
    disable_log_requests: bool | None = argument(None, Switch(optional=True), _GROUP, argparse.SUPPRESS)
    max_num_queued_reqs: int | None = argument(
        None, Integer(1, INT32_MAX, optional=True), _GROUP, "most requests that wait or run, n counted as n"
    )
    max_num_queued_tokens: int | None = argument(
        None,
        Integer(1, 2**63 - 1, optional=True, sized=True),
        _GROUP,
        "most prompt tokens of requests that have no output yet",
    )
    max_ttft_ms: float | None = argument(
        None,
        Number(0.0, 8.64e7, above_low=True, optional=True),
        _GROUP,
        "refuse requests whose first token would come later than these milliseconds, by the speed of prompts lately",
    )

    shutdown_timeout: int = argument(
        0, Integer(0, INT32_MAX), _GROUP, "seconds that a server gives its requests to end by themselves when it ends"
    )

    def check(self) -> None:
        """Check and normalise every argument; `disable_log_requests`, the older name, becomes `enable_log_requests`."""
        super().check()
        if self.disable_log_requests is None:
            return
        if self.disable_log_requests and self.enable_log_requests:
            message = "enable_log_requests and disable_log_requests contradict each other; leave the latter out."
            raise VLLMValidationError(message, parameter="disable_log_requests", value=True)
        logger.warning("disable_log_requests is deprecated; use enable_log_requests, which is off by default")
        self.enable_log_requests, self.disable_log_requests = not self.disable_log_requests, None

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError for a name that is no argument, with a hint for parts of a configuration."""
        message = f"{type(self).__name__} has no {name!r}."
        if name.endswith("_config"):
            message += " An engine settles its configuration when it starts: see AsyncLLM.vllm_config."
        raise AttributeError(message)

    @classmethod
    def of(cls, engine_args: EngineArgs) -> Self:
        """Return engine arguments as asynchronous ones."""
        if isinstance(engine_args, cls):
            return engine_args
        return cls(**{field.name: getattr(engine_args, field.name) for field in dataclasses.fields(engine_args)})

    @classmethod
    def of_config(cls, vllm_config: Any, **changes: Any) -> Self:
        """Return a result of `create_engine_config` with the changes that are not None.

        Raises VLLMValidationError for another configuration.
        """
        if not isinstance(vllm_config, cls):
            message = (
                "vllm_config must be what AsyncEngineArgs(...).create_engine_config() returns, got "
                f"{type(vllm_config).__name__}: other configurations belong to an engine of this process."
            )
            raise VLLMValidationError(message, parameter="vllm_config", value=vllm_config)
        return dataclasses.replace(vllm_config, **{name: each for name, each in changes.items() if each is not None})

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser, async_args_only: bool = False) -> argparse.ArgumentParser:
        """Add a flag per argument; with `async_args_only`, only for arguments that `EngineArgs` refuses or lacks."""
        names = cls.__annotations__ if async_args_only else None
        add_flags(parser, tuple(field for field in dataclasses.fields(cls) if names is None or field.name in names))
        return parser

    def create_engine_config(  # type: ignore[override]
        self, usage_context: Any = None, headless: bool = False
    ) -> AsyncEngineArgs:
        """Return the arguments unchanged, for `AsyncLLM.from_vllm_config`: the engine's core resolves them.

        The settled configuration is `AsyncLLM.vllm_config`. Give `usage_context` to `from_vllm_config`: here it has no
        effect. `headless` is refused.
        """
        del usage_context
        refuse_headless(headless)
        return self
