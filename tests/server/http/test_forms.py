"""Forms are read as they were sent, in whatever pieces, and refused if they are none."""

from __future__ import annotations

import contextlib
import random

import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.http.forms import read_form
from tests.server.speech.support import make_form


def test_fields_and_files() -> None:
    data = bytes(random.choices(b"\r\n--abc", k=10_000)) + random.randbytes(50_000)
    body, kind = make_form({"model": "tiny", "prompt": "größer\r\n--\n", "times[]": ["a", "b"]}, {"file": data})
    form = read_form(body, kind.encode())
    assert form.files == {"file": data}
    assert form.fields == {"model": "tiny", "prompt": "größer\r\n--\n", "times[]": ["a", "b"]}


def test_of_a_field_that_comes_twice_the_last_counts_but_a_file_comes_once() -> None:
    body = b'--b\r\ncontent-disposition: form-data; name="a"\r\n\r\n%b\r\n'
    form = read_form(body % b"1" + body % b"2" + b"--b--\r\n", b"multipart/form-data; boundary=b")
    assert form.fields == {"a": "2"}
    file = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nx\r\n'
    with pytest.raises(VLLMValidationError, match="file: send one file"):
        read_form(file * 2 + b"--b--\r\n", b"multipart/form-data; boundary=b")


GOOD, KIND = make_form({"a": "1"}, {"file": b"x"})
BAD: dict[str, tuple[bytes, str, str]] = {
    "nothing": (b"", KIND, "ends early"),
    "no boundary": (GOOD, "multipart/form-data", "no boundary"),
    "another boundary": (GOOD, "multipart/form-data; boundary=other", "not a form"),
    "a long boundary": (GOOD, f"multipart/form-data; boundary={'b' * 71}", "no boundary"),
    "JSON": (b'{"file": 1}', KIND, "not a form"),
    "half": (GOOD[: len(GOOD) // 2], KIND, "ends early"),
    "no last boundary": (GOOD[:-10], KIND, "ends early"),
    "many parts": (make_form({f"f{i}": "" for i in range(101)}, {})[0], KIND, "more than 100 parts"),
    "a long field": (make_form({"a": "x" * 70_000}, {})[0], KIND, "a: a field of a form has at most 65536 bytes"),
    "a part without a name": (GOOD.replace(b' name="a"', b""), KIND, "a part without a name"),
    "no UTF-8": (GOOD.replace(b"\r\n1\r\n", b"\r\n\xff\r\n"), KIND, "not UTF-8: a"),
    "many headers": (
        GOOD.replace(b"\r\n\r\n1", b"\r\nx: y" * 10_000 + b"\r\n\r\n1"),
        KIND,
        "too many or too long headers",
    ),
    "a long header": (GOOD.replace(b"\r\n\r\n1", b"\r\nx: " + b"y" * 100_000 + b"\r\n\r\n1"), KIND, "too long headers"),
    "a long name": (make_form({"a" * 101: ""}, {})[0], KIND, "name has more than 100 characters"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_forms_are_refused(name: str) -> None:
    body, kind, message = BAD[name]
    with pytest.raises(VLLMValidationError, match=message):
        read_form(body, kind.encode())


def test_noise_is_refused_or_read() -> None:
    for _ in range(300):
        body = bytearray(GOOD)
        for _ in range(random.randint(1, 5)):
            body[random.randrange(len(body))] = random.randrange(256)
        with contextlib.suppress(VLLMValidationError):
            read_form(bytes(body), KIND.encode())
