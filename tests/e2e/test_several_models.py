"""Several tiny models in one server, each in a process of its own: HF's tokens, whichever was loaded before."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
import pytest

from tests.models.tiny import Golden, folder, read_goldens
from tests.server.models.support import several_served
from tests.server.support import Answer, Served

pytestmark = pytest.mark.server

CASES = ("llama3_tied", "qwen3", "gemma3")
NUM_TOKENS = 8
LOAD_SECONDS = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Return a server of three models, two of them at a time."""
    models = {
        case: {
            "model": str(folder(case)),
            "dtype": "float32",
            "skip-tokenizer-init": True,
            "block-size": 16,
            "max-num-batched-tokens": 64,
            "max-num-seqs": 16,
            "enforce-eager": True,
            "kv-cache-memory-bytes": 2**22,
        }
        for case in CASES
    }
    path = tmp_path_factory.mktemp("several") / "models.yaml"
    with several_served(path, models, "--max-loaded-models", "2") as served:
        yield served


def ask(server: Served, case: str, golden: Golden) -> Answer:
    """Return the answer to a golden's prompt."""
    body = {"model": case, "prompt": golden.prompt.tolist(), "temperature": 0, "max_tokens": NUM_TOKENS}
    body |= {"ignore_eos": True, "return_token_ids": True, "detokenize": False}
    return server.ask("POST", "/v1/completions", body, seconds=LOAD_SECONDS)


def tokens(answer: Answer) -> list[int]:
    """Return the tokens of an answer."""
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["token_ids"]


def test_each_request_gets_the_tokens_of_its_model(server: Served) -> None:
    """Six requests come at once for three models; two fit."""
    jobs = [(case, golden) for case in CASES for golden in read_goldens(case)[:2]]
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = list(pool.map(lambda job: ask(server, *job), jobs))
    assert [tokens(each) for each in answers] == [golden.tokens[:NUM_TOKENS].tolist() for _, golden in jobs]
    states = {card["id"]: card["status"] for card in server.get("/v1/models").json["data"]}
    assert sorted(states.values()).count("ready") <= 2
    assert len([child for child in psutil.Process().children() if is_core(child)]) <= 3  # with the server of forks


def test_a_core_that_is_killed_while_it_loads_is_loaded_again(server: Served) -> None:
    case = next(card["id"] for card in server.get("/v1/models").json["data"] if card["status"] != "ready")
    golden = read_goldens(case)[0]
    before = {child.pid for child in psutil.Process().children()}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, server, case, golden)
        os.kill(new_core(before, waiting), signal.SIGKILL)
        refused = waiting.result()
    assert refused.status == 503
    assert f"`{case}` cannot be loaded" in refused.json["error"]["message"]
    other = next(each for each in CASES if each != case)
    assert tokens(ask(server, other, read_goldens(other)[0])) == read_goldens(other)[0].tokens[:NUM_TOKENS].tolist()
    while (answer := ask(server, case, golden)).status == 503:
        time.sleep(0.2)
    assert tokens(answer) == golden.tokens[:NUM_TOKENS].tolist()


def is_core(process: psutil.Process) -> bool:
    """Return whether a process is an engine's core, or the one that cores are forked from: both have one name."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(name in word for word in process.cmdline() for name in ("core_process", "fork_server"))
    return False


def new_core(before: set[int], waiting: Future[Answer]) -> int:
    """Return the id of the core that has been started since."""
    while not waiting.done():
        for child in psutil.Process().children():
            if child.pid not in before and is_core(child):
                return child.pid
    raise AssertionError(f"no core was started: {waiting.result()}")
