"""The patterns with which byte-level vocabularies split text into words, by their names in GGUF files.

The patterns are those of the models' own tokenizers, in the syntax of the tokenizers library. Each pattern splits the
pieces left by the one before: its matches become words, and so does the text between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_SHORT}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_SHORT}|{_WORDS}|\p{{N}}|{_SIGNS}|{_SPACES}"
_QWEN35 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"

_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(
    short: str, digits: str, upper: str = f"[{_UPPER}]", lower: str = f"[{_LOWER}]", ends: str = r"\r\n/"
) -> str:
    """Return the pattern of words that end before a capital letter that follows a small one."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}{upper}*{lower}+{short}|{lead}{upper}+{lower}*{short}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[{ends}]*|{_SPACES}"


_TEKKEN = _cased("", r"\p{N}")
_O200K = _cased(_SHORT + "?", r"\p{N}{1,3}")
_KIMI = r"\p{Han}+|" + _cased(
    _SHORT + "?",
    r"\p{N}{1,3}",
    upper=rf"[[{_UPPER}]&&[^\p{{Han}}]]",
    lower=rf"[[{_LOWER}]&&[^\p{{Han}}]]",
    ends=r"\r\n",
)

_DIGIT, _THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"
_KANA = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_EAST_ASIAN = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_PUNCTUATED = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK3 = rf"{_PUNCTUATED}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
_SPARK = rf"{_PUNCTUATED}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+"
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_DEEPSEEK_LETTERS = (
    r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c88\u2d00-\u2d2d\ua790-\ua7fa\uab30-\uab68"
    r"\x{10570}-\x{105bc}\x{16e40}-\x{16e7f}\x{1d400}-\x{1d7cb}\x{1df00}-\x{1df1e}]]+"
)
_DEEPSEEK_SIGNS = r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_YOUTU_SCRIPTS = (
    r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    rf"\ufe30-\ufe4f]+|[\u3105-\u312f]+|{_KANA}"
)
_AFMOE_SCRIPTS = (
    r"[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    r"\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_EXAONE_MOE = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Splitting:
    """How a byte-level vocabulary splits text before its merges."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """Whether a word in the vocabulary becomes one token without merges."""
    compose: bool = False
    """Whether characters are composed (NFC) first."""
    adds_bos: bool = False
    """Whether a BOS token is added if the file does not specify it."""


_CASCADE = "|".join([*(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1)), r"\s{1,2}(?!\S)|\s"])
_JAIS2 = _LLAMA3.replace(r"\s+(?!\S)|\s+", _CASCADE)
_BAILING = rf"'(?i:[sdmt]|ll|ve|re)|{_WORDS}|\p{{N}}|{_SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = rf"{_SHORT}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_CHAMELEON = (
    "<sentinel:[0-9]+>",
    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    _DIGIT,
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
_TABLE = (
    ("default", Splitting((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    ("gpt-2 phi-2 mpt olmo jais exaone4 trillion granite-docling gigachat a.x-4.0 mellum", Splitting((_GPT2,))),
    ("modern-bert roberta-bpe jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code", Splitting((_GPT2,))),
    ("smollm starcoder refact command-r codeshell minerva-7b exaone mellum2", Splitting((_DIGIT, _GPT2))),
    ("falcon", Splitting((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        Splitting((_LLAMA3,), ignore_merges=True, adds_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", Splitting((_LLAMA3,))),
    ("glm4 glm5", Splitting((_LLAMA3,), ignore_merges=True)),
    ("jais-2", Splitting((_JAIS2,))),
    ("minicpm5", Splitting((_THREE_DIGITS, _LLAMA3.replace("{1,3}", "+")), ignore_merges=True)),
    ("qwen2 deepseek-r1-qwen stablelm2 megrez f2llmv2", Splitting((_QWEN2,), compose=True)),
    ("qwen35", Splitting((_QWEN35,), compose=True)),
    ("hunyuan solar-open grok-2 kormo", Splitting((_QWEN2,))),
    ("laguna", Splitting((r"[^\n]+|\n+", _QWEN2))),
    ("ufakzeka", Splitting((_QWEN2.removeprefix(f"{_SHORT}|"),))),
    ("tekken", Splitting((_TEKKEN,), ignore_merges=True, adds_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", Splitting((_O200K,))),
    ("granite-embed-multi-97m", Splitting((_O200K,), ignore_merges=True)),
    ("tiny_aya cohere2moe", Splitting((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K))),
    ("youtu", Splitting((_YOUTU_SCRIPTS, _cased(_SHORT + "?", _DIGIT)), ignore_merges=True)),
    ("kimi-k2", Splitting((_KIMI,))),
    ("deepseek-llm", Splitting((r"[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_SIGNS, r"\s+$", _EAST_ASIAN, r"\p{N}+"))),
    ("deepseek-coder", Splitting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, _DIGIT))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", Splitting((_THREE_DIGITS, _KANA, _DEEPSEEK3))),
    ("spark2_5", Splitting((_THREE_DIGITS, _KANA, _SPARK, _DIGIT))),
    ("afmoe", Splitting((r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _AFMOE_SCRIPTS, _DEEPSEEK3))),
    ("bailingmoe bailingmoe2 llada-moe", Splitting((_BAILING,))),
    ("seed-coder", Splitting((_SEED,))),
    ("exaone-moe", Splitting((_EXAONE_MOE,))),
    ("superbpe", Splitting((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
    ("bloom gpt3-finnish poro-chat", Splitting((_BLOOM,))),
    ("viking", Splitting((_BLOOM, _DIGIT))),
    ("chameleon", Splitting(_CHAMELEON, adds_bos=True)),
)
SPLITTINGS: Mapping[str, Splitting] = {name: splitting for names, splitting in _TABLE for name in names.split()}
"""The splitting for each value of tokenizer.ggml.pre; "default" for a file without one."""
