"""Pictures through every API of a server with a tiny model that sees, held to what `LLM` answers offline."""

from __future__ import annotations

import argparse
import base64
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxllm import LLM, SamplingParams, TextPrompt
from jaxllm.cli.batch import run_batch
from jaxllm.cli.client import chat as chat_command
from jaxllm.cli.main import main, make_parser
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.sampling_params import BeamSearchParams
from jaxllm.server.anthropic.input import as_chat
from jaxllm.server.anthropic.protocol import MessagesRequest
from tests.async_engine.support import mock_llm
from tests.e2e.media_goldens import folder, picture
from tests.e2e.pictures import draw
from tests.server.support import Answer, Served, served

pytestmark = pytest.mark.server

FAMILY = "qwen2_vl"
CONTEXT = 512
MAX_TOKENS = 6
MAX_IMAGES = 3
HEALTH_SECONDS = 2.0
"""Loose: 0.2 s are the longest on a busy machine with two cores."""
NUM_SLOW = 40
"""Requests that wait for their pictures: more than any pool has threads."""


def arguments() -> dict[str, Any]:
    """Return the arguments of engines that compute the same to the bit."""
    return {
        "model": str(folder(FAMILY)),
        "batch_invariant": True,
        "max_model_len": CONTEXT,
        "max_num_batched_tokens": CONTEXT,
        "max_num_seqs": 8,
        "cudagraph_capture_sizes": [8],
        "num_gpu_blocks_override": 200,
        "block_size": 16,
        "enforce_eager": True,
        "use_tqdm_on_load": False,
        "disable_log_stats": True,
        "limit_mm_per_prompt": {"image": MAX_IMAGES},
        "enable_mm_embeds": True,
    }


@pytest.fixture(scope="module")
def offline() -> Iterator[LLM]:
    with LLM(**arguments()) as llm:
        yield llm


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    args = AsyncEngineArgs(**arguments())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXLLM_SERVER_DEV_MODE", "1")
        with (
            AsyncLLM.from_engine_args(args, disable_frontend_multiprocessing=True) as llm,
            served(llm, "--enable-prompt-tokens-details", "--trust-request-chat-template") as server,
        ):
            yield server


def png(image: Image.Image) -> str:
    """Return a picture as a file in base64."""
    written = BytesIO()
    image.save(written, "PNG")
    return base64.b64encode(written.getvalue()).decode()


def url(data: str) -> str:
    """Return the URL of a file in base64."""
    return f"data:image/png;base64,{data}"


FIRST, SECOND = png(picture(FAMILY, 0)), png(picture(FAMILY, 1))
SPARSE = json.loads((folder(FAMILY).parent / "tensors.json").read_text())["refused"]["coo_outside"]
NO_IMAGE = base64.b64encode(b"no image").decode()


def part(source: str) -> dict[str, Any]:
    """Return a part of a message of OpenAI's chat."""
    return {"type": "image_url", "image_url": {"url": source}}


def messages(*data: str, text: str = "what?") -> list[dict[str, Any]]:
    """Return a conversation in OpenAI's form: pictures, and a text."""
    return [{"role": "user", "content": [*(part(url(each)) for each in data), {"type": "text", "text": text}]}]


def expected(offline: LLM, conversation: Sequence[dict[str, Any]], max_tokens: int = MAX_TOKENS, **fields: Any) -> str:
    """Return the greedy answer of `LLM`."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    [output] = offline.chat(list(conversation), params, use_tqdm=False, **fields)
    return output.outputs[0].text


def chat(server: Served, conversation: Sequence[dict[str, Any]], **fields: Any) -> Answer:
    """Ask OpenAI's chat."""
    body = {"messages": conversation, "temperature": 0, "max_tokens": MAX_TOKENS} | fields
    return server.post("/v1/chat/completions", body)


def refused(answer: Answer, status: int = 400) -> str:
    """Return the message of an answer that is an error with this status."""
    assert answer.status == status, answer.body
    return answer.json["error"]["message"]


def ask_openai(server: Served, *data: str) -> str:
    return chat(server, messages(*data)).json["choices"][0]["message"]["content"]


def ask_in_a_stream(server: Served, *data: str) -> str:
    events = chat(server, messages(*data), stream=True).events
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


def ask_in_a_response(server: Served, *data: str) -> str:
    content = [{"type": "input_image", "image_url": url(each)} for each in data]
    content.append({"type": "input_text", "text": "what?"})
    body = {"input": [{"role": "user", "content": content}], "temperature": 0, "max_output_tokens": MAX_TOKENS}
    [message] = server.post("/v1/responses", body).json["output"]
    return "".join(each["text"] for each in message["content"])


def blocks(*data: str) -> list[dict[str, Any]]:
    """Return pictures in Anthropic's form."""
    source = {"type": "base64", "media_type": "image/png"}
    return [{"type": "image", "source": {**source, "data": each}} for each in data]


def ask_anthropic(server: Served, *data: str) -> str:
    content = [*blocks(*data), {"type": "text", "text": "what?"}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": MAX_TOKENS}
    return "".join(each["text"] for each in server.post("/v1/messages", body).json["content"])


def ask_ollamas_chat(server: Served, *data: str) -> str:
    message = {"role": "user", "content": "what?", "images": list(data)}
    options = {"temperature": 0, "num_predict": MAX_TOKENS}
    body = {"model": "tiny", "messages": [message], "stream": False, "options": options}
    return server.post("/api/chat", body).json["message"]["content"]


def ask_ollamas_generate(server: Served, *data: str) -> str:
    options = {"temperature": 0, "num_predict": MAX_TOKENS}
    body = {"model": "tiny", "prompt": "what?", "images": list(data), "stream": False, "options": options}
    return server.post("/api/generate", body).json["response"]


ASKS: list[Callable[..., str]] = [
    ask_openai,
    ask_in_a_stream,
    ask_in_a_response,
    ask_anthropic,
    ask_ollamas_chat,
    ask_ollamas_generate,
]


@pytest.mark.parametrize("ask", ASKS)
def test_every_api_sees_the_pictures(server: Served, offline: LLM, ask: Callable[..., str]) -> None:
    one, two = expected(offline, messages(FIRST)), expected(offline, messages(FIRST, SECOND))
    assert ask(server, FIRST) == one
    assert ask(server, FIRST, SECOND) == two
    assert len({one, two, expected(offline, messages(SECOND))}) == 3, "the pictures make a difference"


def test_a_picture_in_a_tools_result_is_seen(server: Served, offline: LLM) -> None:
    def turns(*data: str) -> list[dict[str, Any]]:
        call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "t", "content": blocks(*data)}
        return [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]

    def ask(*data: str) -> Answer:
        return server.post("/v1/messages", {"messages": turns(*data), "temperature": 0, "max_tokens": MAX_TOKENS})

    for data in (FIRST, SECOND):
        request = MessagesRequest(max_tokens=MAX_TOKENS, messages=turns(data))
        conversation = as_chat(request, has_thinking_tokens=False).messages
        assert "".join(each["text"] for each in ask(data).json["content"]) == expected(offline, conversation)
    assert refused(ask(FIRST, NO_IMAGE)).startswith("messages[2].content[0].content[1]: ")


def test_usage_counts_the_tokens_of_pictures(server: Served, offline: LLM) -> None:
    [output] = offline.chat(messages(FIRST, SECOND), SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.prompt_token_ids is not None
    assert output.multi_modal_placeholders is not None
    rows = sum(each.length for each in output.multi_modal_placeholders["image"])
    usage = chat(server, messages(FIRST, SECOND)).json["usage"]
    assert usage["prompt_tokens"] == len(output.prompt_token_ids) > rows > 0
    assert usage["prompt_tokens_details"]["multimodal_tokens"] == rows
    options = {"include_usage": True}
    *_, last = chat(server, messages(FIRST, SECOND), stream=True, stream_options=options).events
    assert last["usage"]["prompt_tokens_details"]["multimodal_tokens"] == rows
    text = chat(server, [{"role": "user", "content": "what?"}]).json["usage"]
    assert text["prompt_tokens_details"].get("multimodal_tokens") is None
    count = server.post("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": blocks(FIRST)}]})
    assert count.json["input_tokens"] > rows // 4
    tokens = server.post("/tokenize", {"messages": messages(FIRST, SECOND)}).json
    assert tokens["tokens"] == output.prompt_token_ids
    assert tokens["count"] == usage["prompt_tokens"]


def test_a_request_sets_options_of_the_processor(server: Served, offline: LLM) -> None:
    options = {"max_pixels": 28 * 28}
    answer = chat(server, messages(FIRST), mm_processor_kwargs=options).json
    whole = chat(server, messages(FIRST)).json
    assert answer["usage"]["prompt_tokens"] < whole["usage"]["prompt_tokens"]
    assert answer["choices"][0]["message"]["content"] == expected(offline, messages(FIRST), mm_processor_kwargs=options)
    count = server.post("/tokenize", {"messages": messages(FIRST), "mm_processor_kwargs": options}).json["count"]
    assert count == answer["usage"]["prompt_tokens"]
    for name, value, match in [
        ("mm_processor_kwargs", {"max_pixelz": 1}, "Did you mean 'max_pixels'"),
        ("mm_processor_kwargs", {"max_pixels": -1}, "must be positive"),
        ("media_io_kwargs", {"image": {"a": 1}}, "only videos have options"),
        ("media_io_kwargs", {"video": {"num_frames": -1}}, "num_frames of a video must be an integer from 1"),
        ("media_io_kwargs", {"video": {"a": 1}}, "has no 'a'"),
    ]:
        failed = chat(server, messages(FIRST), **{name: value})
        assert match in refused(failed)
        assert failed.json["error"]["param"] == name
    assert chat(server, messages(FIRST), media_io_kwargs={"video": {"num_frames": 4}}).status == 200


def mp4(num_frames: int) -> str:
    """Return a video of two frames a second as a file in base64."""
    av = pytest.importorskip("av", reason="needs jaxllm[video]")
    written = BytesIO()
    with av.open(written, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=2)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for number in range(num_frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(draw(32, 32, number), format="rgb24")))
        container.mux(stream.encode())
    return base64.b64encode(written.getvalue()).decode()


def test_a_request_says_which_frames_of_a_video_are_taken(server: Served) -> None:
    """A uuid stands for the frames that were taken by the same options, and for no others."""
    video = {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{mp4(12)}"}, "uuid": "v"}

    template = "{{ '' }}<|vision_start|><|video_pad|><|vision_end|>"  # the model's own knows images alone

    def count(sampling: dict[str, Any] | None) -> int:
        options = {} if sampling is None else {"media_io_kwargs": {"video": sampling}}
        answer = chat(server, [{"role": "user", "content": [video]}], chat_template=template, **options)
        assert answer.status == 200, answer.body
        return answer.json["usage"]["prompt_tokens_details"]["multimodal_tokens"]

    whole = count(None)
    assert count({"num_frames": 4}) * 3 == whole
    assert count({"fps": 1}) * 2 == whole
    assert count({"max_frames": 2}) * 6 == whole
    too_many = {"media_io_kwargs": {"video": {"num_frames": 769}}}
    assert "from 1 to 768" in refused(
        chat(server, [{"role": "user", "content": [video]}], chat_template=template, **too_many)
    )


def test_options_of_pictures_are_refused_where_there_are_none(mock_server: Served) -> None:
    conversation = [{"role": "user", "content": "a"}]
    for name in ("mm_processor_kwargs", "media_io_kwargs"):
        for path, body in {
            "/v1/chat/completions": {"messages": conversation},
            "/v1/completions": {"prompt": "a"},
            "/v1/responses": {"input": "a"},
            "/tokenize": {"messages": conversation},
        }.items():
            answer = mock_server.post(path, body | {name: {"video": {"num_frames": 2}}})
            assert answer.json["error"]["param"] == name, path
            assert refused(answer)
            assert mock_server.post(path, body | {name: {}}).status == 200


@pytest.mark.parametrize(
    ("source", "status", "match"),
    [
        (url(NO_IMAGE), 400, "of another format than PNG"),
        (url(FIRST[:200]), 400, ""),
        (url(png(Image.new("RGB", (1, 2000)))), 400, "cannot take an image of 1 x 2000 pixels"),
        ("data:image/png;base64,***", 400, "base64"),
        ("http://127.0.0.1/a.png", 400, "not on the public internet"),
        ("http://nowhere.invalid/a.png", 422, ""),
        ("file:///etc/passwd", 400, "allowed"),
        ("ftp://a.example/a.png", 400, ""),
    ],
)
def test_errors_name_the_part(server: Served, source: str, status: int, match: str) -> None:
    content = [*messages(FIRST)[0]["content"], part(source)]
    answer = chat(server, [{"role": "user", "content": content}])
    message = refused(answer, status)
    assert message.startswith("messages[0]['content'][2]: ")
    assert match in message
    assert answer.json["error"]["param"] == "messages"
    assert answer.json["error"]["type"] == ("BadRequestError" if status == 400 else "UnprocessableEntityError")


GRID = (1, 4, 6)


def rows_of(grid: tuple[int, int, int], width: int | None = None, seed: int = 0) -> np.ndarray:
    """Return random embeddings of a grid of the model."""
    size = json.loads((folder(FAMILY) / "config.json").read_text())["text_config"]["hidden_size"]
    return np.random.default_rng(seed).normal(size=(math.prod(grid) // 4, width or size)).astype(np.float32)


def saved(array: Any) -> str:
    """Return an array as a .npy file in base64."""
    written = BytesIO()
    np.save(written, np.asarray(array))
    return base64.b64encode(written.getvalue()).decode()


def with_embeds(*embeds: dict[str, Any] | str, **fields: Any) -> list[dict[str, Any]]:
    """Return a conversation with embeddings of pictures."""
    parts = [{"type": "image_embeds", "image_embeds": each, **fields} for each in embeds]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]


def embeds_of(grid: tuple[int, int, int], seed: int = 0) -> dict[str, Any]:
    return {"image_embeds": saved(rows_of(grid, seed=seed)), "image_grid_thw": saved(grid)}


def test_embeddings_in_chats(server: Served, offline: LLM) -> None:
    """They give what the same arrays give offline, and their name stands for them."""
    other = (1, 6, 6)
    arrays = {
        "image_embeds": np.concatenate([rows_of(GRID), rows_of(other, seed=1)]),
        "image_grid_thw": np.array([GRID, other]),
    }
    conversation = with_embeds(embeds_of(GRID), embeds_of(other, seed=1))
    [rendered] = offline.chat(messages(FIRST, SECOND), SamplingParams(max_tokens=1), use_tqdm=False)
    prompt = TextPrompt(prompt=rendered.prompt or "", multi_modal_data={"image": arrays})
    [output] = offline.generate([prompt], SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False)
    answer = chat(server, conversation)
    assert answer.status == 200, answer.body
    assert answer.json["choices"][0]["message"]["content"] == output.outputs[0].text
    assert answer.json["usage"]["prompt_tokens_details"]["multimodal_tokens"] == 6 + 9
    named = chat(server, with_embeds(embeds_of(GRID), uuid="of-mine"))
    again = chat(server, with_embeds("", uuid="of-mine"))
    assert again.json["choices"][0]["message"] == named.json["choices"][0]["message"]
    assert "no item is cached under the uuid 'none'" in refused(chat(server, with_embeds("", uuid="none")))


@pytest.mark.parametrize(
    ("embeds", "match"),
    [
        ("aaaa", "damaged or of another format"),
        (saved(rows_of(GRID)), "need image_grid_thw"),
        ({**embeds_of(GRID), "image_grid_thw": saved((1, 4, 4))}, "have 6 rows, and what they stand for takes 4"),
        ({**embeds_of(GRID), "image_embeds": saved(rows_of(GRID, 3))}, "must have the shape [rows, "),
        ({**embeds_of(GRID), "image_embeds": saved(rows_of(GRID) * np.inf)}, "no finite numbers"),
        ({**embeds_of(GRID), "image_embeds": saved(rows_of(GRID) > 0)}, "not read"),
        (embeds_of((1, 64, 64)), "have 1024 rows, and there may be"),
        ({**embeds_of(GRID), "image_embeds": SPARSE}, "no dense tensor"),
    ],
)
def test_wrong_embeddings_are_refused(server: Served, embeds: Any, match: str) -> None:
    answer = chat(server, with_embeds(embeds_of(GRID), embeds))
    assert refused(answer).startswith("messages[0]['content'][1]: ")
    assert match in refused(answer)
    assert answer.json["error"]["param"] == "messages"


def test_a_local_server_is_not_asked(server: Served) -> None:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)

    with HTTPServer(("127.0.0.1", 0), Handler) as local:
        threading.Thread(target=local.serve_forever, daemon=True).start()
        for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "127.1"):
            source = f"http://{host}:{local.server_port}/a.png"
            assert refused(chat(server, [{"role": "user", "content": [part(source)]}])), host
        local.shutdown()
    assert asked == []


def test_too_many_pictures_are_refused_before_any_is_read(server: Served) -> None:
    answer = chat(server, messages(*[NO_IMAGE] * (MAX_IMAGES + 1)))
    assert f"At most {MAX_IMAGES} image(s) may be provided in one prompt" in refused(answer)
    assert answer.json["error"]["param"] == "messages"


@pytest.mark.parametrize("mark", ["<|image_pad|>", "<|video_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"])
def test_what_stands_for_a_picture_is_no_text(server: Served, mark: str) -> None:
    answer = chat(server, messages(FIRST, text=f"a {mark} b"))
    assert refused(answer).startswith("messages[0]['content'][1]: must not have")
    completion = server.post("/v1/completions", {"prompt": f"a {mark} b", "max_tokens": 2})
    assert completion.status == 200, "there it is a token like others, and stands for nothing"


def test_a_refused_request_leaves_others_as_they_are(server: Served, offline: LLM) -> None:
    asked = messages(FIRST, text="tell me more")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(chat, server, asked, max_tokens=200, ignore_eos=True, stream=True)
        for _ in range(5):
            assert chat(server, messages(FIRST, NO_IMAGE)).status == 400
            assert chat(server, [{"role": "user", "content": [part("http://nowhere.invalid/a.png")]}]).status == 422
        events = running.result().events
    text = "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    [output] = offline.chat(asked, params, use_tqdm=False)
    assert text == output.outputs[0].text


def test_health_is_told_while_large_pictures_come(server: Served) -> None:
    large = [png(Image.fromarray(draw(2000, 2000, seed))) for seed in range(4)]
    waits: list[float] = []
    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(chat, server, messages(large[i % 4], text=f"{i}")) for i in range(16)]
        while not all(each.done() for each in answers):
            began = time.monotonic()
            assert server.get("/health").status == 200
            waits.append(time.monotonic() - began)
            time.sleep(0.02)
    assert {each.result().status for each in answers} == {200}
    assert max(waits) < HEALTH_SECONDS


def replace_fetch(server: Served, patch: pytest.MonkeyPatch, fetch: Callable[..., bytes]) -> list[dict[str, Any]]:
    """Have a function fetch pictures for a server, and return a conversation that has it called once."""
    reader = server.llm.front.inputs._reader
    assert reader is not None
    patch.setattr(reader._connector, "fetch", fetch)
    return [{"role": "user", "content": [part("https://a.example/a.png")]}]


def test_pictures_that_take_long_hold_up_no_texts(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is long enough for a thread is answered while more pictures are waited for than there are threads."""
    released = threading.Event()

    def fetch(*_: Any) -> bytes:
        released.wait(20)
        return base64.b64decode(FIRST)

    asked = replace_fetch(server, monkeypatch, fetch)
    with ThreadPoolExecutor(NUM_SLOW) as pool:
        waiting = [pool.submit(chat, server, asked) for _ in range(NUM_SLOW)]
        try:
            while server.get("/load").json["server_load"] < NUM_SLOW:
                time.sleep(0.01)
            refused(chat(server, [{"role": "user", "content": "long " * CONTEXT}]))
            assert not any(each.done() for each in waiting)
        finally:
            released.set()
    assert {each.result().status for each in waiting} == {200}


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/tokenize"])
def test_counting_the_tokens_of_a_picture_holds_up_nobody(
    server: Served, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    asked_for, released = threading.Event(), threading.Event()

    def fetch(*_: Any) -> bytes:
        asked_for.set()
        assert released.wait(20)
        return base64.b64decode(FIRST)

    conversation = replace_fetch(server, monkeypatch, fetch)
    if path != "/tokenize":
        source = {"type": "url", "url": "https://a.example/a.png"}
        conversation = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    with ThreadPoolExecutor(1) as pool:
        counted = pool.submit(server.post, path, {"model": "tiny", "messages": conversation})
        try:
            assert asked_for.wait(20)
            assert server.get("/health").status == 200
            assert not counted.done()
        finally:
            released.set()
        assert counted.result().status == 200


def test_a_beam_search_fetches_a_picture_once(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[Any] = []

    def fetch(*names: Any) -> bytes:
        fetched.append(names)
        return base64.b64decode(FIRST)

    conversation = replace_fetch(server, monkeypatch, fetch)
    options = {"use_beam_search": True, "n": 2, "max_tokens": 2, "ignore_eos": True}
    assert chat(server, conversation, **options).status == 200
    assert len(fetched) == 1


@asynccontextmanager
async def mocked(_args: argparse.Namespace) -> AsyncIterator[AsyncLLM]:
    """Start an engine that reads pictures, and answers without a model."""
    with mock_llm(AsyncEngineArgs(**arguments())) as llm:
        yield llm


def test_lines_of_a_batch_have_pictures(offline: LLM, tmp_path: Path) -> None:
    [output] = offline.chat(messages(FIRST), SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.prompt_token_ids is not None
    lines = [
        {"custom_id": "good", "body": {"messages": messages(FIRST)}},
        {"custom_id": "broken", "body": {"messages": messages(FIRST, NO_IMAGE)}},
        {"custom_id": "local", "body": {"messages": [{"role": "user", "content": [part("file:///etc/passwd")]}]}},
    ]
    asked = {"method": "POST", "url": run_batch.CHAT_URL}
    text = "".join(json.dumps(asked | {**line, "body": {**line["body"], "max_tokens": 2}}) + "\n" for line in lines)
    (tmp_path / "in.jsonl").write_text(text)
    words = ["run-batch", "m", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    run_batch.run(make_parser()[0].parse_args(words), mocked)
    answers = [json.loads(line)["response"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [each["status_code"] for each in answers] == [200, 400, 400]
    assert answers[0]["body"]["usage"]["prompt_tokens"] == len(output.prompt_token_ids)
    parts = [each["body"]["error"]["message"].partition(": ")[0] for each in answers[1:]]
    assert parts == ["messages[0]['content'][1]", "messages[0]['content'][0]"]


def test_pictures_of_the_command_line(
    server: Served, offline: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are sent to a server, and to an engine of the same program."""
    file = tmp_path / "a.png"
    file.write_bytes(base64.b64decode(FIRST))
    sampling = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
    words = ("--image", str(file), "-q", "what?", "--temperature", "0", "--max-tokens", str(MAX_TOKENS))
    assert main(["chat", "--url", server.url, *words]) == 0
    answer = expected(offline, messages(FIRST))
    assert capsys.readouterr().out == answer + "\n"
    pieces: list[str] = []
    chat_command._EngineChat(offline.llm_engine, sampling).reply(messages(FIRST), pieces.append)
    assert "".join(pieces) == answer


def test_a_beam_search_sees_pictures(server: Served, offline: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    answer = chat(server, messages(FIRST), use_beam_search=True, n=2, max_tokens=4, ignore_eos=True)
    assert answer.status == 200, answer.body
    [output] = offline.chat(messages(FIRST), SamplingParams(max_tokens=1), use_tqdm=False)
    rows = sum(each.length for each in (output.multi_modal_placeholders or {})["image"])
    assert answer.json["usage"]["prompt_tokens_details"]["multimodal_tokens"] == rows
    prompt = TextPrompt(prompt=output.prompt or "", multi_modal_data={"image": picture(FAMILY, 0)})
    [searched] = offline.beam_search([prompt], params)
    texts = [each["message"]["content"] for each in answer.json["choices"]]
    assert len(texts) == len(searched.sequences) == 2
    assert all((each.text or "").endswith(text) for each, text in zip(searched.sequences, texts, strict=True))


def test_metrics_and_development_routes(server: Served) -> None:
    def value(name: str) -> float:
        lines = server.get("/metrics").body.decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}_total{{"))

    chat(server, messages(FIRST))
    queries, hits = value("mm_cache_queries"), value("mm_cache_hits")
    chat(server, messages(FIRST))
    assert (value("mm_cache_queries"), value("mm_cache_hits")) == (queries + 1, hits + 1)
    assert server.post("/reset_mm_cache", None).status == 200
    assert server.post("/reset_encoder_cache", None).json == {"success": True}
    chat(server, messages(FIRST))
    assert (value("mm_cache_queries"), value("mm_cache_hits")) == (queries + 2, hits + 1)


def check_that_it_sees(server: Served, sees: bool) -> None:
    """Check that a server says of its model whether it sees."""
    [card] = server.get("/v1/models").json["data"]
    assert card["capabilities"] == {"vision": sees}
    assert ("vision" in server.post("/api/show", {"model": "tiny"}).json["capabilities"]) is sees


def test_clients_learn_that_the_model_sees(server: Served, mock_server: Served) -> None:
    changed: dict[str, Any] = arguments() | {"limit_mm_per_prompt": {"image": 0}}
    with mock_llm(AsyncEngineArgs(**changed)) as llm, served(llm) as videos_alone:
        check_that_it_sees(videos_alone, False)
    check_that_it_sees(server, True)
    check_that_it_sees(mock_server, False)


def test_decisions_see_pictures(offline: LLM, server: Served) -> None:
    asked = {"a": {"type": "choice", "instructions": "which?", "criteria": {"b": None, "bc": None}}}
    expected, plain = (
        offline.decide("one", asked, images=images)[0] for images in ([part(url(FIRST)), part(url(SECOND))], [])
    )
    inline = {"content_type": "image/png", "base64": SECOND}
    answer = server.post("/v1/systemone", {"state": "one", "questions": asked, "images": [url(FIRST), inline]}).json
    assert answer["answers"]["a"]["probabilities"] == expected.answers["a"].probabilities
    assert answer["usage"]["input_tokens"] == expected.num_input_tokens > plain.num_input_tokens
    assert expected.answers["a"].logprobs != plain.answers["a"].logprobs
    question = {"type": "choice", "instructions": "which?", "choices": [{"value": "b"}, {"value": "bc"}]}
    content = [{"type": "input_image", "image_url": url(each)} for each in (FIRST, SECOND)]
    sent = [{"role": "user", "content": [*content, {"type": "input_text", "text": "one"}]}]
    answer = server.post("/v1/decisions", {"input": sent, "questions": [question]}).json
    shown = [each["probability"] for each in answer["answers"][0]["probabilities"]]
    assert shown == list(expected.answers["a"].probabilities.values())
    refused = server.post("/v1/systemone", {"state": "one", "questions": asked, "images": [url(NO_IMAGE)]})
    assert (refused.status, refused.json["error"]["param"]) == (400, "images")
