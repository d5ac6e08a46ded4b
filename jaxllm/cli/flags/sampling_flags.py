"""The sampling flags shared by subcommands that generate text, one per sampling parameter."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from jaxllm.config.kinds import Integer, Kind, Number, Switch
from jaxllm.params.checks import INT32_MAX
from jaxllm.utils.streams import say

SAMPLING_FLAGS: Mapping[str, tuple[Kind, str]] = {
    "n": (Integer(1, INT32_MAX), "outputs per prompt"),
    "temperature": (Number(0.0, 2.0), "0 is greedy"),
    "top_p": (Number(0.0, 1.0), "keep the most likely tokens up to this probability"),
    "top_k": (Integer(-1, INT32_MAX), "keep this many of the most likely tokens"),
    "min_p": (Number(0.0, 1.0), "keep tokens at least this likely relative to the best"),
    "max_tokens": (Integer(-1, INT32_MAX, sized=True), "longest output; default 16, -1: to the end of the context"),
    "min_tokens": (Integer(0, INT32_MAX), "shortest output"),
    "logprobs": (Integer(-1, INT32_MAX), "log-probabilities of this many tokens per position"),
    "ignore_eos": (Switch(), "continue after the end of sequence"),
    "skip_special_tokens": (Switch(), "leave special tokens out of the text"),
    "include_stop_str_in_output": (Switch(), "keep the stop string in the text"),
}

_TALK_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
TALK_DEFAULTS: Mapping[str, float] = {"temperature": 0.7, "min_p": 0.05}
"""The sampling of a talk if the model specifies none: at temperature 1, the API's default, small models ramble."""


def add_sampling_flags(group: Any, names: Iterable[str]) -> None:
    """Add the flags of these parameters to a parser or group; a flag that is not set leaves no attribute."""
    for name in names:
        kind, help_text = SAMPLING_FLAGS[name]
        words = {"help": help_text, "default": argparse.SUPPRESS} | (kind.flag() or {})
        group.add_argument("--" + name.replace("_", "-"), **words)


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters set on the command line or in the config file."""
    return {name: getattr(args, name) for name in SAMPLING_FLAGS if hasattr(args, name)}


def add_talk_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the sampling of an answer; the defaults are the server's, or the model's."""
    group = parser.add_argument_group("sampling, by default as the model or its server has it")
    add_sampling_flags(group, _TALK_SAMPLING)
    length, seed = Integer(1, 2**31 - 1, sized=True).flag(), Integer(0, 2**64 - 1).flag()
    group.add_argument("--max-tokens", default=argparse.SUPPRESS, help="longest answer", **length)
    group.add_argument("--seed", default=argparse.SUPPRESS, help="make it repeatable", **seed)


def talk_defaults(defaults: Mapping[str, Any] | None, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the sampling to add to `fields`, which flags have set, if the model's own `defaults` have none.

    The user gets a message about them. `defaults` of None are unknown, and nothing is added.
    """
    if defaults is None or not defaults.keys().isdisjoint(_TALK_SAMPLING):
        return {}
    added = {name: value for name, value in TALK_DEFAULTS.items() if name not in fields}
    if added:
        shown = " and ".join(f"{name} {value}" for name, value in added.items())
        say(f"The model does not say how to sample: this talk uses {shown}; --temperature and --min-p change that.")
    return added


def talk_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return the request fields that the sampling flags set."""
    return given_sampling(args) | ({"seed": args.seed} if hasattr(args, "seed") else {})
