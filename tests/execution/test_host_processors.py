"""Logits processors that are classes: which request they have in which row, and what they do to its logits."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.host_processors import HostProcessors
from jaxllm.logits_processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    process_dict_updates,
)
from jaxllm.sampling.processors import load_processors, runs_last
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduling.plan import Chunk, Owner, StepPlan

VOCAB = 8


def chunk(
    request_id: str,
    count_row: int,
    prompt: list[int],
    outputs: list[int],
    num_tokens: int = 1,
    *,
    is_new: bool,
    drafts: Sequence[int] = (),
    **params: Any,
) -> Chunk:
    """Plan the last num_tokens tokens of a request, whose row of counts may be new, and drafts after them."""
    token_ids = array("i", prompt + outputs)
    return Chunk(
        owner=Owner(
            request_id=request_id,
            num_prompt_tokens=len(prompt),
            params=SamplingParams(**params),
            seed=0,
            count_row=count_row,
        ),
        start=len(token_ids) - num_tokens,
        token_ids=token_ids[-num_tokens:] + array("i", drafts),
        previous_row=None,
        block_ids=(array("i", [1]),),
        samples=True,
        num_output_tokens=len(outputs) + len(drafts),
        num_drafts=len(drafts),
        history=token_ids if is_new else None,
    )


def plan(*chunks: Chunk) -> StepPlan:
    return StepPlan(step_id=0, others=chunks, num_preempted=0)


class Recorder(LogitsProcessor):
    """Follows every update and, of each row, the token ids."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        assert (device, is_pin_memory) == ("cpu", False)
        vllm_config.append(self)
        self.updates: list[BatchUpdate | None] = []
        self.rows: dict[int, tuple[list[int] | None, list[int]]] = {}
        self.seen = np.zeros(0)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.updates.append(batch_update)
        process_dict_updates(self.rows, batch_update, lambda _params, prompt, outputs: (prompt, outputs))

    def apply(self, logits: np.ndarray) -> np.ndarray:
        self.seen = logits.copy()
        logits += 100
        return logits


def test_rows_follow_random_steps() -> None:
    """Whatever comes, goes, sits out and comes back, each row is one request's, and its outputs are complete."""
    rng = random.Random(0)
    recorders: list[Recorder] = []
    host = HostProcessors([Recorder], recorders)
    running: dict[int, tuple[str, list[int], list[int]]] = {}  # by row of the token counts
    num_moves = num_made = 0
    for _ in range(400):
        for key in [key for key in running if rng.random() < 0.2]:
            del running[key]
        new = [key for key in range(1, 7) if key not in running and rng.random() < 0.3]
        for key in new:  # one that was preempted comes back with outputs
            num_made += 1
            running[key] = (f"r{num_made}", [num_made, 7], [rng.randrange(9) for _ in range(rng.choice((0, 0, 3)))])
        chosen = [key for key in running if key in new or rng.random() < 0.9]
        rng.shuffle(chosen)
        if not chosen:
            continue
        chunks = [
            chunk(name, key, prompt, outputs, 2 if key in new else 1, is_new=key in new)
            for key, (name, prompt, outputs) in ((key, running[key]) for key in chosen)
        ]
        host.before_step(plan(*chunks))
        expected = {running[key][1][0]: running[key][2] for key in chosen}
        (recorder,) = recorders
        assert sorted(recorder.rows) == list(range(len(chosen)))
        assert {(prompt or [0])[0]: outputs for prompt, outputs in recorder.rows.values()} == expected
        update = recorder.updates[-1]
        if update is not None:
            assert update.batch_size == len(chosen)
            assert list(update.removed) == sorted(update.removed, reverse=True)
            num_moves += len(update.moved)
        logits_sv = np.zeros((8, VOCAB), np.float32)  # rows of prompt tokens and padding follow
        for row, key in enumerate(chosen):
            logits_sv[row] = running[key][1][0]
        edited_sv = host._apply_first(logits_sv)
        host.after_step()
        assert [row[0] for row in recorder.seen] == [recorder.rows[row][0][0] for row in range(len(chosen))]  # type: ignore[index]
        assert (edited_sv - logits_sv == np.where(np.arange(8) < len(chosen), 100, 0)[:, None]).all()
        for key in chosen:
            running[key][2].append(rng.randrange(9))
    assert num_moves > 20
    assert None in recorders[0].updates


class Walker(LogitsProcessor):
    """Adds a hash of the request's tokens to its logits, and asserts that it sees every position once, in turn."""

    def __init__(self, *_engine: Any) -> None:
        self.rows: dict[int, tuple[list[int], list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(
            self.rows, batch_update, lambda _, prompt, outputs: (prompt or [], outputs, [len(outputs) - 1])
        )

    def apply(self, logits: np.ndarray) -> np.ndarray:
        assert sorted(self.rows) == list(range(len(logits)))
        for row, (prompt, outputs, seen) in self.rows.items():
            seen[0] += 1
            assert seen[0] == len(outputs)
            logits[row] += mark([*prompt, *outputs])
        return logits


class LateWalker(Walker):
    """The same after the temperature."""

    def is_argmax_invariant(self) -> bool:
        return True


def mark(token_ids: list[int]) -> int:
    return sum((place + 1) * 31 * token_id for place, token_id in enumerate(token_ids)) % 8191


@pytest.mark.parametrize("classes", [[Walker], [LateWalker], [Walker, LateWalker, Walker]])
def test_drafts_are_steps_in_turn(classes: list[type[LogitsProcessor]]) -> None:
    """Random drafts, some of them right: every row of logits is edited by the tokens before it and no others."""
    rng = random.Random(len(classes))
    host = HostProcessors(classes, None)
    running: dict[int, tuple[str, list[int], list[int]]] = {}
    num_right = num_wrong = 0
    for number in range(300):
        for key in [key for key in running if rng.random() < 0.1]:
            del running[key]
        new = [key for key in range(1, 6) if key not in running and rng.random() < 0.4]
        for key in new:
            outputs = [rng.randrange(9) for _ in range(rng.choice((0, 0, 3)))]
            running[key] = (f"r{number}-{key}", [number, key], outputs)
        chosen = sorted((key for key in running if key in new or rng.random() < 0.9), key=lambda key: key in new)
        if not chosen:
            continue
        drafts = {key: [rng.randrange(9) for _ in range(0 if key in new else rng.randrange(4))] for key in chosen}
        chunks = [
            chunk(*running[key][:1], key, *running[key][1:], 1 + (key in new), is_new=key in new, drafts=drafts[key])
            for key in chosen
        ]
        step = plan(*chunks)
        host.before_step(step)
        expected_s = np.zeros(step.num_rows + 2)
        for index, key in enumerate(chosen):
            _, prompt, outputs = running[key]
            extra = [each.first for each in step.extra_rows if each.row == index]
            rows = [*range(extra[0], extra[0] + len(drafts[key])), index] if extra else [index]
            for num_before, row in enumerate(rows):
                expected_s[row] = mark([*prompt, *outputs, *drafts[key][:num_before]])
        logits_sv = np.zeros((step.num_rows + 2, VOCAB), np.float32)
        edited_sv = host._apply_first(logits_sv) if Walker in classes else logits_sv
        edited_sv = host._apply_last(edited_sv) if LateWalker in classes else edited_sv
        host.after_step()
        np.testing.assert_array_equal(edited_sv, np.repeat(expected_s[:, None] * len(classes), VOCAB, axis=1))
        for key in chosen:
            is_right = rng.randrange(len(drafts[key]) + 1)
            running[key][2].extend([*drafts[key][:is_right], 9])
            num_right += is_right
            num_wrong += is_right < len(drafts[key])
    assert min(num_right, num_wrong) > 100


def test_updates_are_vllms() -> None:
    """A row that is freed is taken by a new request; else the last one moves there."""
    recorders: list[Recorder] = []
    host = HostProcessors([Recorder], recorders)

    def step(*names: str, new: str = "") -> Any:
        chunks = [chunk(name, ord(name), [ord(name)], [], is_new=name in new, temperature=0.5) for name in names]
        host.before_step(plan(*chunks))
        update = recorders[0].updates[-1]
        if update is None:
            return None
        return update.batch_size, update.removed, [each[0] for each in update.added], update.moved

    assert step("a", "b", "c", "d", new="abcd") == (4, [], [0, 1, 2, 3], [])
    assert step("d", "c", "b", "a") is None
    assert step("c", "d", "e", "a", new="e") == (4, [], [1], [])
    one_way = MoveDirectionality.UNIDIRECTIONAL
    assert step("d", "c") == (2, [1, 0], [], [(3, 0, one_way), (2, 1, one_way)])
    (added,) = (recorders[0].updates[0] or BatchUpdate(0, [], [], [])).added[:1]
    assert (added[1].temperature, added[2], added[3]) == (0.5, [97], [])


def test_a_swap() -> None:
    states = {0: "a", 1: "b", 2: "c"}
    update = BatchUpdate(3, [2], [], [(0, 1, MoveDirectionality.SWAP)])
    assert process_dict_updates(states, update, lambda *_added: None)
    assert states == {0: "b", 1: "a"}
    assert not process_dict_updates(states, None, lambda *_added: None)


class OnlyBelow(LogitsProcessor):
    """Leaves the ids below 4; its answer depends on the temperature, and it says that the most likely one stays."""

    def __init__(self, *_engine: Any) -> None: ...

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None: ...

    def apply(self, logits: np.ndarray) -> np.ndarray:
        return np.where(logits > 2, logits, np.float32(-np.inf)).astype(np.float16)


def test_invariant_ones_see_the_temperature_and_leave_greedy_rows_alone() -> None:
    host = HostProcessors([OnlyBelow], None)
    (function,) = host.traced()
    assert runs_last(function)
    of_rows = enumerate([("a", 0.5), ("b", 0.0)], 1)
    host.before_step(plan(*[chunk(name, key, [1], [], is_new=True, temperature=t) for key, (name, t) in of_rows]))
    logits_sv = np.array([[0.5, 2.0], [0.5, 2.0], [0.5, 2.0]], np.float32)
    edited_sv = host._apply_last(logits_sv)
    np.testing.assert_array_equal(edited_sv, [[-np.inf, 2.0], [0.5, 2.0], [0.5, 2.0]])
    assert edited_sv.dtype == np.float32


class PerRequest(AdapterLogitsProcessor):
    """Some requests want a token of their own, others the one that follows their last output or prompt token."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., np.ndarray] | None:
        args = params.extra_args or {}
        if "token" in args:
            return lambda output_ids, logits: np.where(np.arange(VOCAB) == args["token"], 1.0, -1.0)
        if "follow" in args:
            return lambda prompt_ids, output_ids, logits: np.eye(VOCAB)[([*prompt_ids, *output_ids][-1] + 1) % VOCAB]
        return None


def test_processors_per_request() -> None:
    host = HostProcessors([PerRequest], None)
    made = [{"token": 3}, {}, {"follow": 1}]
    for outputs in ([], [6]):
        rows = [chunk(str(i), i, [1, 2], outputs, is_new=not outputs, extra_args=args) for i, args in enumerate(made)]
        host.before_step(plan(*rows))
        edited_sv = host._apply_first(np.zeros((4, VOCAB), np.float32))
        host.after_step()
        assert edited_sv.argmax(axis=1).tolist() == [3, 0, 7 if outputs else 3, 0]


class Broken(OnlyBelow):
    """Fails where it is told to."""

    def __init__(self, config: str, *_engine: Any) -> None:
        self.fails_in = config
        if config == "init":
            raise OSError("no file")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if self.fails_in == "update":
            raise KeyError("x")

    def apply(self, logits: np.ndarray) -> np.ndarray:
        if self.fails_in == "torch":
            return logits.clone()  # type: ignore[attr-defined]
        return logits[:, :3] if self.fails_in == "shape" else logits.astype(int)


@pytest.mark.parametrize(
    ("where", "match"),
    [
        ("init", "Broken failed: OSError: no file.*write the same in jnp"),
        ("update", "Broken failed: KeyError"),
        ("torch", "Broken failed: AttributeError: .*clone.*no torch.*def process"),
        ("shape", r"Broken failed: TypeError: apply must return floats \[1, 8\].*not float32 \[1, 3\]"),
        ("dtype", r"Broken failed: TypeError: apply must return floats \[1, 8\].*not int64"),
    ],
)
def test_failures_name_the_class_and_the_way_out(where: str, match: str) -> None:
    with pytest.raises(VLLMValidationError, match=match) as caught:  # noqa: PT012
        host = HostProcessors([Broken], where)
        host.before_step(plan(chunk("a", 0, [1], [], is_new=True)))
        logits_sv = np.ones((2, VOCAB), np.float32)
        assert (host._apply_first(logits_sv) == logits_sv).all(), "the step itself goes on"
        host.after_step()
    assert caught.value.parameter == "logits_processors"


def test_classes_are_loaded_by_name_or_as_they_are() -> None:
    assert load_processors([Recorder, f"{__name__}:Recorder", f"{__name__}.Recorder"]) == (Recorder,) * 3
    for processor in (chunk, dict, Recorder([], "cpu", False)):
        with pytest.raises(VLLMValidationError, match="logits_processors"):
            load_processors([processor])
    with pytest.raises(VLLMValidationError, match=r"dict is a class without apply.*def process\(logits_sv, state\)"):
        load_processors([dict])
