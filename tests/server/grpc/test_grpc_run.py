"""How gRPC's port opens and closes, with TLS and without; what it needs is looked at before an engine starts."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.exceptions import VLLMValidationError
from jaxllm.server import run
from jaxllm.server.run import bind_grpc
from tests.async_engine.support import nothing_left
from tests.server.grpc_support import Client, client_of, grpc_opened, message_of, refusal
from tests.server.http.test_tls import DATA
from tests.server.support import mock_served
from tests.server.test_run import free_port, server

pytestmark = pytest.mark.server

ONE, TWO = ((DATA / f"{name}.pem", DATA / f"{name}.key") for name in ("one", "two"))
LONG = message_of({"prompt": [5], "max_tokens": 40_000, "ignore_eos": True})


def trusting(cert: Path, identity: tuple[Path, Path] | None = None) -> grpc.ChannelCredentials:
    """Return what a client connects with that trusts a certificate, and may have one of its own."""
    if identity is None:
        return grpc.ssl_channel_credentials(cert.read_bytes())
    return grpc.ssl_channel_credentials(cert.read_bytes(), identity[1].read_bytes(), identity[0].read_bytes())


def health_of(client: Client) -> int:
    health: Any = HealthStub(client.channel)
    return health.Check(HealthCheckRequest(), timeout=10).status


def test_r7_while_a_server_drains_what_runs_goes_on_and_nothing_is_taken(tokenizer: str) -> None:
    port = free_port()
    words = ("--grpc-port", str(port), "--shutdown-timeout", "60")
    words += ("--ssl-certfile", str(ONE[0]), "--ssl-keyfile", str(ONE[1]))
    with (
        nothing_left(),
        server(tokenizer, *words) as (process, _),
        client_of(f"127.0.0.1:{port}", trusting(ONE[0])) as client,
    ):
        assert health_of(client) == HealthCheckResponse.SERVING
        running = client.stream(LONG)
        next(running)
        process.send_signal(signal.SIGTERM)
        while health_of(client) == HealthCheckResponse.SERVING:
            next(running)
        code, _, metadata = refusal(lambda: client.whole(LONG))
        assert (code, metadata["retry-after"]) == (grpc.StatusCode.UNAVAILABLE, "1")
        next(running)
        process.send_signal(signal.SIGTERM)  # the second time it does not wait
        assert refusal(lambda: list(running))[0] in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert process.wait(20) == 0


def is_trusted(address: str, credentials: grpc.ChannelCredentials) -> bool:
    """Return whether a client and a server find each other's certificates good."""
    with client_of(address, credentials) as client:
        try:
            return health_of(client) == HealthCheckResponse.SERVING
        except grpc.RpcError:
            return False


def test_a_certificate_that_changes_is_used_for_new_connections(tokenizer: str, tmp_path: Path) -> None:
    """While its files do not fit each other the old one stays."""
    files = tmp_path / "cert", tmp_path / "key"
    for source, target in zip(ONE, files, strict=True):
        shutil.copy(source, target)
    words = ("--ssl-certfile", str(files[0]), "--ssl-keyfile", str(files[1]), "--enable-ssl-refresh")
    with mock_served(tokenizer, *words) as server, grpc_opened(server) as address:
        assert is_trusted(address, trusting(ONE[0]))
        shutil.copy(TWO[0], files[0])
        assert is_trusted(address, trusting(ONE[0]))
        shutil.copy(TWO[1], files[1])
        assert is_trusted(address, trusting(TWO[0]))
        assert not is_trusted(address, trusting(ONE[0]))


def test_clients_show_certificates_where_they_have_to(tokenizer: str) -> None:
    words = ("--ssl-certfile", str(ONE[0]), "--ssl-keyfile", str(ONE[1]), "--ssl-ca-certs", str(TWO[0]))
    with mock_served(tokenizer, *words, "--ssl-cert-reqs", "2") as server, grpc_opened(server) as address:
        assert is_trusted(address, trusting(ONE[0], TWO))
        assert not is_trusted(address, trusting(ONE[0]))
        assert not is_trusted(address, trusting(ONE[0], ONE))


@pytest.mark.parametrize(("name", "value"), [("ssl_ciphers", "ECDHE+AESGCM"), ("ssl_cert_reqs", 1)])
def test_what_grpcs_tls_cannot_do_is_refused_by_name(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"ssl_certfile": str(ONE[0]), "ssl_keyfile": str(ONE[1]), "ssl_ca_certs": str(ONE[0])}
    with pytest.raises(VLLMValidationError, match="grpc_port") as caught:
        bind_grpc(ServerArgs(**{**arguments, name: value}, grpc_port=0))
    assert caught.value.parameter == name


def test_without_its_packages_grpc_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        run, "find_spec", lambda name: None if name == "grpc_health" else importlib.util.find_spec(name)
    )
    with pytest.raises(VLLMValidationError, match=r"jaxllm\[grpc\]") as caught:
        bind_grpc(ServerArgs(grpc_port=0))
    assert caught.value.parameter == "grpc_port"
    assert bind_grpc(ServerArgs()) is None


def test_r25_a_port_in_use_is_told_before_an_engine_starts() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(VLLMValidationError, match=f"127.0.0.1:{port} cannot be listened on") as caught:
            bind_grpc(ServerArgs(host="127.0.0.1", grpc_port=port))
    assert caught.value.parameter == "grpc_port"


def test_until_the_engine_is_ready_the_port_is_not_open() -> None:
    listener = bind_grpc(ServerArgs(host="127.0.0.1", grpc_port=0))
    assert listener is not None
    with contextlib.closing(listener), socket.socket() as client:
        assert client.connect_ex(listener.getsockname()) == errno.ECONNREFUSED
