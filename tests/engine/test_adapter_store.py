"""The store of adapters gives no number twice, keeps needed adapters, evicts others and retries failed ones."""

from __future__ import annotations

import threading

import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.lora.request import LoRARequest
from jaxllm.lora.store import AdapterStore


def named(number: int, *, load_inplace: bool = False) -> LoRARequest:
    return LoRARequest(f"a{number}", number, f"/adapters/{number}", load_inplace=load_inplace)


class Loader:
    """Loads an adapter's path; those in `bad` fail."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.bad: set[str] = set()
        self.may_load = threading.Event()
        self.may_load.set()

    def __call__(self, request: LoRARequest) -> str:
        assert self.may_load.wait(10)
        self.loaded.append(request.lora_path)
        if request.lora_path in self.bad:
            raise VLLMValidationError("bad adapter", parameter="lora_request")
        return request.lora_path


def ready(store: AdapterStore, sequence_id: str) -> None:
    """Wait for a sequence's adapter."""
    while not store.is_ready(sequence_id):
        store.wait(1)


def test_sequences_wait_for_their_adapters():
    loader = Loader()
    loader.may_load.clear()
    store = AdapterStore(loader, 2)
    store.ask("a", named(1))
    store.ask("b", named(1))
    assert store.is_ready("none needed")
    assert not store.is_ready("a")
    loader.may_load.set()
    ready(store, "a")
    assert store.error("a") is None
    assert store.arrays(store.number_of("a")) == "/adapters/1"
    assert store.number_of("a") == store.number_of("b")
    assert loader.loaded == ["/adapters/1"]


def test_needed_ones_stay_and_the_ones_used_last():
    loader = Loader()
    store = AdapterStore(loader, 2)
    for number in (1, 2, 3):
        store.ask(str(number), named(number))
    ready(store, "3")
    assert store.ids() == {1, 2, 3}
    store.release(["1", "3", "unknown"])
    assert store.ids() == {2, 3}
    store.add(named(4))
    assert store.ids() == {2, 4}
    assert store.pin(4)
    assert not store.pin(3)
    store.release(["2"])
    store.add(named(5))
    assert store.ids() == {4, 5}
    store.add(named(1))
    assert store.ids() == {1, 4}
    assert loader.loaded == [f"/adapters/{number}" for number in (1, 2, 3, 4, 5, 1)]


def test_what_is_removed_or_read_again_goes_on_for_those_who_have_it():
    store = AdapterStore(Loader(), 4)
    store.ask("old", named(1))
    old = store.number_of("old")
    store.ask("new", named(1, load_inplace=True))
    new = store.number_of("new")
    assert old != new
    ready(store, "new")
    assert store.remove(1)
    assert not store.remove(1)
    assert store.ids() == set()
    assert store.arrays(old) == store.arrays(new) == "/adapters/1"
    store.release(["old", "new"])
    store.ask("again", named(1))
    assert store.number_of("again") not in (old, new)


def test_a_bad_one_is_tried_again():
    loader = Loader()
    loader.bad.add("/adapters/1")
    store = AdapterStore(loader, 4)
    store.ask("a", named(1))
    ready(store, "a")
    error = store.error("a")
    assert isinstance(error, VLLMValidationError)
    assert str(error) == "bad adapter"
    store.release(["a"])
    with pytest.raises(VLLMValidationError, match="bad adapter"):
        store.add(named(1))
    assert store.ids() == set()
    loader.bad.clear()
    store.add(named(1))
    assert store.ids() == {1}
