"""The grammar compiler compiles once, keeps up to a number of bytes, and gives up calls that are late."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxllm.constraints import workers
from jaxllm.constraints.compiler import GrammarCompiler
from jaxllm.constraints.workers import MAX_ABANDONED, BigStackThread, DeadlineThread
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.structured_outputs import StructuredOutputsParams
from tests.constraints.grammar_walks import make_compiler, smollm2_tokenizer

pytestmark = pytest.mark.constraints


def test_the_cache_is_bounded_in_bytes(smollm2_path: str):
    compiler = make_compiler(smollm2_path, cache_bytes=5_000_000)
    most = 0
    for number in range(300):
        compiler.check(StructuredOutputsParams(regex=f"a{{{number}}}"))
        most = max(most, compiler._cache.num_bytes)
    assert 4_000_000 < most <= 5_000_000
    last, first = StructuredOutputsParams(regex="a{299}"), StructuredOutputsParams(regex="a{0}b?")
    assert compiler.start(last).done()
    assert not compiler.start(first).done()


def test_what_grammars_take_is_counted(smollm2_path: str, tmp_path: Path, repository: Path):
    """Twenty short texts of large grammars stay within the bound of the cache."""
    program = """
import sys
from transformers import PreTrainedTokenizerFast
from jaxllm.constraints.compiler import _CACHE_BYTES, GrammarCompiler
from jaxllm.params.structured_outputs import StructuredOutputsParams
from jaxllm.text.tokenizer import Tokenizer

def resident_bytes():
    with open("/proc/self/statm") as file:
        return 4096 * int(file.read().split()[1])

tokenizer = Tokenizer.of(PreTrainedTokenizerFast(tokenizer_file=sys.argv[1]))
compiler = GrammarCompiler(tokenizer, 49_152, [2], deadline_seconds=60)
compiler.check(StructuredOutputsParams(regex="a"))
before = resident_bytes()
for number in range(20):
    compiler.check(StructuredOutputsParams(regex=f"(abc){{{20_000 + number}}}"))
print((resident_bytes() - before) / _CACHE_BYTES)
"""
    smollm2_tokenizer(smollm2_path).backend.save(str(tmp_path / "tokenizer.json"))
    command = [sys.executable, "-c", program, str(tmp_path / "tokenizer.json")]
    done = subprocess.run(command, check=False, cwd=repository, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert 0.2 < float(done.stdout) < 1.5  # what was freed is not all given back


def test_a_grammar_larger_than_the_cache_is_kept_alone(smollm2_path: str):
    compiler = make_compiler(smollm2_path, cache_bytes=5_000_000)
    small, large = StructuredOutputsParams(regex="a"), StructuredOutputsParams(regex="a{20000}")
    compiler.check(small)
    compiler.check(large)
    assert compiler.start(large).done()
    assert not compiler.start(small).done()


def test_equal_params_share_one_grammar(smollm2_path: str):
    compiler = make_compiler(smollm2_path)
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    futures = [compiler.start(StructuredOutputsParams(json=dict(schema))) for _ in range(5)]
    assert len(set(map(id, futures))) == 1
    assert not futures[0].cancel()
    grammar = futures[0].result()
    assert compiler.start(StructuredOutputsParams(json=schema)).result() is grammar
    assert compiler.start(StructuredOutputsParams(json=schema, disable_any_whitespace=True)).result() is not grammar


def test_a_late_grammar_is_refused(smollm2_path: str):
    compiler = make_compiler(smollm2_path, deadline_seconds=1e-4)
    choices = StructuredOutputsParams(choice=[f"choice {number}" for number in range(3000)])
    with pytest.raises(VLLMValidationError, match=r"did not compile in 0\.0001 s") as raised:
        compiler.check(choices)
    assert raised.value.parameter == "choice"


@pytest.mark.parametrize("name", ["jaxllm-grammars", "jaxllm-grammars-deadlines"])
def test_nobody_waits_for_a_thread_that_cannot_start(smollm2_path: str, monkeypatch: pytest.MonkeyPatch, name: str):
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    compiler, params = make_compiler(smollm2_path), StructuredOutputsParams(regex="a")
    before = list(workers._THREADS.calls)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        for _ in range(2):
            with pytest.raises(VLLMValidationError, match="limits of memory and threads"):
                compiler.check(params, 60)
        assert all(thread in before or thread.is_alive() for thread in workers._THREADS.calls), (
            "the exit could not join it"
        )
    compiler.check(params)


def test_an_unusable_tokenizer_is_refused(smollm2_path: str):
    compiler = GrammarCompiler(smollm2_tokenizer(smollm2_path), 49_152, [2**30])
    for _ in range(2):
        with pytest.raises(VLLMValidationError, match="tokenizer"):
            compiler.check(StructuredOutputsParams(regex="a"))


def test_late_calls_are_abandoned_up_to_a_bound():
    stop = threading.Event()
    thread = DeadlineThread("test-deadlines")
    late = [thread.submit(stop.wait, 0.02, "too late") for _ in range(MAX_ABANDONED)]
    for future in late:
        with pytest.raises(TimeoutError, match="too late"):
            future.result(10)
    with pytest.raises(TimeoutError, match="past their deadline"):
        thread.submit(lambda: 1, 1.0, "").result(10)
    stop.set()
    deadline = time.monotonic() + 10
    while True:  # the abandoned threads end in their own time
        try:
            assert thread.submit(lambda: 2, 1.0, "").result(10) == 2
            break
        except TimeoutError:
            assert time.monotonic() < deadline


def test_a_timeout_inside_a_call_is_not_lateness():
    def fail() -> None:
        raise TimeoutError("inner")

    thread = DeadlineThread("test-deadlines")
    for _ in range(MAX_ABANDONED + 2):
        with pytest.raises(TimeoutError, match="inner"):
            thread.submit(fail, 5.0, "late").result(10)


def test_the_stack_is_deep_and_others_stay_as_they_were():
    before = threading.stack_size()

    def depth(levels: int) -> int:
        return 0 if levels == 0 else 1 + max(map(depth, [levels - 1]))  # through C at each level

    assert BigStackThread("test-stack").submit(lambda: depth(300)).result(10) == 300
    assert threading.stack_size() == before


def test_threads_end_with_their_owner(smollm2_path: str):
    before = set(threading.enumerate())
    compiler = make_compiler(smollm2_path)
    compiler.check(StructuredOutputsParams(regex="a"))
    compiler.submit(int).result()
    started = set(threading.enumerate()) - before
    assert {thread.name for thread in started} == {"jaxllm-grammars-deadlines", "jaxllm-grammars", "jaxllm-matchers"}
    assert all(thread.daemon for thread in started)
    del compiler
    gc.collect()
    for thread in started:
        thread.join(10)
        assert not thread.is_alive()


def test_a_process_can_end_while_grammars_compile(repository: Path):
    program = """
import time
from llguidance import LLMatcher, LLTokenizer
from jaxllm.constraints.workers import DeadlineThread
tokenizer = LLTokenizer("byte")
text = LLMatcher.grammar_from_lark("start: A\\nA: " + " | ".join(f'"value {i}"' for i in range(3000)))
thread = DeadlineThread("grammars")
for _ in range(100):
    thread.submit(lambda: LLMatcher(tokenizer, text), 5.0, "late")
time.sleep(0.2)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, cwd=repository, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
