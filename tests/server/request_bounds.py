"""The bounds of each field of the routes' requests, as JSON texts: accepted and refused values."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

LONG = '"' + "a" * 10_000_000 + '"'
"""A text of 10 MB."""
ANYWHERE = ("-1", "2147483648", "9223372036854775808", "1e999", "NaN", '""', "[]", LONG)
"""Values to try with each field."""


class Bound(NamedTuple):
    """The bounds of one field."""

    most: str
    """The largest accepted value, or any accepted value if there is no largest."""
    beyond: tuple[str, ...] = ()
    """The next values, which must be refused."""
    takes: tuple[str, ...] = ()
    """The values of ANYWHERE that are accepted."""
    beside: Mapping[str, str] = MappingProxyType({})
    """Further fields that the largest value needs."""


def integers(num: int, value: int = 5) -> str:
    """Return a list of one integer, many times."""
    return "[" + ",".join([str(value)] * num) + "]"


def texts(num: int) -> str:
    """Return a list of different texts."""
    return "[" + ",".join(f'"{number}"' for number in range(num)) + "]"


def nested(depth: int) -> str:
    """Return lists in lists in an object."""
    return '{"a":' + "[" * depth + "]" * depth + "}"


FLAG = Bound("true", ("2", '"maybe"'))
NAME = Bound('"a"', ("1", "{}"), ('""', LONG))
"""A text that has no effect on the answer."""
TEMPLATE_TRUST = Bound("null", ('"{{ 1 }}"',))
CHAT_ALL = '[{"role":"user","content":"a"}]'
FORMAT = '{"type":"json_schema","json_schema":{"schema":%s}}'
MANY_BIASES = "{" + ",".join(f'"{number}":1' for number in range(1025)) + "}"

OF_MEDIA = dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), Bound("{}", ('{"a":1}', "1")))
"""Options of images and videos, which models that read text alone do not have."""
SAMPLING: dict[str, Bound] = {
    "model": Bound('"tiny"', ("1",)),
    "n": Bound("16", ("0", "16385", "1.5")),
    "best_of": Bound("1", ("0", "2", "1.5")),
    "temperature": Bound("2", ("2.0001", "-0.0001")),
    "top_p": Bound("1", ("1.0001", "0")),
    "top_k": Bound("2147483647", ("-2",), ("-1",)),
    "min_p": Bound("1", ("1.0001",)),
    "presence_penalty": Bound("2", ("2.0001", "-2.0001"), ("-1",)),
    "frequency_penalty": Bound("2", ("2.0001", "-2.0001"), ("-1",)),
    "repetition_penalty": Bound("1000", ("1000.1", "0")),
    "seed": Bound(str(2**64 - 1), (str(2**64), str(-(2**63) - 1)), ("-1", "2147483648", "9223372036854775808")),
    "stop": Bound(texts(256), (texts(257), '["' + "a" * 4097 + '"]', '[""]', "[1]"), ("[]",)),
    "stop_token_ids": Bound(integers(4096), (integers(4097), "[-1]", "[256]", "[true]"), ("[]",)),
    "max_tokens": Bound("2147483647", ("0",), (), {"stop_token_ids": integers(1), "n": "1"}),
    "min_tokens": Bound("5", ("6", "511")),
    "ignore_eos": FLAG,
    "include_stop_str_in_output": FLAG,
    "skip_special_tokens": FLAG,
    "spaces_between_special_tokens": FLAG,
    "logit_bias": Bound('{"255":1e30}', (MANY_BIASES, '{"5":1.1e30}', '{"256":1}', '{"-1":1}', '{"a":1}', '{"5":"a"}')),
    "allowed_token_ids": Bound(integers(300_000), (integers(300_001), "[-1]", "[256]", "[1.5]")),
    "bad_words": Bound(texts(128), (texts(129), '["' + "a" * 4097 + '"]', '[" "]', '[""]'), ("[]",)),
    "thinking_token_budget": Bound("-1", ("-2", "2147483647"), ("-1",)),
    "repetition_detection": Bound(
        '{"max_pattern_size":1024,"min_count":2}', ('{"max_pattern_size":1025,"min_count":2}', '{"a":1}')
    ),
    "structured_outputs": Bound("null", ("{}", '{"regex":""}', '{"a":1}', '{"json":{},"regex":"a"}')),
    "response_format": Bound(
        '{"type":"text"}', ("{}", '{"type":"json_schema"}', FORMAT % '{"type":"nothing"}', FORMAT % nested(120))
    ),
    "truncate_prompt_tokens": Bound("512", ("0", "513", "-2"), ("-1",)),
    "truncation_side": Bound('"left"', ('"up"',)),
    "add_special_tokens": FLAG,
    "use_beam_search": FLAG._replace(beside={"ignore_eos": "true"}),
    "length_penalty": Bound("32", ("33", "-33"), ("-1",), {"use_beam_search": "true"}),
    "stream": FLAG,
    "stream_options": Bound('{"include_usage":true}', ('{"include_usage":2}',), (), {"stream": "true"}),
    "stream_interval": Bound("2147483647", ("0",)),
    "return_token_ids": FLAG,
    "return_tokens_as_token_ids": FLAG,
    "cache_salt": Bound('"a"', ("1",), (LONG,)),
    "priority": Bound("0", ("1", "-2147483649")),
    "request_id": NAME,
    "session_id": NAME,
    "vllm_xargs": Bound(f'{{"a":{2**64 - 1}}}', (f'{{"a":{2**64}}}',)),
    "user": NAME,
}
CHAT: dict[str, Bound] = SAMPLING | {
    **OF_MEDIA,
    "messages": Bound(CHAT_ALL, ("[1]", "[{}]", '[{"role":"user","content":1}]', CHAT_ALL.replace('"a"', LONG), "[]")),
    "max_completion_tokens": Bound("2147483647", ("0",), (), {"stop_token_ids": integers(1)}),
    "logprobs": FLAG,
    "top_logprobs": Bound("20", ("21",), (), {"logprobs": "true"}),
    "prompt_logprobs": Bound("null", ("21", "-2")),
    "logprob_token_ids": Bound("null", (integers(129), "[-1]", "[256]"), ("[]",), {"logprobs": "true"}),
    "echo": FLAG,
    "add_generation_prompt": FLAG,
    "continue_final_message": FLAG._replace(beside={"add_generation_prompt": "false"}),
    "chat_template": TEMPLATE_TRUST,
    "chat_template_kwargs": Bound(
        nested(150), ('{"chat_template":"a"}', '{"tokenize":true}', '{"conversation":[]}', "1")
    ),
    "documents": Bound("[{}]", ("[1]", "1"), ("[]",)),
    "reasoning_effort": NAME,
    "tools": Bound("[]", ('[{"type":"function"}]', "[1]"), ("[]",)),
    "tool_choice": Bound('"auto"', ('"required"', "1", "{}")),
    "modalities": Bound('["text"]', ('["audio"]', '["text","text"]')),
    "return_prompt_text": FLAG,
    "include_reasoning": FLAG,
    "parallel_tool_calls": FLAG,
    "metadata": Bound(nested(150), ("1",)),
    "store": FLAG,
    "service_tier": NAME,
    "safety_identifier": NAME,
    "prompt_cache_key": NAME,
}
ANTHROPIC: dict[str, Bound] = {
    **{name: SAMPLING[name] for name in ("model", "temperature", "top_p", "top_k", "stream")},
    "messages": CHAT["messages"],
    "max_tokens": Bound("2147483647", ("0", "1.5", "null")),
    "system": Bound('[{"type":"text","text":"a"}]', ("1", "{}", "[1]", '[{"type":"image"}]'), ('""', "[]")),
    "stop_sequences": SAMPLING["stop"],
    "tools": Bound("[]", ("[1]", '[{"name":1}]', "[{}]"), ("[]",)),
    "tool_choice": Bound(
        '{"type":"auto"}',
        ('"auto"', '{"type":"maybe"}', '{"type":[]}', '{"type":"tool","name":"b"}'),
        (),
        {"tools": '[{"name":"a","input_schema":{"type":"object"}}]'},
    ),
    "thinking": Bound(
        '{"type":"enabled","budget_tokens":2147483647}',
        ('{"type":"loud"}', '{"type":[]}', '{"type":"enabled","budget_tokens":0}', "1"),
    ),
    "output_config": Bound(
        '{"effort":"max"}',
        ('{"effort":"huge"}', '{"effort":[]}', '{"format":1}', '{"format":{"type":"json_schema"}}', "1"),
    ),
    "metadata": Bound(nested(150), ("1",)),
    "cache_salt": SAMPLING["cache_salt"],
    "vllm_xargs": SAMPLING["vllm_xargs"],
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
}
OBJECT_FORMAT = '{"type":"json_object","json_schema":%s}'
COHERE_CHAT: dict[str, Bound] = {
    **{name: SAMPLING[name] for name in ("model", "stream", "temperature", "seed", "priority", "max_tokens")},
    **{name: SAMPLING[name] for name in ("presence_penalty", "frequency_penalty")},
    "messages": CHAT["messages"],
    "max_tokens": SAMPLING["max_tokens"]._replace(beside={}),
    "stop_sequences": SAMPLING["stop"],
    "k": SAMPLING["top_k"],
    "p": SAMPLING["top_p"],
    "logprobs": FLAG,
    "tools": CHAT["tools"],
    "strict_tools": FLAG,
    "tool_choice": Bound('"NONE"', ('"REQUIRED"', '"none"', "1", "{}")),
    # This model's chat template shows no documents and has no safety mode.
    "documents": Bound("[]", ('["a"]', "[1]", "1", "[{}]", '[{"data":1}]', '[{"data":{},"id":1}]'), ("[]",)),
    "citation_options": Bound('{"mode":"OFF"}', ('{"mode":"FAST"}', '{"mode":1}', "1")),
    "response_format": Bound(
        '{"type":"text"}',
        (
            *(
                "{}",
                '{"type":"json_schema"}',
                '{"type":"text","json_schema":{}}',
                '{"type":"json_object","json_schema":1}',
            ),
            OBJECT_FORMAT % '{"type":"nothing"}',
            OBJECT_FORMAT % nested(120),
        ),
    ),
    "safety_mode": Bound('"OFF"', ('"STRICT"', '"CONTEXTUAL"', '"off"', "1")),
    "thinking": Bound(
        '{"type":"disabled","token_budget":2147483647}',
        ("{}", '{"type":"loud"}', '{"type":"disabled","token_budget":0}', '{"type":"enabled","token_budget":5}', "1"),
    ),
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
}
TOKENIZE: dict[str, Bound] = {
    **OF_MEDIA,
    "model": Bound('"tiny"', ("1",)),
    "prompt": Bound('"%s"' % ("a" * 4096), ('"%s"' % ("a" * 4097), "1"), ('""',)),
    "messages": CHAT["messages"],
    "add_special_tokens": FLAG,
    "return_token_strs": FLAG,
    "add_generation_prompt": FLAG,
    "continue_final_message": FLAG,
    "chat_template": TEMPLATE_TRUST,
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
    **{name: CHAT[name] for name in ("documents", "reasoning_effort", "tools", "tool_choice")},
}
DETOKENIZE: dict[str, Bound] = {
    "model": Bound('"tiny"', ("1",)),
    "tokens": Bound(integers(2**20, 42), (integers(2**20 + 1), "[256]", "[-1]", "[1.5]", '["a"]'), ("[]",)),
}

POOLED: dict[str, Bound] = {
    name: SAMPLING[name]
    for name in ("model", "truncate_prompt_tokens", "truncation_side", "add_special_tokens", "cache_salt", "priority")
} | {"request_id": NAME, "user": NAME, "use_activation": FLAG}
INPUTS: dict[str, Bound] = POOLED | {
    **OF_MEDIA,
    "input": Bound(texts(2048), (texts(2049), "[]", "[[]]", "[1,[2]]", "[256]", "[[1.5]]", "[[1,{}]]", "{}", "[{}]")),
    "messages": CHAT["messages"],
    "add_generation_prompt": FLAG,
    "continue_final_message": FLAG,
    "chat_template": TEMPLATE_TRUST,
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
}
VECTORS: dict[str, Bound] = INPUTS | {
    "dimensions": Bound("2147483647", ("0", "1.5")),
    "encoding_format": Bound('"base64"', ('"numbers"', "1")),
    "embed_dtype": Bound('"fp8_e4m3"', ('"float8"', "1"), (), {"encoding_format": '"base64"'}),
    "endianness": Bound('"big"', ('"middle"', "1"), (), {"encoding_format": '"base64"'}),
}
EMBEDDINGS: dict[str, Bound] = VECTORS | {
    # This model has no prompts.
    "task": Bound("null", ('"retrieval.query"', "1")),
    "late_chunking_params": Bound(
        '{"chunk_size":9223372036854775807}', ('{"chunk_size":0}', '{"chunk_size":1.5}', "{}", "1")
    ),
}
POOLING: dict[str, Bound] = VECTORS | {
    "task": Bound('"token_embed"', ('"classify"', '"score"', "1")),
    # This model does not read queries and documents in forms of their own.
    "prompt_name": Bound("null", ('"query"', '"document"', '"title"', "1"), (), {"task": '"token_embed"'}),
}
SIDE = Bound("null", ("1", "{}", '[{"title":"a"}]'))
SCORES: dict[str, Bound] = POOLED | {
    "max_tokens_per_query": Bound("511", ("512",)),
    "max_tokens_per_doc": Bound("511", ("512",)),
    "instruction": Bound("null", ('"a"', "1"), ('""',)),
    "chat_template_kwargs": Bound("{}", ('{"a":1}', "1")),
}
SCORE: dict[str, Bound] = SCORES | {
    "text_1": Bound(texts(1), ("1", "{}", '[{"title":"a"}]', texts(2049))),
    "text_2": Bound(texts(2048), ("1", "{}", '[{"title":"a"}]', texts(2049))),
}
RERANK: dict[str, Bound] = SCORES | {
    "query": Bound('{"text":"a"}', ("1", "{}", '{"content":[]}')),
    "documents": Bound(texts(2048), (texts(2049), "1", "{}", '[{"title":"a"}]')),
    "top_n": Bound("2147483647", ("-1",)),
    "return_documents": FLAG,
}
COHERE: dict[str, Bound] = POOLED | {
    "truncate_prompt_tokens": Bound("null", ("5",)),
    "truncation_side": Bound("null", ('"left"',)),
    "texts": Bound(texts(2048), (texts(2049), '"a"', "[[5]]", '[""]')),
    "input_type": Bound('"search_document"', ('"poem"', "1")),
    "output_dimension": Bound("2147483647", ("0",)),
    "embedding_types": Bound('["float","base64","binary","ubinary"]', ('["int8"]', '"float"'), ("[]",)),
    "truncate": Bound('"START"', ('"MIDDLE"', "1")),
    "max_tokens": Bound("512", ("513", "0", "-2"), ("-1",)),
}

SHORT_NAME = NAME._replace(most='"%s"' % ("a" * 1024), beyond=(*NAME.beyond, '"%s"' % ("a" * 1025)), takes=('""',))
"""A text that has no effect on the answer, and is repeated in it."""
SCHEMA_FORMAT = '{"format":{"type":"json_schema","name":"a","schema":%s}}'
ITEM = '{"role":"user","content":%s}'
RESPONSES: dict[str, Bound] = {
    name: bound
    for name, bound in SAMPLING.items()
    if name
    not in (
        *("n", "best_of", "max_tokens", "response_format", "use_beam_search", "length_penalty", "stream_options"),
        *("stream_interval", "return_token_ids", "return_tokens_as_token_ids"),
    )
} | {
    **OF_MEDIA,
    "input": Bound(
        f"[{ITEM % '[]'}]", ("[1]", "[{}]", f"[{ITEM % 1}]", f"[{ITEM % LONG}]", '[{"type":"x"}]', "{}"), ('""',)
    ),
    "instructions": Bound('"a"', ("1", '"%s"' % ("a" * (2**20 + 1))), ('""',)),
    "previous_response_id": Bound("null"),
    "store": FLAG,
    "background": FLAG,
    "stream_options": Bound('{"include_obfuscation":true}', ('{"include_obfuscation":2}',), (), {"stream": "true"}),
    "tools": Bound('[{"type":"web_search"}]', ('[{"type":"function"}]', "[{}]", "[1]"), ("[]",)),
    "tool_choice": CHAT["tool_choice"],
    "parallel_tool_calls": FLAG,
    "max_tool_calls": Bound("2147483647"),
    "text": Bound(
        '{"format":{"type":"text"},"verbosity":"low"}',
        (
            *('{"verbosity":"loud"}', '{"format":{}}', '{"format":{"type":"x"}}', '{"format":{"type":"json_schema"}}'),
            SCHEMA_FORMAT % '{"type":"nothing"}',
            SCHEMA_FORMAT % nested(120),
        ),
    ),
    "reasoning": Bound('{"effort":"low","summary":"auto"}', ('{"effort":1}', '{"effort":"%s"}' % ("a" * 1025))),
    "max_output_tokens": Bound("2147483647", ("0",), (), {"stop_token_ids": integers(1)}),
    "top_logprobs": Bound("20", ("21", "-2", "-1"), ("0",), {"include": '["message.output_text.logprobs"]'}),
    "include": Bound('["message.output_text.logprobs","reasoning.encrypted_content"]', ('["a"]', "[1]"), ("[]",)),
    "truncation": Bound('"auto"', ('"never"',)),
    "metadata": Bound(
        f'{{"{"a" * 64}":"{"a" * 512}"}}',
        (
            '{"a":1}',
            '{"%s":""}' % ("a" * 65),
            '{"a":"%s"}' % ("a" * 513),
            "{" + ",".join(f'"{i}":""' for i in range(17)) + "}",
        ),
    ),
    "user": SHORT_NAME,
    "service_tier": SHORT_NAME,
    "safety_identifier": SHORT_NAME,
    "prompt_cache_key": SHORT_NAME,
    "prompt_cache_retention": SHORT_NAME,
    "prompt_cache_options": Bound(
        '{"mode":"explicit","ttl":"30m"}', ("1", '{"mode":"loud"}', '{"comparison_response_id":"%s"}' % ("a" * 1025))
    ),
    "include_reasoning": FLAG,
    "chat_template": TEMPLATE_TRUST,
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
}
GENERATE: dict[str, Bound] = {
    **{name: SAMPLING[name] for name in ("model", "stream", "stream_options", "cache_salt", "priority", "request_id")},
    "token_ids": Bound(integers(500), ("[256]", "[-1]", "[1.5]", "5", integers(513))),
    "sampling_params": Bound('{"max_tokens":2}', ("1", '{"top_q":1}', '{"max_tokens":0}')),
}
SCORED_ITEMS: dict[str, Bound] = {
    name: POOLED[name]
    for name in ("model", "truncate_prompt_tokens", "truncation_side", "cache_salt", "priority", "request_id", "user")
} | {
    "add_special_tokens": FLAG,
    "query": Bound(integers(400), ("1", "{}", "[256]", "[-1]"), ('""', "[]")),
    "items": Bound(texts(16), (texts(1025), "1", "{}", "[1]", '["a",[5]]', "[[256]]")),
    "label_token_ids": Bound(integers(128), (integers(129), "[256]", "[-1]", "[1.5]")),
    "apply_softmax": FLAG,
    "item_first": FLAG,
}
NOUL = '{"a":{"type":"noul"}}'
CHOICES = '[{"type":"choice","instructions":"a","choices":[%s]}]'
VALUES = [",".join(f'{{"value":"{number}"}}' for number in range(num)) for num in (30, 256)]
CRITERIA = [
    '{"a":{"type":"choice","criteria":' + "{" + each + "}}}"
    for each in (",".join(f'"{number}":null' for number in range(num)) for num in (30, 256))
]
DECIDED: dict[str, Bound] = {
    name: bound for name, bound in SAMPLING.items() if name in ("model", "cache_salt", "priority", "request_id", "user")
} | {
    "instructions": Bound('"a"', ("1",), ('""',)),
    "calibrate": FLAG,
    "num_orders": Bound("255", ("0", "256", "1.5")),
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
}
SYSTEMONE: dict[str, Bound] = DECIDED | {
    "state": Bound(nested(150), ("null", "true"), ('""', "[]")),
    "questions": Bound(
        CRITERIA[0],
        (
            *("{}", "[]", "1", '{"":{"type":"noul"}}', '{"a":{"type":"box"}}', '{"a":{"type":"choice"}}'),
            '{"a":{"type":"noul","weight":1}}',
            CRITERIA[1],
            '{"a":{"type":"score","criteria":["b"]}}',
            "{" + ",".join(f'"{number}":{{"type":"noul"}}' for number in range(201)) + "}",
        ),
    ),
    "images": Bound("[]", ('["data:image/png;base64,AA"]', "1", "[1]", '[{"base64":"a"}]'), ("[]",)),
}
DECISION: dict[str, Bound] = DECIDED | {
    "input": Bound(
        '[{"role":"user","content":[{"type":"input_text","text":"a"}]}]',
        (
            *("[]", "[1]", "[{}]", '[{"role":"system","content":"a"}]', '[{"role":"user"}]'),
            '[{"role":"user","content":[{"type":"input_image","image_url":"a"}]}]',
        ),
        ('""',),
    ),
    "questions": Bound(
        CHOICES % VALUES[0],
        (
            *("{}", "[1]", "[{}]", '[{"type":"predicate"}]', '[{"type":"noul","instructions":"a"}]'),
            *(CHOICES % VALUES[1], CHOICES % '{"value":"a"}', CHOICES % '{"value":"a"},{"value":"a"}'),
            *(CHOICES % '{"value":1},{"value":2}', '[{"type":"score","instructions":"a","levels":[{"label":"b"}]}]'),
            "[" + ",".join(['{"type":"predicate","instructions":"a"}'] * 201) + "]",
        ),
    ),
    "safety_identifier": NAME,
}
