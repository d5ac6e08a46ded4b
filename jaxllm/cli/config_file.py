"""Read flags from `--config FILE.yaml`: its keys are long flags without dashes. The command line takes precedence."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jaxllm.config.flag_values import convert, keys_of, read_yaml, unknown_key


def apply_config_file(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """If `words` contain --config, make the values in its file the parser's defaults."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--config")
    try:
        name = finder.parse_known_args(list(words))[0].config
    except argparse.ArgumentError:
        return  # the real parser will report it
    if name is None:
        return
    actions = {key: action for action in parser._actions if action.dest != "help" for key in keys_of(action)}
    for key, value in read_yaml(name, "config").items():
        action = actions.get(str(key).replace("_", "-"))
        if action is None or key == "config":
            raise unknown_key(name, key, value, actions)
        parser.set_defaults(**{action.dest: convert(action, value, f"{name}: {key}")})
