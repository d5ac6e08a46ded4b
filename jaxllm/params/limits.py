"""Bounds on request parameters. A refusal names the bound."""

MIN_TEMPERATURE = 1e-2
"""Random sampling at a lower temperature overflows float32 logits; such a temperature is raised to this one."""

MAX_N = 16_384
MAX_STOP_STRINGS = 256
MAX_STOP_LENGTH = 4_096
MAX_STOP_TOKEN_IDS = 4_096
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 4_096
MAX_BAD_WORDS_LENGTH = 16_384
"""The most characters of all bad words together: they are tokenized in two spellings before other checks."""
MAX_BAD_WORD_TOKENS = 1_024
"""The most tokens of all bad words together, in both spellings."""
MAX_LOGIT_BIASES = 1_024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_SCORED_ROWS = 2**20
"""More than the positions of any context."""
MAX_ALLOWED_TOKEN_IDS = 300_000
"""More than the ids of any vocabulary."""
MAX_GRAMMAR_LENGTH = 2**20
MAX_LOGIT_BIAS = 1e30
"""A larger bias, divided by the lowest temperature and times the largest penalty, would overflow float32."""
REPETITION_PENALTIES = (1e-3, 1e3)
"""Beyond these, float32 logits can overflow."""
MAX_PATTERN_SIZE = 1_024
"""The longest pattern that repetition detection may look for: it checks every size up to it after each token."""
LENGTH_PENALTIES = (-32.0, 32.0)
"""A length of 2**31 raised to these is still a float."""
FLOAT32_MAX = 3.4028234663852886e38

# Structured outputs: what keeps a grammar from exhausting a stack or a minute.

MAX_DEPTH = 10_000
"""The deepest nesting of a schema or grammar, with references followed."""
MAX_JSON_NESTING = 100
"""The deepest nesting of brackets in JSON text; llguidance's own bound is slightly higher."""
MAX_PARENTHESES = 150
"""The deepest nesting of parentheses in regular expressions and grammars."""
MAX_ENUM_VALUES = 2**16
MAX_PROPERTIES = 2_000
"""The most properties of one object: compile time grows with their square."""
MAX_SCHEMA_NODES = 200_000
MAX_FORCED_BYTES = 2**16
"""The most bytes of a forced beginning of a grammar's outputs: each takes half a kilobyte of memory."""
