"""The effect of each field of each request: a visible one, a refusal by name, or none, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxllm.server.anthropic.protocol import MESSAGES_REFUSED, MessagesRequest
from jaxllm.server.cohere.protocol import COHERE_CHAT_REFUSED, CohereChatRequest
from jaxllm.server.decisions.openai_protocol import DECISIONS_REFUSED, DecisionRequest
from jaxllm.server.decisions.systemone_protocol import SYSTEMONE_REFUSED, SystemOneRequest
from jaxllm.server.ollama.protocol import (
    OLLAMA_REFUSED,
    OllamaChatRequest,
    OllamaEmbeddingRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from jaxllm.server.openai.chat_protocol import CHAT_REFUSED, ChatCompletionRequest
from jaxllm.server.openai.completion_protocol import COMPLETION_REFUSED, CompletionRequest
from jaxllm.server.openai.tokenization_protocol import DetokenizeRequest, TokenizeRequest
from jaxllm.server.pooling.classification_protocol import ClassificationRequest
from jaxllm.server.pooling.cohere_protocol import COHERE_REFUSED, CohereEmbedRequest
from jaxllm.server.pooling.embedding_protocol import EmbeddingRequest
from jaxllm.server.pooling.pooling_protocol import POOLED_REFUSED, PoolingRequest
from jaxllm.server.pooling.scoring_protocol import RERANK_REFUSED, SCORE_REFUSED, RerankRequest, ScoreRequest
from jaxllm.server.responses.request import RESPONSES_REFUSED, ResponsesRequest
from jaxllm.server.tokens.protocol import TOKENS_REFUSED, GenerateRequest
from jaxllm.server.tokens.scoring import GenerativeScoringRequest
from tests.server.tool_support import TOOL, WEATHER


class Effect(NamedTuple):
    """A value that changes the engine's request or the answer."""

    value: Any
    beside: Mapping[str, Any] = {}
    """Further fields, in both requests; a value of None leaves one out."""


class Refusal(NamedTuple):
    """A value that is refused with an error that names the field."""

    value: Any
    beside: Mapping[str, Any] = {}


class Nothing(NamedTuple):
    """A value that changes nothing, with the reason."""

    value: Any
    why: str
    beside: Mapping[str, Any] = {}


type Entry = Effect | Refusal | Nothing


class Requests(NamedTuple):
    """The requests of one route."""

    kind: Any
    good: Mapping[str, Any]
    fields: Mapping[str, Entry]
    refused: Mapping[str, str] = {}
    vllm: str = ""
    """The names of the fields that vLLM 0.33 has there."""


LABEL = "it is a name that nothing here depends on"
CLIENT = "it says something of the client"
STAYS = "the model stays"
USER, OTHER = {"role": "user", "content": "think and call?"}, {"role": "user", "content": "21 degrees"}
BEGUN = {"messages": [USER, {"role": "assistant", "content": "So"}], "add_generation_prompt": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
MEDIA: dict[str, Entry] = {
    "mm_processor_kwargs": Refusal({"max_pixels": 9}),
    "media_io_kwargs": Refusal({"video": {"num_frames": 2}}),
}
"""What a model that takes text alone refuses; `test_media.py` has one that sees."""
FLAT_TOOL = {"type": "function", **WEATHER}
PROMPT: dict[str, Entry] = {
    "model": Refusal("nothing"),
    "truncate_prompt_tokens": Effect(3),
    "truncation_side": Effect("right", {"truncate_prompt_tokens": 3}),
    "cache_salt": Effect("a"),
    "priority": Effect(1),
    "user": Nothing("a", CLIENT),
}
TOKENS: dict[str, Entry] = PROMPT | {
    "temperature": Effect(0.5),
    "top_p": Effect(0.5),
    "top_k": Effect(5),
    "min_p": Effect(0.1),
    "presence_penalty": Effect(1.0),
    "frequency_penalty": Effect(1.0),
    "repetition_penalty": Effect(2.0),
    "seed": Effect(8),
    "stop": Effect(["x"]),
    "stop_token_ids": Effect([5]),
    "min_tokens": Effect(2),
    "ignore_eos": Effect(True),
    "include_stop_str_in_output": Effect(True),
    "spaces_between_special_tokens": Effect(False),
    "logit_bias": Effect({"5": 1.0}),
    "allowed_token_ids": Effect([5, 6]),
    "bad_words": Effect(["x"]),
    "thinking_token_budget": Refusal(5),
    "repetition_detection": Effect({"max_pattern_size": 3, "min_count": 2}),
    "structured_outputs": Effect({"regex": "a"}),
    "vllm_xargs": Effect({"a": 1}),
    "session_id": Nothing("a", LABEL),
}
SAMPLING: dict[str, Entry] = TOKENS | {
    "request_id": Effect("mine"),
    "n": Effect(2),
    "best_of": Refusal(2),
    "max_tokens": Effect(3),
    "prompt_logprobs": Effect(1),
    "logprob_token_ids": Effect([5, 6], {"logprobs": 1}),
    "response_format": Effect(FORMAT),
    "stream": Effect(True),
    "stream_options": Effect({"include_usage": True}, {"stream": True}),
    "stream_options.include_usage": Effect(True, {"stream": True}),
    "stream_options.continuous_usage_stats": Effect(
        {"include_usage": True, "continuous_usage_stats": True},
        {"stream": True, "stream_options": {"include_usage": True}},
    ),
    "stream_interval": Effect(4),
    "return_token_ids": Effect(True),
    "return_tokens_as_token_ids": Effect(True, {"logprobs": 1}),
}
CHAT: dict[str, Entry] = (
    SAMPLING
    | MEDIA
    | {
        "messages": Effect([OTHER]),
        "max_completion_tokens": Effect(3),
        "logprobs": Effect(True),
        "top_logprobs": Effect(2, {"logprobs": True}),
        "skip_special_tokens": Nothing(
            False, "where marks of calls are special tokens, they are shown to what reads them"
        ),
        "add_special_tokens": Effect(True),
        "echo": Effect(True, BEGUN),
        "add_generation_prompt": Effect(False),
        "continue_final_message": Effect(True, BEGUN),
        "chat_template": Effect("another{{ messages[0].content }}"),
        "chat_template_kwargs": Effect({"flavour": "sweet"}),
        "documents": Effect([{"text": "a"}]),
        "reasoning_effort": Effect("low"),
        "tools": Effect([TOOL]),
        "tool_choice": Effect("none", {"tools": [TOOL]}),
        "parallel_tool_calls": Effect(False, {"tools": [TOOL]}),
        "include_reasoning": Effect(False),
        "modalities": Refusal(["text", "audio"]),
        "return_prompt_text": Effect(True),
        "use_beam_search": Effect(True),
        "length_penalty": Effect(2.0, {"use_beam_search": True}),
        "metadata": Nothing({"a": "b"}, LABEL),
        "store": Nothing(True, "completions are not kept"),
        "service_tier": Nothing("auto", "there is one tier"),
        "safety_identifier": Nothing("a", CLIENT),
        "prompt_cache_key": Nothing("a", "prompts are found by what they are"),
    }
)
COMPLETION: dict[str, Entry] = SAMPLING | {
    "prompt": Effect("other"),
    "prompt_embeds": Refusal("AAAA"),  # openai/test_prompt_embeds.py has an engine that takes some
    "logprobs": Effect(2),
    "echo": Effect(True),
    "skip_special_tokens": Effect(False),
    "add_special_tokens": Effect(False),
    "use_beam_search": Refusal(True),
    "length_penalty": Refusal(2.0),
}
REPEATED = ("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "user", "service_tier")
RESPONSES: dict[str, Entry] = (
    TOKENS
    | MEDIA
    | {
        "input": Effect("21 degrees"),
        "request_id": Nothing("mine", "a response has an id of its own, by which it is kept"),
        "skip_special_tokens": CHAT["skip_special_tokens"],
        "add_special_tokens": Effect(True),
        "instructions": Effect("be brief"),
        "previous_response_id": Refusal("resp_nothing"),
        "store": Effect(False),
        "background": Effect(True),
        "stream": Effect(True),
        "stream_options": Refusal({"include_obfuscation": True}),
        "stream_options.include_obfuscation": Nothing(True, "events are as long as they are", {"stream": True}),
        "tools": Effect([FLAT_TOOL]),
        "tool_choice": Effect("none", {"tools": [FLAT_TOOL]}),
        "parallel_tool_calls": Effect(False, {"tools": [FLAT_TOOL]}),
        "max_tool_calls": Effect(3),
        "text": Effect({"verbosity": "low"}),
        "text.verbosity": Effect("low"),
        "text.format": Effect({"type": "json_schema", "name": "a", "schema": {"type": "object"}}),
        "text.format.type": Refusal("poem"),
        "text.format.name": Effect({"type": "text", "name": "b"}, {"text": {"format": {"type": "text", "name": "a"}}}),
        "text.format.description": Effect({"type": "text", "description": "b"}, {"text": {"format": {"type": "text"}}}),
        "text.format.strict": Effect({"type": "text", "strict": True}, {"text": {"format": {"type": "text"}}}),
        "text.format.schema": Effect(
            {"type": "json_schema", "schema": {"type": "object", "title": "a"}},
            {"text": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        ),
        "reasoning": Effect({"effort": "low"}),
        "reasoning.effort": Effect("low"),
        "reasoning.summary": Effect("auto"),
        "include_reasoning": Effect(False),
        "max_output_tokens": Effect(3),
        "top_logprobs": Effect(2, {"include": ["message.output_text.logprobs"]}),
        "include": Effect(["message.output_text.logprobs"]),
        "truncation": Effect("auto"),
        "metadata": Effect({"a": "b"}),
        **{name: Effect("flex") for name in REPEATED},
        "prompt_cache_options": Effect({"mode": "explicit"}),
        "prompt_cache_options.mode": Effect("explicit"),
        "prompt_cache_options.ttl": Refusal("1h"),
        "prompt_cache_options.comparison_response_id": Effect("resp_a"),
        "chat_template": Effect("another{{ messages[0].content }}"),
        "chat_template_kwargs": Effect({"flavour": "sweet"}),
    }
)
MESSAGES: dict[str, Entry] = {
    **{name: SAMPLING[name] for name in ("model", "temperature", "top_p", "top_k", "stream", "cache_salt")},
    **{name: SAMPLING[name] for name in ("max_tokens", "vllm_xargs")},
    "messages": Effect([OTHER]),
    "system": Effect("be brief"),
    "stop_sequences": Effect(["x"]),
    "tools": Effect([{"name": "f", "input_schema": {"type": "object"}}]),
    "tool_choice": Effect({"type": "any"}, {"tools": [{"name": "f", "input_schema": {"type": "object"}}]}),
    "thinking": Effect({"type": "disabled"}),
    "output_config": Effect({"effort": "low"}),
    "metadata": Nothing({"user_id": "a"}, CLIENT),
    "chat_template_kwargs": Effect({"flavour": "sweet"}),
}
THINKS = {"thinking": {"type": "disabled"}}
AS_OBJECT = {"response_format": {"type": "json_object"}}
COHERE_CHAT: dict[str, Entry] = {
    **{name: SAMPLING[name] for name in ("model", "stream", "temperature", "seed", "priority", "max_tokens")},
    **{name: SAMPLING[name] for name in ("presence_penalty", "frequency_penalty")},
    "messages": Effect([OTHER]),
    "stop_sequences": SAMPLING["stop"],
    "k": SAMPLING["top_k"],
    "p": SAMPLING["top_p"],
    "logprobs": Effect(True),
    "tools": Effect([TOOL]),
    "strict_tools": Effect(True, {"tools": [TOOL]}),
    "tool_choice": Effect("NONE", {"tools": [TOOL]}),
    "documents": Effect(["a"]),
    "citation_options": Refusal({"mode": "ACCURATE"}),
    "citation_options.mode": Refusal("FAST"),
    "response_format": Effect({"type": "json_object"}),
    "response_format.type": Effect({"type": "json_object"}, {"response_format": {"type": "text"}}),
    "response_format.json_schema": Effect({"type": "json_object", "json_schema": {"enum": [1]}}, AS_OBJECT),
    "safety_mode": Refusal("STRICT"),  # cohere/test_cohere_chat.py has a template with a safety mode
    "thinking": Effect({"type": "disabled"}),
    "thinking.type": Effect({"type": "enabled"}, THINKS),
    "thinking.token_budget": Refusal({"type": "enabled", "token_budget": 5}, THINKS),
    "chat_template_kwargs": Effect({"flavour": "sweet"}),
}
OLLAMA_OPTIONS: dict[str, Entry] = {
    **{f"options.{name}": TOKENS[name] for name in ("temperature", "top_p", "top_k", "min_p", "stop", "seed")},
    **{f"options.{name}": TOKENS[name] for name in ("presence_penalty", "frequency_penalty")},
    "options.num_predict": Effect(3),
    "options.repeat_penalty": Effect(2.0),
    "options.repeat_last_n": Effect({"repeat_penalty": 2.0, "repeat_last_n": 0}, {"options": {"repeat_penalty": 2.0}}),
}
OLLAMA: dict[str, Entry] = OLLAMA_OPTIONS | {
    "model": Refusal("nothing"),
    "stream": Effect(True),
    "format": Effect("json"),
    "options": Effect({"top_k": 3}),
    "think": Effect(False),
    "logprobs": Effect(True),
    "top_logprobs": Effect(2, {"logprobs": True}),
    "keep_alive": Nothing("5m", STAYS),
    "truncate": Nothing(True, "prompts that are too long are refused"),
    "shift": Nothing(True, "answers end with the context"),
}
POOLED: dict[str, Entry] = PROMPT | {
    "add_special_tokens": Effect(False),
    "request_id": Effect("mine"),
    "use_activation": Effect(False),
}
OF_MESSAGES = {"input": None, "messages": [OTHER]}
INPUTS: dict[str, Entry] = POOLED | {
    **{name: Refusal(entry.value, OF_MESSAGES) for name, entry in MEDIA.items()},
    "input": Effect("other"),
    "messages": Effect([OTHER], {"input": None, "messages": [USER]}),
    "add_generation_prompt": Effect(True, OF_MESSAGES),
    "continue_final_message": Effect(True, {"input": None, "messages": [USER, {"role": "assistant", "content": "So"}]}),
    "chat_template": Effect("another{{ messages[0].content }}", OF_MESSAGES),
    "chat_template_kwargs": Effect({"flavour": "sweet"}, OF_MESSAGES),
}
BASE64 = {"encoding_format": "base64"}
VECTORS: dict[str, Entry] = INPUTS | {
    "dimensions": Effect(4),
    "encoding_format": Effect("base64"),
    "embed_dtype": Effect("float16", BASE64),
    "endianness": Effect("big", BASE64),
}
SCORES: dict[str, Entry] = POOLED | {
    "max_tokens_per_query": Effect(1),
    "max_tokens_per_doc": Effect(1),
    "instruction": Refusal("a"),
    "chat_template_kwargs": Refusal({"a": 1}),
}
PAIR = {"text_1": None, "text_2": None}
SIDES: dict[str, Entry] = {
    name: Effect("other", PAIR | {one: "ab", two: "cd"})
    for one, two in (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
    for name in (one, two)
}
RENDERED = {"prompt": None, "messages": [OTHER]}
TOKENIZE: dict[str, Entry] = {
    **{name: Refusal(entry.value, RENDERED) for name, entry in MEDIA.items()},
    "model": Refusal("nothing"),
    "prompt": Effect("other"),
    "messages": Effect([USER], RENDERED),
    "add_special_tokens": Effect(False),
    "return_token_strs": Effect(True),
    "add_generation_prompt": Effect(False, RENDERED),
    "continue_final_message": Effect(True, RENDERED | BEGUN),
    "chat_template": Effect("another{{ messages[0].content }}", RENDERED),
    "chat_template_kwargs": Effect({"flavour": "sweet"}, RENDERED),
    "documents": Effect([{"text": "a"}], RENDERED),
    "reasoning_effort": Effect("low", RENDERED),
    "tools": Effect([TOOL], RENDERED),
    "tool_choice": Refusal("nothing", RENDERED | {"tools": [TOOL]}),
}
EMBED: dict[str, Entry] = {
    "model": Refusal("nothing"),
    "options": Nothing({"num_ctx": 5}, "they are about sampling, or the machine"),
    "keep_alive": Nothing("5m", STAYS),
}
VLLM_SAMPLING = (
    "model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed stop stream "
    "stream_options temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty "
    "stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens "
    "truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo "
    "add_special_tokens structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids "
    "return_weight_versions routed_experts_prompt_start return_token_offsets mm_payload return_mm_kwargs cache_salt "
    "kv_transfer_params ec_transfer_params vllm_xargs repetition_detection thinking_token_budget stream_interval "
)
VLLM_CHAT = (
    "messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning "
    "parallel_tool_calls add_generation_prompt continue_final_message documents chat_template chat_template_kwargs "
    "media_io_kwargs mm_processor_kwargs return_prompt_text"
)
VLLM_RESPONSES = (
    "background include input instructions max_output_tokens max_tool_calls metadata model logit_bias "
    "parallel_tool_calls previous_response_id prompt reasoning include_reasoning service_tier store stream temperature "
    "text tool_choice tools top_logprobs top_p top_k min_p truncation user skip_special_tokens presence_penalty "
    "spaces_between_special_tokens include_stop_str_in_output frequency_penalty prompt_cache_key prompt_cache_options "
    "prompt_cache_retention safety_identifier watermarking request_id session_id media_io_kwargs mm_processor_kwargs "
    "priority mm_payload return_mm_kwargs cache_salt enable_response_messages previous_input_messages "
    "structured_outputs repetition_penalty seed stop stop_token_ids ignore_eos vllm_xargs kv_transfer_params "
    "ec_transfer_params chat_template_kwargs"
)
VLLM_MESSAGES = (
    "model messages max_tokens metadata output_config thinking stop_sequences stream system temperature tool_choice "
    "tools top_k top_p mm_payload return_mm_kwargs cache_salt watermarking kv_transfer_params ec_transfer_params "
    "vllm_xargs chat_template_kwargs"
)
VLLM_COHERE_CHAT = (
    "model messages stream tools strict_tools tool_choice documents citation_options response_format safety_mode "
    "max_tokens stop_sequences temperature seed frequency_penalty presence_penalty k p logprobs thinking priority "
    "watermarking kv_transfer_params chat_template_kwargs"
)
VLLM_POOLED = (
    "model user truncate_prompt_tokens truncation_side request_id priority mm_processor_kwargs cache_salt "
    "use_activation "
)
VLLM_INPUTS = VLLM_POOLED + (
    "input messages add_special_tokens add_generation_prompt continue_final_message chat_template "
    "chat_template_kwargs media_io_kwargs "
)
VLLM_SCORES = VLLM_POOLED + "max_tokens_per_query max_tokens_per_doc instruction chat_template_kwargs "
VLLM_TOKENIZE = (
    "model messages prompt add_generation_prompt return_token_strs continue_final_message add_special_tokens "
    "chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs tools"
)
GENERATE: dict[str, Entry] = {
    **{name: SAMPLING[name] for name in ("model", "cache_salt", "priority", "request_id", "stream")},
    **{name: entry for name, entry in SAMPLING.items() if name.startswith("stream_options")},
    "token_ids": Effect([42]),
    "sampling_params": Effect({"max_tokens": 3, "seed": 7}),
}
ITEMS: dict[str, Entry] = PROMPT | {
    "query": Effect("other"),
    "items": Effect(["other"]),
    "label_token_ids": Effect([41, 40]),
    "apply_softmax": Effect(False),
    "item_first": Effect(True),
    "add_special_tokens": Nothing(False, "the tiny model's tokenizer adds none; `test_scoring.py` has one that does"),
    "request_id": Effect("mine"),
}
DECIDED: dict[str, Entry] = {
    **{name: PROMPT[name] for name in ("model", "cache_salt", "priority", "user")},
    "instructions": Effect("be fair"),
    "calibrate": Effect(True),
    "num_orders": Effect(2),
    "chat_template_kwargs": Effect({"flavour": "sweet"}),
}
ASKED: dict[str, Any] = {"type": "choice", "instructions": "Which?"}
OPTIONS: dict[str, Any] = ASKED | {"criteria": {"b": None, "c": None}}
ASKED_ONCE: dict[str, Any] = {"questions": {"a": OPTIONS}}
SAMPLED = {"max_tokens": 60, "seed": 7}
ROUTES: dict[str, Requests] = {
    "/v1/chat/completions": Requests(
        ChatCompletionRequest, {"messages": [USER], **SAMPLED}, CHAT, CHAT_REFUSED, VLLM_SAMPLING + VLLM_CHAT
    ),
    "/inference/v1/generate": Requests(
        GenerateRequest,
        {"token_ids": [40, 41], "sampling_params": SAMPLED},
        GENERATE,
        TOKENS_REFUSED,
        "request_id token_ids features sampling_params model stream stream_options cache_salt priority "
        "kv_transfer_params",
    ),
    "/generative_scoring": Requests(
        GenerativeScoringRequest,
        {"query": "think", "items": ["ab"], "label_token_ids": [40, 41]},
        ITEMS,
        {},
        "model query items label_token_ids apply_softmax item_first add_special_tokens priority request_id",
    ),
    "/v1/completions": Requests(
        CompletionRequest,
        {"prompt": "think?", **SAMPLED},
        COMPLETION,
        COMPLETION_REFUSED,
        VLLM_SAMPLING + "prompt suffix",
    ),
    "/v1/responses": Requests(
        ResponsesRequest,
        {"input": "think and call?", "max_output_tokens": 60, "seed": 7},
        RESPONSES,
        RESPONSES_REFUSED,
        VLLM_RESPONSES,
    ),
    "/v1/messages": Requests(
        MessagesRequest, {"messages": [USER], "max_tokens": 60}, MESSAGES, MESSAGES_REFUSED, VLLM_MESSAGES
    ),
    "/v2/chat": Requests(
        CohereChatRequest, {"messages": [USER], "max_tokens": 60}, COHERE_CHAT, COHERE_CHAT_REFUSED, VLLM_COHERE_CHAT
    ),
    "/api/chat": Requests(
        OllamaChatRequest,
        {"model": "tiny", "messages": [USER], "stream": False},
        OLLAMA | {"messages": Effect([OTHER]), "tools": Effect([TOOL])},
        OLLAMA_REFUSED,
    ),
    "/api/generate": Requests(
        OllamaGenerateRequest,
        {"model": "tiny", "prompt": "think?", "stream": False},
        OLLAMA
        | {
            "prompt": Effect("21 degrees"),
            "system": Effect("be brief"),
            "raw": Effect(True),
            "images": Refusal(["a"]),
            "suffix": Refusal("a"),
            "template": Refusal("a"),
            "context": Refusal([5]),
        },
        OLLAMA_REFUSED,
    ),
    "/api/show": Requests(
        OllamaShowRequest,
        {"model": "tiny"},
        {"model": Refusal("nothing"), "name": Refusal("nothing", {"model": None, "name": "tiny"})},
    ),
    "/tokenize": Requests(TokenizeRequest, {"prompt": "ab"}, TOKENIZE, {}, VLLM_TOKENIZE),
    "/detokenize": Requests(
        DetokenizeRequest,
        {"tokens": [40, 41]},
        {"model": Refusal("nothing"), "tokens": Effect([42])},
        {},
        "model tokens",
    ),
    "/v1/embeddings": Requests(
        EmbeddingRequest,
        {"input": "ab"},
        VECTORS
        | {
            "task": Refusal("retrieval.query"),
            "late_chunking_params": Effect({"chunk_size": 2}),
            "late_chunking_params.chunk_size": Effect(3),
        },
        POOLED_REFUSED,
        VLLM_INPUTS + "dimensions encoding_format embed_dtype endianness late_chunking_params",
    ),
    "/pooling": Requests(
        PoolingRequest,
        {"input": "ab"},
        VECTORS | {"task": Effect("token_embed"), "prompt_name": Refusal("query", {"task": "token_embed"})},
        POOLED_REFUSED,
        VLLM_INPUTS + "dimensions encoding_format embed_dtype endianness task",
    ),
    "/classify": Requests(ClassificationRequest, {"input": "ab"}, INPUTS, POOLED_REFUSED, VLLM_INPUTS),
    "/score": Requests(
        ScoreRequest, {"text_1": "ab", "text_2": "cd"}, SCORES | SIDES, SCORE_REFUSED, VLLM_SCORES + " ".join(SIDES)
    ),
    "/rerank": Requests(
        RerankRequest,
        {"query": "ab", "documents": ["cd", "ef"]},
        SCORES
        | {
            "query": Effect("other"),
            "documents": Effect(["gh"]),
            "top_n": Effect(1),
            "return_documents": Effect(False),
        },
        RERANK_REFUSED,
        VLLM_SCORES + "query documents top_n",
    ),
    "/v1/systemone": Requests(
        SystemOneRequest,
        {"state": "ab", **ASKED_ONCE},
        DECIDED
        | {
            "state": Effect({"a": 1}),
            "questions": Effect({"a": {"type": "noul"}}),
            "questions.type": Effect({"a": ASKED | {"type": "score", "criteria": ["b", "c"]}}, ASKED_ONCE),
            "questions.instructions": Effect({"a": OPTIONS | {"instructions": "Who?"}}, ASKED_ONCE),
            "questions.criteria": Effect({"a": ASKED | {"criteria": {"b": "yes", "d": None}}}, ASKED_ONCE),
            "images": Refusal(["data:image/png;base64,AA"]),
            "request_id": Effect("mine"),
        },
        SYSTEMONE_REFUSED,
        "model state questions instructions decision_template chat_template_kwargs seed priority request_id cache_salt",
    ),
    "/v1/decisions": Requests(
        DecisionRequest,
        {"input": "ab", "questions": [ASKED | {"choices": [{"value": "b"}, {"value": True}]}]},
        DECIDED
        | {
            "input": Effect([{"role": "user", "content": "cd ef"}]),
            "questions": Effect([{"type": "predicate", "instructions": "Is it?"}]),
            "request_id": Nothing("mine", "the answer has no id"),
            "safety_identifier": Nothing("a", CLIENT),
        },
        DECISIONS_REFUSED,
        "model input questions safety_identifier",
    ),
    "/v2/embed": Requests(
        CohereEmbedRequest,
        {"texts": ["ab"]},
        POOLED
        | {
            "truncate_prompt_tokens": Refusal(3),
            "truncation_side": Refusal("left"),
            "request_id": Effect("mine"),
            "texts": Effect(["cd"]),
            "input_type": Effect("search_query"),
            "output_dimension": Effect(4),
            "embedding_types": Effect(["binary"]),
            "truncate": Effect("START"),
            "max_tokens": Effect(3),
        },
        COHERE_REFUSED,
        "model input_type texts images inputs output_dimension embedding_types truncate max_tokens priority",
    ),
    "/api/embed": Requests(
        OllamaEmbedRequest,
        {"model": "tiny", "input": "ab"},
        EMBED | {"input": Effect("cd"), "truncate": Effect(False), "dimensions": Effect(4)},
    ),
    "/api/embeddings": Requests(
        OllamaEmbeddingRequest, {"model": "tiny", "prompt": "ab"}, EMBED | {"prompt": Effect("cd")}
    ),
}
"""The requests that servers decode, by path, except those of adapters (`test_adapters.py`) and of downloads
(`ollama/test_pull.py`).
"""
