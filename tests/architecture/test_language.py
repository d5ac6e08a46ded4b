"""Docstrings, comments, messages, names and pages are plain English."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.architecture.sources import ROOT, Source, sources

PHRASES = re.compile(r"\b(of which|so many|be it|what of|lest)\b", re.IGNORECASE)

# How a docstring begins that makes no sense alone, as "Of what is multiplied with."
FRAGMENT = re.compile(r"(Of|And|But|Those|Say whether)\b|\.\.\.")

# Words that name nothing. A comprehension is short enough for `each`.
EMPTY_NAMES = {"each", "own", "given", "found", "place", "there", "those"}

PRODUCT = ("jaxllm", "models", "pallas_kernels")


def test_phrases_and_names():
    assert [line for folder in ("docs", *PRODUCT, "scripts", "tests") for line in offences(folder)] == []


def offences(folder: str) -> Iterator[str]:
    """Yield what is wrong in a folder's files, as `file:line word`. "docs" has every page of the repository."""
    if folder == "docs":
        for path in tracked("*.md"):
            yield from phrases(path, 1, path.read_text(encoding="utf-8"))
        return
    of_product = folder in PRODUCT
    for source in sources(folder) if of_product else (Source(path, "") for path in tracked(f"{folder}/*.py")):
        for line, words in [*comments(source.text), *strings(source.nodes, all_of_them=of_product)]:
            yield from phrases(source.path, line, words)
        offending = ((node, name) for node, name in names(source.nodes) if name in EMPTY_NAMES)
        yield from (f"{source.where}:{node.lineno} {name}" for node, name in offending)
        for line, words in strings(source.nodes, all_of_them=False):
            if FRAGMENT.match(words):
                yield f"{source.where}:{line} {words[:40]!r}"


def tracked(pattern: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", pattern], cwd=ROOT, capture_output=True, check=True, text=True)
    paths = [ROOT / name for name in listed.stdout.split("\0") if name and not name.startswith("benchmarks/")]
    return [path for path in paths if path.is_file() and path != Path(__file__)]


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def phrases(path: Path, line: int, text: str) -> Iterator[str]:
    """Yield the phrases of a text that begins at a line, also those that a line break divides."""
    for match in PHRASES.finditer(re.sub(r"\s", " ", text)):
        yield f"{where(path, line + text.count(chr(10), 0, match.start()))} {match.group()}"


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield each block of comments with its first line, if the text may have a phrase at all."""
    if not PHRASES.search(re.sub(r"[\s#]+", " ", text)):
        return  # tokens take long
    block, first, last = [], 0, -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row = token.start[0]
            if block and row != last + 1:
                yield first, "\n".join(block)
                block = []
            first = first if block else row
            block.append(token.string.lstrip("# "))
            last = row
    if block:
        yield first, "\n".join(block)


def strings(nodes: Sequence[ast.AST], *, all_of_them: bool) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every docstring, attributes' among them, or of every string."""
    if all_of_them:
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.lineno, node.value
        return
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def names(nodes: Sequence[ast.AST]) -> Iterator[tuple[ast.arg | ast.Name | ast.Attribute, str]]:
    """Yield each parameter, variable and attribute that a module defines, but for those of comprehensions."""
    inner = {id(name) for node in nodes if isinstance(node, ast.comprehension) for name in ast.walk(node.target)}
    for node in nodes:
        if isinstance(node, ast.arg):
            yield node, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in inner:
            yield node, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node, node.attr


EXAMPLE = '''
"""Of what is
multiplied, be
it much or little."""
# Two of
# which are comments.
def function(own, *, ok):
    for place, fine in enumerate([each for each in "ab"]):
        self.found = lambda given: f"so many {place}"
'''


def test_offences_are_found(tmp_path: Path):
    nodes = list(ast.walk(ast.parse(EXAMPLE)))
    assert {name for _, name in names(nodes)} & EMPTY_NAMES == {"own", "given", "place", "found"}
    file = ROOT / "example.py"
    text = [*comments(EXAMPLE), *strings(nodes, all_of_them=True)]
    hits = Counter(hit for line, words in text for hit in phrases(file, line, words))
    assert hits == {"example.py:5 of which": 1, "example.py:3 be it": 1, "example.py:9 so many": 1}
    assert [line for line, words in strings(nodes, all_of_them=False) if FRAGMENT.match(words)] == [2]
