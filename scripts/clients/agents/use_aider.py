"""Run aider's command line against a server: it edits a file, streamed and not, and continues a chat."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

EDIT = "Add the line four to poem.txt."
ON = "How many lines has it now?"


def main() -> None:
    url, key, _ = sys.argv[1:]
    program = Path(sys.executable).parent / "aider"
    with tempfile.TemporaryDirectory() as name:
        home, project = Path(name) / "home", Path(name) / "project"
        home.mkdir()
        project.mkdir()
        poem = project / "poem.txt"
        closed = "http://127.0.0.1:9"  # no remote host is reached
        environment = os.environ | {
            "HOME": str(home),
            "HTTPS_PROXY": closed,
            "https_proxy": closed,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }

        def ask(message: str, *flags: str) -> str:
            """Run aider with one message and return what it prints."""
            command = [str(program), "--model", "openai/model", "--openai-api-base", f"{url}/v1"]
            command += ["--openai-api-key", key, "--message", message, "--yes-always", "--no-git", "--no-pretty"]
            command += ["--edit-format", "whole", "--no-check-update", "--analytics-disable", "--no-gitignore"]
            command += ["--no-show-model-warnings", "--no-show-release-notes", "--no-detect-urls", *flags, str(poem)]
            ran = subprocess.run(
                command,
                cwd=project,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert ran.returncode == 0, (ran.stdout, ran.stderr)
            return ran.stdout

        for flag in ("--stream", "--no-stream"):
            poem.write_text("one\ntwo\nthree\n")
            said = ask(EDIT, flag)
            assert poem.read_text() == "one\ntwo\nthree\nfour\n", said
        said = ask(ON, "--restore-chat-history")
        assert "It has 4 lines." in said, said
        assert poem.read_text() == "one\ntwo\nthree\nfour\n", said
        refused = ask(EDIT, "--openai-api-key", "wrong")
        assert "AuthenticationError" in refused, refused


if __name__ == "__main__":
    main()
