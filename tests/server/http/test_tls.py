"""TLS: files that are no use are refused before an engine starts, and certificates can be changed."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import urllib.request
from pathlib import Path

import pytest

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.http import tls
from jaxllm.server.http.tls import refresh, tls_settings
from tests.server.test_run import server

pytestmark = pytest.mark.server

DATA = Path(__file__).resolve().parents[2] / "data" / "tls"


def args(**settings: object) -> ServerArgs:
    return ServerArgs(**({"ssl_certfile": str(DATA / "one.pem"), "ssl_keyfile": str(DATA / "one.key")} | settings))  # type: ignore[arg-type]


def test_a_server_speaks_tls(tokenizer: str) -> None:
    words = ("--ssl-certfile", str(DATA / "one.pem"), "--ssl-keyfile", str(DATA / "one.key"))
    context = ssl.create_default_context(cafile=str(DATA / "one.pem"))
    with server(tokenizer, *words) as (_, port):
        url = f"https://127.0.0.1:{port}/version"
        with urllib.request.urlopen(url, context=context) as answer:
            assert "version" in json.load(answer)


@pytest.mark.parametrize(
    ("settings", "parameter"),
    [
        ({"ssl_certfile": "/no/such.pem"}, "ssl_certfile"),
        ({"ssl_certfile": __file__}, "ssl_certfile"),
        ({"ssl_keyfile": str(DATA / "two.key")}, "ssl_certfile"),
        ({"ssl_certfile": None}, "ssl_keyfile"),
        ({"ssl_keyfile": None}, "ssl_keyfile"),
        ({"ssl_certfile": None, "ssl_keyfile": None, "ssl_cert_reqs": 2}, "ssl_cert_reqs"),
        ({"ssl_certfile": None, "ssl_keyfile": None, "enable_ssl_refresh": True}, "enable_ssl_refresh"),
        ({"ssl_cert_reqs": 2}, "ssl_cert_reqs"),
        ({"ssl_ca_certs": "/no/such.pem"}, "ssl_ca_certs"),
        ({"ssl_ciphers": "no such cipher"}, "ssl_ciphers"),
    ],
)
def test_files_that_are_no_use_are_refused_by_name(settings: dict[str, object], parameter: str) -> None:
    with pytest.raises(VLLMValidationError) as caught:
        tls_settings(args(**settings))
    assert caught.value.parameter == parameter


def test_without_a_certificate_there_is_no_tls() -> None:
    assert tls_settings(ServerArgs()) == {}


def test_a_certificate_that_changes_is_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its files do not fit each other the old one stays."""
    monkeypatch.setattr(tls, "LOOK_SECONDS", 0.01)
    cert, key = tmp_path / "cert", tmp_path / "key"
    shutil.copy(DATA / "one.pem", cert)
    shutil.copy(DATA / "one.key", key)
    server_args = args(ssl_certfile=str(cert), ssl_keyfile=str(key), enable_ssl_refresh=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE

    async def shown(port: int) -> bytes:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return certificate

    async def run() -> None:
        one, two = (ssl.PEM_cert_to_DER_cert((DATA / name).read_text()) for name in ("one.pem", "two.pem"))
        listening = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)
        port = listening.sockets[0].getsockname()[1]
        refreshing = asyncio.create_task(refresh(context, server_args))
        try:
            assert await shown(port) == one
            shutil.copy(DATA / "two.pem", cert)
            await asyncio.sleep(0.1)
            assert await shown(port) == one
            shutil.copy(DATA / "two.key", key)
            async with asyncio.timeout(10):
                while await shown(port) != two:
                    await asyncio.sleep(0.01)
        finally:
            refreshing.cancel()
            listening.close()

    asyncio.run(run())
