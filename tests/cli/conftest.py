"""Subcommands that are clients ask the server of tests/server, whose engine has no model."""

from tests.server.conftest import mock, mock_server, offline, tokenizer

__all__ = ["mock", "mock_server", "offline", "tokenizer"]
