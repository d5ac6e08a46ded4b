"""vLLM's import path for the server's command line, for programs that parse it themselves and call `run_server`."""

from __future__ import annotations

import argparse

from jaxllm.cli.serve import add_serve_flags, check_serve_args


def make_arg_parser[Parser: argparse.ArgumentParser](parser: Parser) -> Parser:
    """Add MODEL and all flags of a server and its engine to a parser, and return it."""
    add_serve_flags(parser)
    return parser


def validate_parsed_serve_args(args: argparse.Namespace) -> None:
    """Set `args.model` from MODEL. Raises VLLMValidationError for a command line that cannot be served."""
    check_serve_args(args)
