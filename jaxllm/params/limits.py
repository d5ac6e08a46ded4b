"""The bounds of what requests may ask for; every refusal names the one it is about."""

MIN_TEMPERATURE = 1e-2
"""Random sampling at a lower temperature overflows float32 logits; such a temperature is raised to this one."""

MAX_N = 16_384
MAX_STOP_STRINGS = 256
MAX_STOP_LENGTH = 4_096
MAX_STOP_TOKEN_IDS = 4_096
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 4_096
MAX_BAD_WORDS_LENGTH = 16_384
"""Characters of all bad words together: they are tokenized in two spellings before anything else is known of them."""
MAX_BAD_WORD_TOKENS = 1_024
"""Tokens of all bad words together, in both spellings."""
MAX_LOGIT_BIASES = 1_024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_SCORED_ROWS = 2**20
"""More than any context has positions."""
MAX_ALLOWED_TOKEN_IDS = 300_000
"""More than any vocabulary has."""
MAX_GRAMMAR_LENGTH = 2**20
MAX_LOGIT_BIAS = 1e30
"""A larger bias, divided by the lowest temperature and multiplied with the largest penalty, would not be a float32."""
REPETITION_PENALTIES = (1e-3, 1e3)
"""Beyond these, float32 logits overflow sooner or later."""
MAX_PATTERN_SIZE = 1_024
"""Each size up to it is looked for after every token."""
LENGTH_PENALTIES = (-32.0, 32.0)
"""A length of 2**31 raised to these is still a float."""
FLOAT32_MAX = 3.4028234663852886e38

# Structured outputs: what keeps a grammar from exhausting a stack or a minute.

MAX_DEPTH = 10_000
"""Levels of a schema or grammar that can lie inside each other, references followed."""
MAX_JSON_NESTING = 100
"""Brackets inside brackets in JSON text; llguidance refuses some more than that."""
MAX_PARENTHESES = 150
"""Parentheses inside parentheses in regular expressions and grammars."""
MAX_ENUM_VALUES = 2**16
MAX_PROPERTIES = 2_000
"""The most properties of one object. Compiling takes time with their square."""
MAX_SCHEMA_NODES = 200_000
MAX_FORCED_BYTES = 2**16
"""The most bytes that may be the only beginning of a grammar's outputs: each takes half a kilobyte of memory."""
