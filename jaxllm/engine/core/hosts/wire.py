"""The messages between the hosts of one model, encoded by msgspec."""

from __future__ import annotations

import msgspec

from jaxllm.execution.launcher import Launch, decode_array, encode_array


class Agreement(msgspec.Struct, frozen=True, tag=True):
    """The sizes that the first host has chosen by its memory, for the others to take."""

    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    facts: dict[str, str]
    """Digests, by name, of all that programs are compiled from; they must be the same on all hosts."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A host has its parameters and waits for launches."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life."""


class End(msgspec.Struct, frozen=True, tag=True):
    """The engine is shut down: this is the last message."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The sender cannot go on, or has lost a host; all end."""

    message: str


Message = Agreement | Ready | Beat | End | Failed | Launch

_encoder = msgspec.msgpack.Encoder(enc_hook=encode_array)
_decoder = msgspec.msgpack.Decoder(Message, dec_hook=decode_array)


def encode(message: Message) -> bytes:
    """Return a message's bytes."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Return the message of some bytes. Raises msgspec.MsgspecError for those of no message."""
    return _decoder.decode(data)
