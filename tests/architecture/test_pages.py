"""The pages are true of the repository: links, anchors, paths, commands, flags and figures; and a reader finds each."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from jaxllm.cli.main import make_parser
from tests.architecture.sources import ROOT

INDEX, README = "docs/README.md", "README.md"
MAX_README_LINES = 250
OF_THE_READER = {"jaxllm/NAME"}
"""Names in examples that look like paths of the repository."""


def pages() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z", "*.md"], cwd=ROOT, capture_output=True, check=True, text=True)
    names = [name for name in listed.stdout.split("\0") if name and not name.startswith(("benchmarks/", "tests/"))]
    return [name for name in names if (ROOT / name).is_file()]


PAGES = pages()


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose(page: str) -> str:
    return re.sub(r"<!--.*?-->", "", read(page))


OURS = {page: prose(page) for page in PAGES if page.startswith("docs/") or page == README}


@pytest.mark.parametrize("page", PAGES)
def test_lines_fit_a_terminal(page: str):
    lines = read(page).splitlines()
    assert [line for line in lines if len(line) > (160 if line.startswith("|") else 120)] == [], "split or shorten"


def test_the_readme_is_short():
    assert len(read(README).splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str):
    for link in links(page):
        anchor, file = link.partition("#")[2], target(page, link)
        assert file.exists(), link
        assert not anchor or anchor in anchors(file), link


def links(page: str) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", read(page)) if not link.startswith("http")]


def anchors(page: Path) -> list[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_every_page_is_in_the_index():
    linked = {target(INDEX, link) for link in links(INDEX)}
    missing = {page for page in PAGES if page.startswith("docs/") and page != INDEX and ROOT / page not in linked}
    assert not missing


def test_every_page_is_reachable():
    seen: set[str] = set()
    todo = [README]
    while todo:
        page = todo.pop()
        if page in PAGES and page not in seen:
            seen.add(page)
            todo += [str(target(page, link).relative_to(ROOT)) for link in links(page)]
    assert sorted(set(PAGES) - seen) == []


def target(page: str, link: str) -> Path:
    name = link.partition("#")[0]
    return ((ROOT / page).parent / name).resolve() if name else ROOT / page


def test_paths_exist():
    folders = "scripts|benchmarks|tests|jaxllm|models|pallas_kernels|docs"
    words = {
        (page, word) for page in OURS for word in re.findall(rf"(?<![\w/.:])(?:{folders})/[\w./*-]*\w", OURS[page])
    }
    assert len(words) > 100
    words = {(page, path) for page, path in words if path not in OF_THE_READER}
    assert [(page, path) for page, path in sorted(words) if not list(ROOT.glob(path))] == []


def test_the_map_has_every_folder():
    mapped = OURS["docs/architecture.md"].split("\n## The map\n")[1].split("\n## ")[0]
    folders = [ROOT / "jaxllm", ROOT / "jaxllm/engine", ROOT / "jaxllm/server"]
    packages = [path.parent for folder in folders for path in folder.glob("*/__init__.py")]
    names = [str(package.relative_to(ROOT / "jaxllm")) for package in packages if package.name != "models"]
    assert [name for name in names if f"{name}/`" not in mapped] == []


def test_commands_take_their_flags():
    """Each `jaxllm` command is parsed as the command line does; a script's flags stand in its source."""
    parser, _ = make_parser()
    text = "\n".join(OURS.values())
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    commands = re.findall(r"^ *jaxllm ([^#\n]*)", blocks, re.MULTILINE)
    assert len(commands) >= 9
    for command in commands:
        parser.parse_args(shlex.split(command))
    for script, words in re.findall(r"`(scripts/[\w/]+\.(?:py|sh))([^`]*)`", text):
        files = [script, *(["scripts/benchmark.py"] if script.endswith("benchmark.sh") else [])]
        if (folder := ROOT / script.removesuffix(".py")).is_dir():
            program = folder / words.split()[0]
            files += [str(path.relative_to(ROOT)) for path in (program.with_suffix(".py"), program / "__main__.py")]
            assert any((ROOT / file).is_file() for file in files[1:]), f"{script} {words}"
        source = "".join(read(file) for file in files if (ROOT / file).is_file())
        for flag in re.findall(r"--[\w-]+", words):
            assert f'"{flag}"' in source, f"{script} {flag}"


def test_figures_of_the_readme_are_those_of_the_comparison():
    """Each number of a row stands in the row of the same name that the benchmark has written."""
    rows = table(OURS[README].split("\n## Speed on a CPU\n")[1].split("\n## ")[0])
    measured = table(OURS["docs/performance.md"].split("\n## Beside other programs\n")[1].split("\n## ")[0])
    names = rows.pop("")
    assert names == ["jaxllm", "vLLM", "HF, batches of 16", "llama.cpp, Q4_1"]
    columns = [measured[""].index(name) for name in names]
    for name, cells in rows.items():
        assert cells == [measured[name][column].partition(" (")[0] for column in columns], name


def table(text: str) -> dict[str, list[str]]:
    """Return the first table of a text by its first cells."""
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert lines is not None
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines.group().splitlines()]
    return {row[0]: row[1:] for row in cells if set(row[1]) != {"-"}}
