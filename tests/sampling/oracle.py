"""The oracle does what the sampler must do, row by row in float64 with sorts; tests give both the same settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

from jaxllm.sampling.inputs import RareRules, Rules, SamplingBatch, Uses
from jaxllm.sampling.logprobs import Logprobs
from jaxllm.sampling.processors import LogitsProcessor, LogitsState
from jaxllm.sampling.sampler import sample_full
from jaxllm.sampling.token_counts import UNCOUNTED_ROW, count_tokens

NUM_BIASES = 8
NUM_ASKED = 4
TOLERANCE = 1e-6  # of a row's mass: ids this near to p may go either way


@dataclass(frozen=True)
class Row:
    """The settings of one row, neutral by default."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 7
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    bias: dict[int, float] = field(default_factory=dict)
    allowed: frozenset[int] | None = None
    grammar: frozenset[int] | None = None
    """What a grammar allows; `allowed` lies inside it."""
    boost: float = 0.0
    """The argument of `steer`."""
    scored: int | None = None
    asked: Sequence[int] = ()

    @property
    def penalizes(self) -> bool:
        return (self.presence, self.frequency, self.repetition) != (0.0, 0.0, 1.0)

    @property
    def truncates(self) -> bool:
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


def steer(logits_sv: Array, state: LogitsState) -> Array:
    """Boost low ids the more outputs there are, and tokens of the prompt or the output by how often they are there."""
    boost_s1 = state.extra_args["boost"][:, None]
    ids_v = jnp.arange(logits_sv.shape[1])
    early_sv = jnp.where(ids_v < 7, (state.num_outputs_s + 10 * state.positions_s)[:, None], 0)
    seen_sv = 2 * state.output_counts_sv + state.in_prompt_sv
    return logits_sv + boost_s1 * (early_sv + seen_sv)


steer.extra_args = {"boost": 0.0}  # pyright: ignore[reportFunctionMemberAccess]


def edited(logits_v: np.ndarray, row: Row, *, steers: bool = False) -> np.ndarray:
    """Return the logits after masks, biases, `steer` and penalties."""
    values = logits_v.astype(np.float64)
    v = len(values)
    if row.allowed is not None:
        values = np.where(np.isin(np.arange(v), list(row.allowed)), values, -np.inf)
    for token_id, bias in row.bias.items():
        values[token_id] += bias
    counts = np.bincount(np.array(row.output, np.int64), minlength=v)
    in_prompt = np.isin(np.arange(v), list(row.prompt))
    if steers:
        early = np.where(np.arange(v) < 7, len(row.output) + 10 * row.position, 0)
        values = values + row.boost * (early + 2 * counts + in_prompt)
    for token_id in {*row.prompt, *row.output}:
        value = values[token_id]
        values[token_id] = value / row.repetition if value > 0 else value * row.repetition
    return values - row.frequency * counts - row.presence * (counts > 0)


def weights_of(values: np.ndarray, temperature: float) -> np.ndarray:
    """Return unnormalised probabilities."""
    with np.errstate(under="ignore"):
        return np.exp((values - values.max()) / temperature)


def kept_by_sort(values: np.ndarray, row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Return what truncation must keep and what it may keep."""
    weights = weights_of(values, row.temperature)
    return _cut(values, weights, row, -TOLERANCE), _cut(values, weights, row, TOLERANCE)


def _cut(values: np.ndarray, weights: np.ndarray, row: Row, slack: float) -> np.ndarray:
    kept = weights >= np.float32(row.min_p) * (1 - slack)
    if row.min_p == 1.0:
        kept = weights == 1.0
    if 0 < row.top_k < len(values):
        kept &= values >= np.sort(values)[-row.top_k]
    if row.top_p < 1.0:
        left = np.where(kept, weights, 0.0)
        order = np.sort(left)[::-1]
        wanted = min(max(np.float32(row.top_p) + slack, 0.0), 1.0) * left.sum()
        index = min(int(np.searchsorted(np.cumsum(order), wanted)), len(order) - 1)
        kept &= left >= order[index]
    return kept


def processed(values: np.ndarray, row: Row, kept: np.ndarray) -> np.ndarray:
    """Return what is drawn from: scaled logits, -inf for what is cut off."""
    if row.temperature == 0:
        return values
    return np.where(kept, values / np.float32(row.temperature), -np.inf)


def log_softmax(values: np.ndarray) -> np.ndarray:
    """Return log-probabilities."""
    return values - values.max() - np.log(np.exp(values - values.max()).sum())


def make_batch(rows: Sequence[Row]) -> SamplingBatch:
    """Return the settings of rows as `sample_plain` takes them."""
    seeds = np.array([row.seed for row in rows], np.uint64)
    words = np.stack([(seeds >> np.uint64(32)).astype(np.uint32), seeds.astype(np.uint32)], axis=1).view(np.int32)
    column = partial(_column, rows)
    return SamplingBatch(
        seeds_s2=jnp.asarray(words),
        positions_s=column("position", np.int32),
        temperature_s=column("temperature", np.float32),
        top_k_s=column("top_k", np.int32),
        top_p_s=column("top_p", np.float32),
        min_p_s=column("min_p", np.float32),
    )


def make_rules(rows: Sequence[Row], v: int) -> tuple[Rules, RareRules, Uses, Array]:
    """Return the rules of rows, what they use, and token counts in which row i is at len(rows) - i."""
    s = len(rows)
    bits_sw = np.full((s, -(-v // 32)), -1, np.int32)
    grammar_bits_sw = bits_sw.copy()
    bias_ids_sb, bias_sb = np.zeros((s, NUM_BIASES), np.int32), np.zeros((s, NUM_BIASES), np.float32)
    asked_sn = np.zeros((s, NUM_ASKED), np.int32)
    counts_cv = np.zeros((s + 1, v), np.uint16)
    for index, row in enumerate(rows):
        for packed_sw, ids in ((bits_sw, row.allowed), (grammar_bits_sw, row.grammar)):
            if ids is not None:
                flags = np.zeros(packed_sw.shape[1] * 32, np.uint8)
                flags[list(ids)] = 1
                packed_sw[index] = np.packbits(flags, bitorder="little").view("<i4")
        bias_ids_sb[index, : len(row.bias)] = list(row.bias)
        bias_sb[index, : len(row.bias)] = list(row.bias.values())
        asked_sn[index, : len(row.asked)] = row.asked
        counts_cv[s - index] = count_tokens([*row.prompt, *row.output], len(row.prompt), v)
    counted = [s - i if row.prompt or row.output else UNCOUNTED_ROW for i, row in enumerate(rows)]
    column = partial(_column, rows)
    rules = Rules(
        is_scored_s=jnp.asarray([row.scored is not None for row in rows], jnp.int32),
        scored_ids_s=jnp.asarray([row.scored or 0 for row in rows], jnp.int32),
        count_rows_s=jnp.asarray(counted, jnp.int32),
        presence_s=column("presence", np.float32),
        frequency_s=column("frequency", np.float32),
        repetition_s=column("repetition", np.float32),
        num_outputs_s=jnp.asarray([len(row.output) for row in rows], jnp.int32),
        extra_args={"boost": column("boost", np.float32)},
    )
    no_drafts = np.zeros((s, 0), np.int32)
    arrays = (bits_sw, grammar_bits_sw, bias_ids_sb, bias_sb, asked_sn, no_drafts, no_drafts)
    rare = RareRules(*map(jnp.asarray, arrays))
    uses = (
        max(len(row.bias) for row in rows),
        any(row.penalizes for row in rows),
        any(row.truncates for row in rows),
        1,
    )
    return rules, rare, Uses(*(jnp.asarray(int(use), jnp.int32) for use in uses)), jnp.asarray(counts_cv)


def _column(rows: Sequence[Row], name: str, dtype: Any) -> Array:
    return jnp.asarray(np.array([getattr(row, name) for row in rows], dtype))


Sampler = Callable[[np.ndarray, Sequence[Row]], tuple[np.ndarray, Logprobs]]


def make_sampler(
    mode: str, num_logprobs: int, *processors: LogitsProcessor, platform: str = "cpu", poisons_uses: bool = False
) -> Sampler:
    """Return `sample_full` as on a platform, compiled when it is first called; its results are numpy arrays.

    With `poisons_uses` it is told of everything that no row uses it, which a GPU must not look at.
    """
    settings: dict[str, Any] = {"num_logprobs": num_logprobs, "logprobs_mode": mode, "processors": processors}
    program = jax.jit(partial(sample_full, skips_unused=platform != "gpu", **settings))

    def run(logits_sv: np.ndarray, rows: Sequence[Row]) -> tuple[np.ndarray, Logprobs]:
        rules, rare, uses, counts_cv = make_rules(rows, logits_sv.shape[1])
        uses = jax.tree.map(jnp.zeros_like, uses) if poisons_uses else uses
        with traced_for(platform):
            result = program(jnp.asarray(logits_sv), make_batch(rows), rules, rare, uses, counts_cv)
        return jax.tree.map(np.asarray, result)

    return run


@contextmanager
def traced_for(platform: str) -> Iterator[None]:
    """Trace what a platform would run; a CPU then runs it."""

    def take(**branches: Callable[[], Any]) -> Any:
        return branches.get(platform, branches["default"])()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lax, "platform_dependent", take)
        yield


def everything(v: int, **changes: Any) -> Row:
    """Return a row that uses every feature."""
    rng = np.random.default_rng(8)
    row = Row(
        temperature=0.7,
        top_k=60,
        top_p=0.9,
        min_p=0.001,
        seed=2**63 + 11,
        presence=0.4,
        frequency=-0.3,
        repetition=1.3,
        prompt=(3, 5, 5, 9, v - 1),
        output=(5, 6, 6, 6, v - 2),
        bias={5: 2.5, 0: -3.0, v - 1: 1.5},
        allowed=frozenset(int(i) for i in rng.permutation(v)[: v // 2]) | {0, 3, 5, 6, v - 1},
        boost=0.25,
        asked=(0, 5, v - 1, 8),
    )
    return replace(row, **changes)


def adversarial_logits(v: int) -> dict[str, np.ndarray]:
    """Return rows of logits by name."""
    rng = np.random.default_rng(3)
    one_hot = np.full(v, -40.0)
    one_hot[17] = 40.0
    kinds = {
        "random": rng.standard_normal(v) * 3,
        "sharp": rng.standard_normal(v) * 30,
        "flat": np.zeros(v),
        "one-hot": one_hot,
        "ties": np.repeat(rng.standard_normal(v // 10), 10),
        "forbidden": np.where(rng.random(v) < 0.5, -np.inf, rng.standard_normal(v)),
        "huge": rng.choice([1e37, -1e37, 3e36, 0.0], v),
    }
    return {name: row.astype(np.float32) for name, row in kinds.items()}
