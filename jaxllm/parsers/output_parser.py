"""An output's reasoning is split off first; calls are looked for in the rest."""

from __future__ import annotations

from jaxllm.parsers.pieces import Piece, StreamParser, Text, merge


class OutputParser:
    """This takes one output apart, as `pieces.StreamParser` says."""

    def __init__(self, reasoning: StreamParser | None, tools: StreamParser | None) -> None:
        """Split with `reasoning`, whose text `tools` reads; without either the text passes as it is."""
        self._reasoning, self._tools = reasoning, tools

    def feed(self, text: str) -> list[Piece]:
        """Add text and return the pieces that became certain."""
        return merge(self._read(self._reasoning.feed(text) if self._reasoning else [Text(text)]))

    def finish(self) -> list[Piece]:
        """Return what is left once the output has ended."""
        pieces = self._read(self._reasoning.finish()) if self._reasoning else []
        return merge(pieces + (self._tools.finish() if self._tools else []))

    def _read(self, pieces: list[Piece]) -> list[Piece]:
        if self._tools is None:
            return pieces
        read: list[Piece] = []
        for piece in pieces:
            read += self._tools.feed(piece.text) if isinstance(piece, Text) else [piece]
        return read
