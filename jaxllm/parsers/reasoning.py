"""Parse reasoning, which models mark with a text at each end."""

from __future__ import annotations

from typing import NamedTuple

from jaxllm.parsers.incoming import Incoming, Reading
from jaxllm.parsers.mark_suffix import add_suffix
from jaxllm.parsers.pieces import Piece, Reasoning, Text


class ReasoningMarks(NamedTuple):
    """The texts around a model's reasoning."""

    start: str
    end: str
    is_implied: bool = False
    """Whether an output begins with reasoning, as in vLLM's parser, unless its prompt has ended the reasoning."""
    in_text: tuple[str, ...] = ()
    """Marks recognized after the reasoning: a start begins reasoning again, any other is left out."""
    variants: tuple[tuple[str, str], ...] = ()
    """Other texts that stand for `start` and `end`."""

    @property
    def starts(self) -> tuple[str, ...]:
        """Return the texts that begin reasoning."""
        return (self.start, *(start for start, _ in self.variants))

    @property
    def ends(self) -> tuple[str, ...]:
        """Return the texts that end reasoning."""
        return (self.end, *(end for _, end in self.variants))

    def with_suffix(self, suffix: str) -> ReasoningMarks:
        """Return the marks with a checkpoint's suffix (`mark_suffix`)."""
        start, end, *in_text = (add_suffix(mark, suffix) for mark in (self.start, self.end, *self.in_text))
        return self._replace(start=start, end=end, in_text=tuple(in_text))

    def has_begun(self, prompt: str) -> bool | None:
        """Return whether the output after a prompt begins within reasoning; None if its last turn does not tell.

        A turn that the output continues may hold reasoning that is still open, or ended before the prompt's end.
        """
        tail = prompt.rstrip()
        if tail.endswith(self.start):
            return True
        if tail.endswith(self.end):
            return False
        turn = max(tail.rfind(mark) for mark in _TURNS)
        start, end = tail.rfind(self.start, max(turn, 0)), tail.rfind(self.end, max(turn, 0))
        return None if turn < 0 or start == end else start > end


_TURNS = (
    *("<|im_start|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<｜User｜>", "<｜Assistant｜>", "[INST]", "[/INST]", "<|start_header_id|>", "<|eot_id|>"),
    *("<|turn>", "<turn|>", "]~b]", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<seed:bos>", "<seed:eos>"),
    *(
        "<｜hy_User",
        "<｜hy_Assistant",
        "<|START_OF_TURN_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|start_of_role|>",
        "<|end_of_text|>",
    ),
)
"""The marks between the turns of a conversation."""
_QWEN3 = ReasoningMarks("<think>", "</think>", is_implied=True, in_text=("</think>",))
_BY_PROMPT = ReasoningMarks("<think>", "</think>")
"""Reasoning where the prompt or the answer begins it."""
_COHERE = ReasoningMarks(
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    in_text=("<|START_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)
MARKS = {
    "qwen3": _QWEN3,
    **dict.fromkeys(("minimax_m2", "kimi_k2", "nemotron_v3", "step3p5", "mimo", "exaone4"), _QWEN3),
    "granite_thinking_parser": _QWEN3,
    "deepseek_r1": ReasoningMarks("<think>", "</think>", is_implied=True),
    **dict.fromkeys(("deepseek_v3", "deepseek_v4", "hy_v3", "olmo3"), _BY_PROMPT),
    **dict.fromkeys(
        ("glm45", "glm47"), ReasoningMarks("<think>", "</think>", is_implied=True, in_text=("<think>", "</think>"))
    ),
    "ernie45": _QWEN3._replace(in_text=("</think>", "<response>", "</response>")),
    "hunyuan_a13b": _BY_PROMPT._replace(in_text=("<answer>\n", "\n</answer>")),
    "mistral": ReasoningMarks("[THINK]", "[/THINK]", in_text=("[THINK]", "[/THINK]")),
    "seed_oss": ReasoningMarks("<seed:think>", "</seed:think>", is_implied=True, in_text=("</seed:think>",)),
    "gemma4": ReasoningMarks("<|channel>thought", "<channel|>", in_text=("<|channel>thought", "<channel|>")),
    **dict.fromkeys(("cohere_command3", "cohere_command4"), _COHERE),
    "granite": ReasoningMarks(
        "Here is my thought process:",
        "Here is my response:",
        variants=(("Here's my thought process:", "Here's my response:"),),
    ),
}
"""The marks by parser name."""
HARMONY = "openai_gptoss"
"""The parser of gpt-oss, whose reasoning and calls are channels: it is in tools/openai.py, and reads both."""
AUTO = "auto"
"""The name for the parser that a chat template implies."""
REASONING_PARSERS = (AUTO, *MARKS, HARMONY)


def marks_of(name: str) -> ReasoningMarks:
    """Return the marks of a parser, to whose name a suffix of the checkpoint's marks may be added."""
    parser, colon, suffix = name.partition(":")
    return MARKS[parser].with_suffix(colon + suffix) if suffix else MARKS[parser]


class MarkedReasoning:
    """Splits text into reasoning between two marks and the rest, as a `pieces.StreamParser`.

    Reasoning is at the beginning, and in the text if its marks are `in_text`. A repeated start is left out. White
    space around the reasoning is dropped.
    """

    def __init__(self, marks: ReasoningMarks, *, has_begun: bool | None) -> None:
        """Read text that begins within reasoning or not; None if a mark at its beginning decides."""
        self._marks, self._has_begun = marks, has_begun
        self.is_open = False
        """Whether the parser is within reasoning."""
        self._incoming = Incoming()
        self._pieces: list[Piece] = []
        self._space: list[str] | None = None
        """White space at the end of the reasoning so far; None before any text."""
        self._reading = self._read()

    def feed(self, text: str) -> list[Piece]:
        """Add text and return the pieces that became certain."""
        self._incoming.add(text)
        return self._advance()

    def finish(self) -> list[Piece]:
        """Return the remaining pieces once the output has ended."""
        self._incoming.is_ended = True
        return self._advance()

    def _advance(self) -> list[Piece]:
        next(self._reading, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _read(self) -> Reading[None]:
        incoming, starts, both = self._incoming, self._marks.starts, self._marks.starts + self._marks.ends
        has_begun = self._has_begun
        self.is_open = (yield from incoming.take_any_spaced(starts)) is not None if has_begun is None else has_begun
        mark: str | None = starts[0]
        while mark is not None:
            if self.is_open:
                while mark in starts:
                    mark = yield from incoming.until(both, self._show_reasoning)
                self._space, self.is_open = None, mark is None
                yield from incoming.skip_space()
            mark = yield from incoming.until(self._marks.in_text, self._show_text)
            self.is_open = self.is_open or mark in starts

    def _show_reasoning(self, text: str) -> None:
        """Show reasoning without the white space around it."""
        text = text.lstrip() if self._space is None else text
        shown = text.rstrip()
        if shown:
            self._pieces.append(Reasoning("".join(self._space or ()) + shown))
            self._space = []
        if self._space is not None:
            self._space.append(text[len(shown) :])

    def _show_text(self, text: str) -> None:
        self._pieces.append(Text(text))
