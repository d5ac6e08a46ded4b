"""What README and CONTRIBUTING say exists: links, paths, commands and their flags; and their lines fit a terminal."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from jaxllm.cli.main import make_parser
from tests.architecture.sources import ROOT

PAGES = ("README.md", "CONTRIBUTING.md", "jaxllm/sampling/README.md", "jaxllm/constraints/README.md",
         "jaxllm/engine/README.md", "pallas_kernels/README.md", "scripts/README.md", "docs/serving.md",
         "docs/agents.md", "docs/models.md", "docs/notebook.md", "docs/pooling.md", "docs/scale.md")  # fmt: skip
README = (ROOT / "README.md").read_text(encoding="utf-8")
SERVING = re.sub(r"<!--.*?-->", "", (ROOT / "docs/serving.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES)
def test_lines_fit_a_terminal(page: str):
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > (160 if line.startswith("|") else 120)] == [], "split or shorten"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str):
    text = (ROOT / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        if name.startswith("http"):
            continue
        target = ((ROOT / page).parent / name).resolve() if name else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def anchors(page: Path) -> list[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_paths_exist():
    folders = "scripts|benchmarks|tests|jaxllm|models|pallas_kernels|docs"
    words = re.findall(rf"(?<![\w/.])(?:{folders})/[\w./*-]*\w", README + SERVING)
    assert len(words) > 30
    assert [word for word in words if not list(ROOT.glob(word))] == []


def test_commands_take_their_flags():
    """Each `jaxllm` command is parsed as the command line does; a script's flags stand in its source."""
    parser, _ = make_parser()
    commands = re.findall(r"^jaxllm ([^#\n]*)", (README + SERVING).replace("\\\n", " "), re.MULTILINE)
    assert len(commands) >= 9
    for command in commands:
        parser.parse_args(shlex.split(command))
    for script, words in re.findall(r"`(scripts/\w+\.(?:py|sh))([^`]*)`", README + SERVING):
        source = (ROOT / script).read_text(encoding="utf-8")
        source += (ROOT / "scripts/benchmark.py").read_text(encoding="utf-8") if script.endswith("benchmark.sh") else ""
        for flag in re.findall(r"--[\w-]+", words):
            assert f'"{flag}"' in source, f"{script} {flag}"
