"""A short `--help` for commands with an engine's flags; `--help=WORD` shows a group, or the flags with a word."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from jaxllm.config.kinds import Unsupported

GROUPS: Mapping[str, str] = {
    "Frontend": "address, keys, routes of the server",
    "Frontend: chat": "chat templates and what answers hold",
    "Frontend: CORS": "web pages of other origins",
    "Frontend: TLS": "certificates",
    "Frontend: log": "logging of requests",
    "Frontend: limits": "times and sizes of requests",
    "AsyncEngineArgs": "the queue, its bounds, its log, and the end",
    "ModelConfig": "the model, its tokenizer, its precision, default sampling",
    "MultiModalConfig": "images and videos in prompts",
    "LoadConfig": "where the weights come from",
    "ParallelConfig": "parallelism over devices",
    "CacheConfig": "the KV cache and device memory",
    "LoRAConfig": "adapters that requests may name",
    "SpeculativeConfig": "speculative decoding",
    "SchedulerConfig": "which requests run together, and in which steps",
    "CompilationConfig": "which programs are compiled",
    "StructuredOutputsConfig": "structured outputs and reasoning",
    "AttentionConfig": "kernels of attention",
    "KernelConfig": "kernels of matmuls",
    "ObservabilityConfig": "statistics and metrics",
    "ProfilerConfig": "the profiler",
}
"""The groups of flags by title, with a summary of each."""
_HINT = """\
--help=GROUP        the flags of a group, as --help=ModelConfig or --help=Frontend
--help=WORD         the flags with a word in their names, as --help=max
--help=all          all flags
--help=listgroup    the groups' names
"""


def add_help(parser: argparse.ArgumentParser, *kinds: type[Any]) -> None:
    """Add --help to a parser made with add_help=False; the argument classes `kinds` have many flags."""
    fields = [field for kind in kinds for field in dataclasses.fields(kind)]
    parser.usage = parser.usage or "%(prog)s [MODEL] [--FLAG VALUE ...]"
    parser.add_argument("-h", "--help", action=_HelpByWord, fields=fields)


class _HelpByWord(argparse.Action):
    """Shows the help for a word and exits, with status 2 if nothing matches the word."""

    def __init__(
        self, option_strings: list[str], dest: str, *, fields: Iterable[dataclasses.Field[Any]], default: Any = None
    ) -> None:
        super().__init__(
            option_strings,
            dest=dest,
            default=argparse.SUPPRESS,
            nargs="?",
            const="",
            metavar="WORD",
            help="show this, a group of flags, or the flags with a word",
        )
        del default
        fields = list(fields)
        self._titles = {field.metadata["group"] for field in fields}
        self._refused = {
            field.name: field.metadata["kind"].reason
            for field in fields
            if isinstance(field.metadata["kind"], Unsupported)
        }

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002 (argparse calls it so)
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        """Show the help and exit."""
        word = values.lower().replace("_", "-").strip(" -")
        if not word:
            text = self._short(parser)
        elif word == "all":
            text = parser.format_help()
        elif word == "listgroup":
            text = "".join(f"{title}\n" for title in self._shown_titles(parser))
        else:
            text = self._groups(parser, word) or self._matching(parser, word)
        if text is None:
            parser.error(f"no group and no flag has {values!r} in its name; --help=listgroup names the groups")
        parser._print_message(text, sys.stdout)
        parser.exit()

    def _shown_titles(self, parser: argparse.ArgumentParser) -> list[str]:
        """Return the titles of the groups that the short help lists without their flags."""
        return [group.title for group in parser._action_groups if group.title and group.title in self._titles]

    def _short(self, parser: argparse.ArgumentParser) -> str:
        plain_groups = [group for group in parser._action_groups if group.title not in self._titles]
        titles = self._shown_titles(parser)
        width = max(len(title) for title in titles)
        lines = [f"  {title:{width}}  {GROUPS.get(title, '')}".rstrip() for title in titles]
        formatter = parser._get_formatter()
        formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
        formatter.add_text(parser.description)
        _add_groups(formatter, plain_groups)
        end = parser._get_formatter()
        end.add_text(parser.epilog)
        return "\n".join([formatter.format_help(), "groups of flags:", *lines, "", _HINT, end.format_help()])

    def _groups(self, parser: argparse.ArgumentParser, word: str) -> str | None:
        """Return the help of the groups with this name; "frontend" matches all that begin with it."""
        named = [
            group
            for group in parser._action_groups
            if group.title and word in (group.title.lower(), group.title.lower().partition(":")[0])
        ]
        return _shown(parser, named) if named else None

    def _matching(self, parser: argparse.ArgumentParser, word: str) -> str | None:
        """Return the help of the flags with a word in their names, or else in their help texts."""
        flags = [action for action in parser._actions if action.option_strings]
        matches = [flag for flag in flags if any(word in name for name in flag.option_strings)]
        if not matches:
            matches = [flag for flag in flags if word in str(flag.help).lower().replace("_", "-")]
        refused = [self._refusal(flag) for flag in matches if flag.dest in self._refused]
        shown = [flag for flag in matches if flag.help != argparse.SUPPRESS]
        if not refused and not shown:
            return None
        formatter = parser._get_formatter()
        for title, entries in ((f"flags with {word!r}", shown), ("not supported", refused)):
            formatter.start_section(title)
            formatter.add_arguments(entries)
            formatter.end_section()
        return formatter.format_help()

    def _refusal(self, flag: argparse.Action) -> argparse.Action:
        """Return the help entry of a refused flag: its names and the reason."""
        shown = copy.copy(flag)
        shown.nargs, shown.help = 0, self._refused[flag.dest].replace("%", "%%")
        return shown


def _add_groups(formatter: argparse.HelpFormatter, groups: Iterable[Any]) -> None:
    for group in groups:
        formatter.start_section(group.title)
        formatter.add_text(group.description)
        formatter.add_arguments(group._group_actions)
        formatter.end_section()


def _shown(parser: argparse.ArgumentParser, groups: Iterable[Any]) -> str:
    formatter = parser._get_formatter()
    _add_groups(formatter, groups)
    return formatter.format_help()
