"""The messages between a front end and its core as frames: msgpack, of bounded size, each typed.

A message to the core has two frames, the id of the request that it is about and its body; a new request has a third
frame, its prompt, and more for the patches of its images and videos. A message from the core has one frame.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxllm.core_messages import EngineCoreOutputs, EngineCoreRequest, RequestError
from jaxllm.engine.transport.engine_ready import EngineReady
from jaxllm.text.tokenizer_parts import TokenizerParts

MAX_FRAME_BYTES = 256 << 20
"""A larger frame is refused where it is made; the socket of the other side drops the peer that sends one."""
_MAX_PATCH_BYTES = 64 << 20
"""The size of the frames that an item's patches are sent in; the last one may be smaller."""


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """A message that queues a request, whose prompt and patches are frames of their own."""

    request: EngineCoreRequest
    num_frames: list[int] = []
    """The number of frames of each item's patches; empty where the request is whole."""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """A message that ends sequences."""

    sequence_ids: list[str]


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """A message that gives up the blocks that ended sequences have kept for forks."""

    sequence_ids: list[str]


class Call(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """A message that calls a method of the core and wants a `Reply`."""

    call_id: int
    method: str
    arguments: list[Any]


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """A message that ends the core."""


class Starting(msgspec.Struct, frozen=True, array_like=True, tag="starting"):
    """A message that brings the tokenizer, before the core is ready; None if the engine has none."""

    tokenizer: TokenizerParts | None


class Reply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    """The answer to a `Call`: a value, or an error."""

    call_id: int
    value: Any = None
    error: RequestError | None = None


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    """A sign of life, sent twice a second by a thread of its own."""

    step_seconds: float
    """The seconds that the present work has taken, compiling not counted; 0.0 when the core rests."""
    is_compiling: bool
    """True if its work waits for a program to be compiled, which may take minutes."""
    is_warm: bool
    """True once every program is compiled."""
    num_compiled: int = 0
    """The number of programs compiled since the start."""


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """The last message of a core that cannot go on; "invalid" for engine arguments that cannot be used."""

    error: RequestError


class Told(msgspec.Struct, frozen=True, array_like=True, tag="told"):
    """A change of what several front ends of one engine share, from their parent; each acknowledges it by its id."""

    told_id: int
    kind: str
    key: str
    value: Any
    """None takes back what was told under this key."""


type ToCore = Add | Abort | Release | Call | Shutdown
type FromCore = Starting | EngineReady | EngineCoreOutputs | Reply | Heartbeat | Failure | Told


class FrameError(Exception):
    """A message that cannot be read, or that is too large; `request_id` is that of the request it is about, or ""."""

    def __init__(self, message: str, request_id: str = "") -> None:
        super().__init__(message)
        self.request_id = request_id


_encoder = msgspec.msgpack.Encoder()
_to_core = msgspec.msgpack.Decoder(ToCore.__value__)
_from_core = msgspec.msgpack.Decoder(FromCore.__value__)


def encode_to_core(message: ToCore) -> list[bytes | memoryview]:
    """Return the frames of a message, with views of its patches. Raises FrameError if it is too large."""
    if not isinstance(message, Add):
        return _bounded([b"", _encoder.encode(message)])
    request = message.request
    cut = [_cut(numbers) for numbers in _numbers(request)]
    head = msgspec.structs.replace(_with_patches(request, [b""] * len(cut)), prompt_token_ids=[])
    prompt = array("i", request.prompt_token_ids).tobytes()
    body = _encoder.encode(Add(head, [len(pieces) for pieces in cut]))
    frames = [request.request_id.encode(), body, prompt, *itertools.chain.from_iterable(cut)]
    return _bounded(frames, request.request_id)


def decode_to_core(frames: Sequence[bytes | memoryview]) -> ToCore:
    """Return the message of some frames. Raises FrameError, and nothing else, whatever they hold."""
    request_id = ""
    try:
        request_id = bytes(frames[0]).decode()
        message = _to_core.decode(frames[1])
        if not isinstance(message, Add):
            return message
        if message.request.request_id != request_id:
            raise ValueError(f"it is about {message.request.request_id!r}")
        prompt = array("i")
        prompt.frombytes(frames[2])
        request = msgspec.structs.replace(message.request, prompt_token_ids=prompt.tolist())
        return Add(_with_patches(request, _joined(frames[3:], message.num_frames)))
    except Exception as error:  # msgspec raises UnicodeDecodeError and RecursionError too
        raise FrameError(f"{type(error).__name__}: {error}", request_id) from error


def _numbers(request: EngineCoreRequest) -> list[bytes]:
    """Return the patches of a request's images and videos, and the spectrogram of its clip."""
    patches = [] if request.media is None else [item.patches for item in request.media.items]
    return patches if request.clip is None else [*patches, request.clip.mels]


def _cut(patches: bytes) -> list[memoryview]:
    """Return an item's patches as the contents of its frames, at least one."""
    view = memoryview(patches)
    return [view[start : start + _MAX_PATCH_BYTES] for start in range(0, len(view) or 1, _MAX_PATCH_BYTES)]


def _joined(frames: Sequence[bytes | memoryview], num_frames: Sequence[int]) -> list[bytes]:
    """Return the patches of each item. Raises ValueError unless each has a frame and no frame is left over."""
    if sum(num_frames) != len(frames) or any(number < 1 for number in num_frames):
        raise ValueError(f"{len(frames)} frames are not {num_frames}")
    rest = iter(frames)
    cut = [list(itertools.islice(rest, number)) for number in num_frames]
    return [bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces) for pieces in cut]


def _with_patches(request: EngineCoreRequest, patches: Sequence[bytes]) -> EngineCoreRequest:
    """Return a request with other `_numbers`."""
    media, clip = request.media, request.clip
    if clip is not None:
        *patches, mels = patches
        request = msgspec.structs.replace(request, clip=msgspec.structs.replace(clip, mels=mels))
    if media is None:
        return request
    pairs = zip(media.items, patches, strict=True)
    items = [msgspec.structs.replace(item, patches=numbers) for item, numbers in pairs]
    return msgspec.structs.replace(request, media=msgspec.structs.replace(media, items=items))


def encode_from_core(message: FromCore) -> bytes:
    """Return the frame of a message. Raises FrameError if it is too large."""
    frame = _encoder.encode(message)
    _bounded([frame])
    return frame


def decode_from_core(frame: bytes) -> FromCore:
    """Return the message of a frame. Raises FrameError, and nothing else, whatever it holds."""
    try:
        return _from_core.decode(frame)
    except Exception as error:
        raise FrameError(f"{type(error).__name__}: {error}") from error


def _bounded(frames: list[bytes | memoryview], request_id: str = "") -> list[bytes | memoryview]:
    largest = max(map(len, frames))
    if largest > MAX_FRAME_BYTES:
        message = f"it takes {largest} bytes, and at most {MAX_FRAME_BYTES} cross to another process"
        raise FrameError(message, request_id)
    return frames
