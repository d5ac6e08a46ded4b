"""Prompts of embeddings in `/v1/completions`: the answers to the same token ids, and hostile files, refused by name."""

from __future__ import annotations

import base64
import io
import pickle
import struct
import zipfile
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy

from jaxllm.engine.online.async_llm import AsyncLLM
from tests.async_engine.support import CONTEXT, tiny_args
from tests.models.tiny import read_tensors
from tests.server.support import TEMPLATE, Answer, Served, served

pytestmark = pytest.mark.server

IDS = [list(range(30, 42)), list(range(50, 75))]
TABLE = read_tensors("llama3_tied")["model.embed_tokens.weight"].astype(np.float32)
WIDTH = TABLE.shape[1]
ROWS = TABLE[IDS[0]]


@pytest.fixture(scope="module")
def server(tokenizer: str) -> Iterator[Served]:
    """Return a server that takes prompts of embeddings."""
    args = tiny_args(tokenizer, chat_template=TEMPLATE, batch_invariant=True, enable_prompt_embeds=True)
    with AsyncLLM.from_engine_args(args, disable_frontend_multiprocessing=True) as llm, served(llm) as server:
        yield server


def complete(server: Served, **fields: Any) -> Answer:
    return server.post("/v1/completions", {"model": "tiny", "temperature": 0, "max_tokens": 6, "logprobs": 2, **fields})


def npy(array: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def tensors(**arrays: np.ndarray) -> bytes:
    return safetensors.numpy.save(arrays)


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def with_header(shape: Any, dtype: str = "<f4", *, is_fortran: bool = False, data: bytes = b"\0" * 64) -> bytes:
    """Return a .npy file whose header says what it likes."""
    header = repr({"descr": dtype, "fortran_order": is_fortran, "shape": shape}).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def with_entries(entries: Any, data: bytes = b"\0" * 64) -> bytes:
    """Return a safetensors file whose header says what it likes."""
    header = msgspec.json.encode(entries)
    return len(header).to_bytes(8, "little") + header + data


def saved_by_torch() -> bytes:
    """Return an archive as torch.save writes it, whose pickle would call a function."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(print))
        archive.writestr("archive/data/0", b"\0" * 4 * WIDTH)
    return stream.getvalue()


def shown(answer: Answer) -> list[Any]:
    assert answer.status == 200, answer.body
    return [(each["text"], each["finish_reason"], each["logprobs"]) for each in answer.json["choices"]]


def test_prompts_of_embeddings_come_before_those_of_ids(server: Served) -> None:
    expected = complete(server, prompt=IDS)
    files = [text(npy(ROWS)), text(tensors(prompt=TABLE[IDS[1]]))]
    alone = complete(server, prompt_embeds=files)
    assert shown(alone) == shown(expected)
    assert alone.json["usage"] == expected.json["usage"]
    mixed = complete(server, prompt_embeds=files[1], prompt=[IDS[0]])
    assert shown(mixed) == shown(expected)[::-1]
    one = complete(server, prompt_embeds=files[0], return_token_ids=True).json["choices"][0]
    assert one["prompt_token_ids"] == [0] * len(IDS[0])
    nothing = complete(server, prompt_embeds=[], prompt=[IDS[0]])
    assert shown(nothing) == shown(expected)[:1]


def test_a_stream_has_the_whole_answer(server: Served) -> None:
    [(whole, *_)] = shown(complete(server, prompt_embeds=text(npy(ROWS))))
    events = complete(server, prompt_embeds=text(npy(ROWS)), stream=True).events
    assert "".join(event["choices"][0]["text"] for event in events) == whole


def test_a_salt_parts_what_prompts_share(server: Served) -> None:
    answers = [complete(server, prompt_embeds=text(npy(ROWS)), cache_salt=salt) for salt in ("a", "b")]
    assert shown(answers[0]) == shown(answers[1])


def test_another_route_takes_the_same(server: Served) -> None:
    fields = {"model": "tiny", "prompt_embeds": text(npy(ROWS)), "temperature": 0, "max_tokens": 6, "logprobs": 2}
    assert shown(server.post("/invocations", fields)) == shown(complete(server, prompt_embeds=text(npy(ROWS))))


HOSTILE: dict[str, str] = {
    "not base64": "\u00e9 \u00e9",
    "truncated base64": text(npy(ROWS))[:-1],
    "empty": "",
    "neither format": text(b"hello world, this is no array"),
    "a pickle": text(pickle.dumps([1.0])),
    "an archive of torch": text(saved_by_torch()),
    "an array of objects": text(npy(np.array([[{}] * WIDTH], object), allow_pickle=True)),
    "objects by name": text(with_header((1, WIDTH), "|O", data=pickle.dumps([1.0]))),
    "integers": text(npy(np.zeros((2, WIDTH), np.int32))),
    "complex numbers": text(npy(np.zeros((2, WIDTH), np.complex64))),
    "one axis": text(npy(ROWS[0])),
    "four axes": text(npy(ROWS[None, None])),
    "two prompts in one": text(npy(np.stack([ROWS, ROWS]))),
    "another width": text(npy(ROWS[:, :-1])),
    "no rows": text(npy(ROWS[:0])),
    "no rows of safetensors": text(tensors(a=ROWS[:0])),
    "as many rows as the context": text(npy(np.zeros((CONTEXT, WIDTH), np.float32))),
    "NaN": text(npy(np.full((2, WIDTH), np.nan, np.float32))),
    "infinity": text(tensors(a=np.full((2, WIDTH), np.inf, np.float32))),
    "too large for float32": text(npy(np.full((2, WIDTH), 1e300))),
    "columns first": text(npy(np.asfortranarray(ROWS))),
    "a huge shape": text(with_header((2**40, WIDTH))),
    "a huger shape": text(with_header((2**62, 2**62))),
    "a negative shape": text(with_header((-1, WIDTH))),
    "a shape of texts": text(with_header(("1", WIDTH))),
    "a shape of booleans": text(with_header((True, WIDTH), data=b"\0" * 4 * WIDTH)),
    "a header cut short": text(npy(ROWS)[:40]),
    "numbers cut short": text(npy(ROWS)[:-1]),
    "numbers too many": text(npy(ROWS) + b"\0"),
    "two tensors": text(tensors(a=ROWS, b=ROWS)),
    "no tensor": text(with_entries({}, b"")),
    "a huge header": text((2**63).to_bytes(8, "little") + b"{}"),
    "a huge tensor": text(with_entries({"a": {"dtype": "F32", "shape": [2**60, WIDTH], "data_offsets": [0, 64]}})),
    "a tensor too long": text(with_entries({"a": {"dtype": "F32", "shape": [64, 4], "data_offsets": [0, 1024]}})),
    "a type of another kind": text(with_entries({"a": {"dtype": "F4", "shape": [4, 4], "data_offsets": [0, 64]}})),
    "8-bit floats": text(with_entries({"a": {"dtype": "F8_E4M3", "shape": [1, 64], "data_offsets": [0, 64]}})),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_by_name(server: Served, name: str) -> None:
    for fields in ({"prompt_embeds": HOSTILE[name]}, {"prompt_embeds": [text(npy(ROWS)), HOSTILE[name]]}):
        answer = complete(server, **fields)
        error = answer.json["error"]
        assert (answer.status, error["param"]) == (400, "prompt_embeds"), error
        assert "prompt_embeds" in error["message"]


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"prompt_embeds": text(npy(ROWS)), "echo": True}, "echo"),
        ({"prompt_embeds": text(npy(ROWS)), "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_embeds": text(npy(ROWS)), "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"prompt_embeds": 1}, "prompt_embeds"),
        ({"prompt_embeds": [[0.5] * WIDTH]}, "prompt_embeds"),
        ({"prompt_embeds": ["AAAA"] * 1025}, "prompt_embeds"),
        ({"prompt_embeds": ["AAAA"] * 1024, "prompt": "a"}, "prompt"),
        ({}, "prompt"),
        ({"prompt_embeds": []}, "prompt"),
        ({"prompt": None}, "prompt"),
    ],
)
def test_what_embeddings_do_not_go_with_is_refused_by_name(
    server: Served, fields: dict[str, Any], parameter: str
) -> None:
    answer = complete(server, **fields)
    assert (answer.status, answer.json["error"]["param"]) == (400, parameter), answer.json


def test_a_server_without_the_option_refuses_them(mock_server: Served) -> None:
    answer = complete(mock_server, prompt_embeds=text(npy(ROWS)))
    assert (answer.status, answer.json["error"]["param"]) == (400, "prompt_embeds")
    assert "--enable-prompt-embeds" in answer.json["error"]["message"]
