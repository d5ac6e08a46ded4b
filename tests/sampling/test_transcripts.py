"""The rules of transcripts leave the ids that a plain loop like HF's leaves."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.sampling.inputs import WITHOUT_RULES, WITHOUT_TIMESTAMPS, TranscriptRows
from jaxllm.sampling.transcripts import TranscriptRules, TranscriptState, apply_rules
from tests.sampling.transcripts import ruled

VOCAB_SIZE, END, FIRST = 60, 30, 40
RULES = TranscriptRules(
    suppressed=(3, 17, 33, 99),
    suppressed_first=(5, END, 99),
    first_timestamp=FIRST,
    end_of_text=END,
    last_initial=FIRST + 6,
)
KINDS = {"timestamps": 0, "no timestamps": WITHOUT_TIMESTAMPS, "no rules": WITHOUT_RULES}


def draw_outputs(rng: np.random.Generator) -> list[int]:
    """Return up to eight tokens: of text, marks, and timestamps that rise."""
    outputs, latest = [], FIRST
    for _ in range(rng.integers(0, 9)):
        if rng.random() < 0.5:
            latest = int(rng.integers(latest, VOCAB_SIZE))
            outputs.append(latest)
        else:
            outputs.append(int(rng.integers(0, FIRST - 1)))
    return outputs


def state_of(all_outputs: list[list[int]], kinds: list[str]) -> TranscriptState:
    before, latest = [], []
    for outputs, kind in zip(all_outputs, kinds, strict=True):
        before.append(outputs[-2] if len(outputs) > 1 else -1)
        timestamps = [each for each in outputs[:-1] if each >= FIRST]
        latest.append(KINDS[kind] or (timestamps or [0])[-1])
    # The last token of a prompt may be anything.
    last = [outputs[-1] if outputs else VOCAB_SIZE - 1 for outputs in all_outputs]
    lengths = [len(outputs) for outputs in all_outputs]
    return TranscriptState(_ints(lengths), _ints(last), TranscriptRows(_ints(before), _ints(latest)))


def _ints(values: list[int]) -> jax.Array:
    return jnp.array(values, jnp.int32)


@pytest.mark.parametrize("rules", [RULES, replace(RULES, last_initial=VOCAB_SIZE)])
def test_rules_leave_what_a_loop_leaves(rules: TranscriptRules) -> None:
    rng, seen = np.random.default_rng(), set()
    apply = jax.jit(apply_rules, static_argnames="rules")
    for _ in range(10):
        outputs = [draw_outputs(rng) for _ in range(64)]
        kinds = [str(rng.choice(list(KINDS))) for _ in outputs]
        # Timestamps are likely in some rows, and text in others.
        logits_sv = rng.normal(0, 2, (len(outputs), VOCAB_SIZE)).astype(np.float32)
        logits_sv[:, FIRST:] += rng.normal(0, 3, (len(outputs), 1))
        found_sv = np.asarray(apply(logits_sv, rules=rules, state=state_of(outputs, kinds)))
        for logits_v, found_v, of_row, kind in zip(logits_sv, found_sv, outputs, kinds, strict=True):
            has_timestamps = kind == "timestamps"
            expected_v = (
                logits_v if kind == "no rules" else ruled(logits_v, of_row, rules, has_timestamps=has_timestamps)
            )
            np.testing.assert_array_equal(found_v, expected_v, err_msg=f"{kind} after {of_row}")
            if has_timestamps and len(of_row) > 1:
                are_left = np.isfinite(expected_v)
                seen.add((*(each >= FIRST for each in of_row[-2:]), are_left[:FIRST].any(), are_left[FIRST:].any()))
    assert len(seen) >= 8, "few kinds of rows were seen"


def test_a_model_without_timestamps_only_loses_ids() -> None:
    rules = TranscriptRules(suppressed=(3,), suppressed_first=(5,), first_timestamp=9, end_of_text=8, last_initial=9)
    logits_sv = np.random.default_rng().normal(size=(2, 9)).astype(np.float32)
    state = TranscriptState(_ints([0, 1]), _ints([0, 4]), TranscriptRows(_ints([-1, -1]), _ints([0, 0])))
    found_sv = np.asarray(apply_rules(jnp.asarray(logits_sv), rules, state))
    assert np.isneginf(found_sv).nonzero()[0].tolist() == [0, 0, 1]
    assert np.isneginf(found_sv).nonzero()[1].tolist() == [3, 5, 3]
