"""Compile in this process, so that the calling process needs no compiler, environment or device."""

from __future__ import annotations

import sys

from jaxllm.check.examine import examine
from jaxllm.check.process import Request
from jaxllm.check.report import Report
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.utils.child_process import reply
from jaxllm.utils.log import show_log


def main() -> int:
    """Answer one request; the error of a program that does not compile is raised, for the calling process to show."""
    show_log()
    return reply(Request, _examine)


def _examine(request: Request) -> Report:
    return examine(EngineArgs(**request.engine_args), request.topology)


if __name__ == "__main__":
    sys.exit(main())
