"""`jaxllm serve` says which extra it needs where that is not installed."""

from __future__ import annotations

import pytest

from jaxllm.cli import serve
from jaxllm.cli.main import main


def test_without_its_packages_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "uvloop" else object())
    assert main(["serve", "m"]) == 2
    assert "pip install 'jaxllm[serve]'" in capsys.readouterr().err
