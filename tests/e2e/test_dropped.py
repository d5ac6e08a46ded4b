"""An engine without references ends, whichever thread collects it."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest

from jaxllm import LLM
from jaxllm.execution.programs.cache import ProgramCache
from tests.e2e.inside import core_of
from tests.models.tiny import folder

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quick_compile")]


def test_found_by_the_thread_that_compiles_its_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace makes much garbage, so that Python often looks for cycles in it: nothing may wait there for its end."""
    is_dropped, is_collected = threading.Event(), threading.Event()
    compile_one, compiled = ProgramCache.compile, list[Any]()

    def compile_and_collect(cache: ProgramCache, key: Any) -> Any:
        compiled.append(key)
        if threading.current_thread().name == "jaxllm-compile" and len(compiled) > 1:
            assert is_dropped.wait(60)
            gc.collect()
            is_collected.set()
        return compile_one(cache, key)

    monkeypatch.setattr(ProgramCache, "compile", compile_and_collect)
    monkeypatch.setattr(ProgramCache, "load", lambda *_: None)
    few: dict[str, Any] = {"max_model_len": 32, "max_num_batched_tokens": 32, "max_num_seqs": 8}
    llm = LLM(str(folder("llama3_tied")), dtype="float32", skip_tokenizer_init=True, **few)
    core = weakref.ref(core_of(llm))
    vars(llm)["cycle"] = llm
    gc.disable()
    try:
        del llm
        is_dropped.set()
        assert is_collected.wait(60)
    finally:
        gc.enable()
    assert core() is None
