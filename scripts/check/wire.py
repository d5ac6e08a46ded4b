"""Decode random and mutated frames of both ways between front end and core: only FrameError may be raised.

scripts/check.py wire [--frames 1000000] [--seed 0]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from typing import Any

from jaxllm.core_messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    PromptLogprobs,
    RequestError,
    SchedulerStats,
    SpeculationStats,
    TiersStats,
    TierStats,
    TokenLogprobs,
)
from jaxllm.engine.transport.wire import (
    Abort,
    Add,
    Call,
    Failure,
    FrameError,
    Heartbeat,
    Release,
    Reply,
    Shutdown,
    decode_from_core,
    decode_to_core,
    encode_from_core,
    encode_to_core,
)
from jaxllm.sampling_params import SamplingParams, StructuredOutputsParams

MANY_BYTES = 64


@dataclass
class Tally:
    """Counts of decoded frames, by outcome."""

    num_frames: int = 0
    num_read: int = 0
    num_refused: int = 0


def to_core() -> list[list[bytes]]:
    """Return the frames of one message of each kind for the core."""
    params = SamplingParams(
        n=2, seed=5, logprobs=3, stop=["a"], structured_outputs=StructuredOutputsParams(regex="[ab]+"), bad_words=["b"]
    )
    request = EngineCoreRequest(
        request_id="7",
        prompt_token_ids=[1, 2, 3],
        sampling_params=params,
        eos_token_id=2,
        max_tokens=5,
        seed=2**63,
        arrival_time=1.5,
        cache_salt="salt",
    )
    messages = [Add(request), Abort(["7", "8#1"]), Release(["7"]), Call(1, "check", [{}, 0.5]), Shutdown()]
    return [[bytes(frame) for frame in encode_to_core(each)] for each in messages]


def from_core() -> list[list[bytes]]:
    """Return the frame of one message of each kind from the core, except those of its start."""
    scored = TokenLogprobs([4, 5], [-0.5, -1.5], 1)
    outputs = [
        EngineCoreOutput(request_id="7", new_token_ids=[4], new_logprobs=[scored]),
        EngineCoreOutput(request_id="8", new_prompt_logprobs=PromptLogprobs(1, [scored])),
        EngineCoreOutput(request_id="9", finish_reason="error", error=RequestError("invalid", "no", "regex")),
    ]
    drafts = SpeculationStats(
        num_drafts=3, num_draft_tokens=9, num_accepted_tokens=4, num_accepted_tokens_per_pos=[3, 1, 0]
    )
    counts: dict[str, Any] = dict.fromkeys(SchedulerStats.__struct_fields__, 3)
    counts["speculation"], counts["tiers"] = drafts, TiersStats(host=TierStats(num_blocks=5))
    stats = SchedulerStats(**counts)
    messages = [
        EngineCoreOutputs(outputs=outputs, stats=stats, timestamp=2.5),
        Reply(1, {"a": [1]}),
        Reply(2, error=RequestError("internal", "no")),
        Heartbeat(0.5, True, False),
        Failure(RequestError("internal", "no")),
    ]
    return [[encode_from_core(each)] for each in messages]


def fuzz(num_frames: int, seed: int) -> Tally:
    """Decode a number of messages. Raises what a decoder raises besides FrameError."""
    rng, tally = random.Random(seed), Tally()
    kinds: list[tuple[Any, list[list[bytes]]]] = [
        (decode_to_core, to_core()),
        (lambda frames: decode_from_core(frames[0]), from_core()),
    ]
    for _ in range(num_frames):
        decode, examples = rng.choice(kinds)
        frames = [_mutated(frame, rng) for frame in rng.choice(examples)]
        tally.num_frames += 1
        try:
            decode(frames)
            tally.num_read += 1
        except FrameError:
            tally.num_refused += 1
    return tally


def _mutated(frame: bytes, rng: random.Random) -> bytes:
    """Return random bytes, or the frame with some bytes changed, cut out, doubled, or put in."""
    kind = rng.randrange(8)
    if kind == 0:
        return rng.randbytes(rng.randrange(MANY_BYTES))
    changed = bytearray(frame)
    for _ in range(rng.choice([0, 1, 1, 2, 5])):
        at = rng.randrange(len(changed) + 1)
        if kind == 1:
            del changed[at:]
        elif kind == 2:
            del changed[at : at + rng.randrange(9)]
        elif kind == 3:
            changed[at:at] = changed[at : at + rng.randrange(MANY_BYTES)]
        elif kind == 4:
            changed[at:at] = rng.randbytes(rng.randrange(9))
        elif at < len(changed):
            changed[at] = rng.choice([0x00, 0x80, 0x90, 0xC0, 0xC6, 0xDD, 0xDF, 0xFF, rng.randrange(256)])
    return bytes(changed)


def main() -> int:
    """Fuzz, and print how many messages were decoded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.monotonic()
    tally = fuzz(args.frames, args.seed)
    seconds = time.monotonic() - started
    print(f"{tally.num_frames} messages in {seconds:.0f} s: {tally.num_refused} refused, {tally.num_read} read")
    return 0


if __name__ == "__main__":
    sys.exit(main())
