"""The process of a core, tested without starting one."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import msgspec

from jaxllm.engine.core.core_process import StartOrder
from jaxllm.engine.transport.sockets import Addresses
from jaxllm.usage.usage_lib import UsageContext

SAY_WHAT_IS_FROZEN = """
import gc
from jaxllm.engine.core import core_process

def run_core(start, addresses, context):
    print(gc.get_freeze_count())
    core, _ = start(None)
    print(gc.get_freeze_count())
    print(any(each is core for each in gc.get_objects()))
    return 0

core_process.run_core = run_core
core_process.serve(lambda engine_args, usage_context, on_tokenizer: ([engine_args], None))
"""


def test_garbage_collection_does_not_look_at_what_the_start_has_made() -> None:
    addresses, use = Addresses("inproc://to", "inproc://from"), UsageContext.LLM_CLASS
    order = StartOrder({"model": "m"}, use, addresses, sys.path, logging.WARNING, os.getpid(), 0, None)
    command = [sys.executable, "-c", SAY_WHAT_IS_FROZEN]
    said = subprocess.run(command, input=msgspec.json.encode(order), capture_output=True, check=True).stdout
    before, after, is_looked_at = said.split()
    assert int(after) > int(before) + 10_000
    assert is_looked_at == b"False"
