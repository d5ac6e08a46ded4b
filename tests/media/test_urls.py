"""One parser reads the URLs of media, and refuses what parsers read differently."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.media.errors import MediaError
from jaxllm.media.fetching.addresses import is_private, is_public, parse_address
from jaxllm.media.fetching.urls import MAX_URL_LENGTH, HttpUrl, normalize_host, parse_http_url


@pytest.mark.parametrize(
    ("text", "host", "port", "target"),
    [
        ("http://example.com", "example.com", 80, "/"),
        ("HTTPS://Example.COM./a/b.png?x=1&y=%20#part", "example.com", 443, "/a/b.png?x=1&y=%20"),
        ("https://example.com:8443?q", "example.com", 8443, "/?q"),
        ("http://example.com:/a b/ü.png", "example.com", 80, "/a%20b/%C3%BC.png"),
        ("http://bücher.example/", "xn--bcher-kva.example", 80, "/"),
        ("http://[2001:DB8:0::1]:8080/", "2001:db8::1", 8080, "/"),
        ("http://\uff11\uff12\uff17.0.0.1/", "127.0.0.1", 80, "/"),
        ("http://127\u30020\u30020\u30021/", "127.0.0.1", 80, "/"),
    ],
)
def test_urls_are_normalized(text: str, host: str, port: int, target: str):
    url = parse_http_url(text)
    assert (url.host, url.port, url.target) == (host, port, target)
    assert parse_http_url(str(url)) == url


@pytest.mark.parametrize(
    "text",
    [
        "http://example.com\\@127.0.0.1/",  # CVE-2026-24779
        "http://127.0.0.1\\.example.com/",
        "http:\\\\127.0.0.1/",
        "http://example.com@127.0.0.1/",
        "http://user:secret@example.com/",
        "http://example.com/\r\nHost: other",
        "http://exa\tmple.com/",
        "\nhttp://example.com/",
        "http://example.com:22/",
        "http://example.com:0/",
        "http://example.com:65536/",
        "http://example.com:99999999999/",
        "http://example.com:80:80/",
        "http://example.com:-1/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://0x7f.0.0.1/",
        "http://0177.0.0.1/",
        "http://127.1/",
        "http://127.0.0.1.5/",
        "http://1.2.3.256/",
        "http://[fe80::1%25eth0]/",
        "http://[fe80::1%eth0]/",
        "http://[::1/",
        "http://::1/",
        "http://[127.0.0.1]/",
        "http:///path",
        "http://?query",
        "http://ex%61mple.com/",
        "http://example..com/",
        "http://-example.com/",
        "http://exam ple.com/",
        "http://example.com\uff0f@127.0.0.1/",
        "http://a\u2100b/",
        "http://" + "a" * 64 + ".com/",
        "http://" + "a." * 200 + "com/",
        "http://example.com/\udcff",
        "http://example.com/" + "a" * MAX_URL_LENGTH,
        "http:example.com",
        "ftp://example.com/",
        "",
    ],
)
def test_ambiguous_urls_are_refused(text: str):
    with pytest.raises(MediaError) as caught:
        parse_http_url(text)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("/b?c", "http://example.com:8080/b?c"),
        ("b", "http://example.com:8080/dir/b"),
        ("//other.example/b", "http://other.example/b"),
        ("https://other.example", "https://other.example/"),
    ],
)
def test_redirects_may_be_relative(location: str, expected: str):
    assert str(HttpUrl("http", "example.com", 8080, "/dir/a").redirect(location)) == expected


@pytest.mark.parametrize(
    "location", ["file:///etc/passwd", "data:,x", "//a\\@b", "http://user@b/", "http://[x", "/\t/b"]
)
def test_redirects_to_anything_else_are_refused(location: str):
    with pytest.raises(MediaError):
        HttpUrl("http", "example.com", 80, "/").redirect(location)


@settings(max_examples=200)
@given(st.text(max_size=40), st.sampled_from(["", "http://", "https://", "http://[", "http://a:"]))
def test_any_text_is_read_or_refused(text: str, start: str):
    try:
        url = parse_http_url(start + text)
    except MediaError:
        return
    assert parse_http_url(str(url)) == url
    assert str(url).isascii()
    assert " " not in str(url)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_public_addresses(address: str):
    assert is_public(parse_address(address))


PRIVATE = [
    "127.0.0.1",
    "127.255.0.9",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "100.64.0.1",
    "::1",
    "fc00::1",
    "fd00:ec2::254",
    "::ffff:127.0.0.1",
    "::ffff:a00:1",
    "64:ff9b::7f00:1",
    "64:ff9b::10.0.0.1",
]
NEVER = [
    "168.63.129.16",
    "169.254.169.254",
    "::ffff:169.254.169.254",
    "64:ff9b::a9fe:a9fe",
    "fe80::1",
    "fec0::1",
    "0.0.0.0",
    "0.1.2.3",
    "::",
    "224.0.0.1",
    "239.1.1.1",
    "ff02::1",
    "ff0e::1",
    "240.0.0.1",
    "255.255.255.255",
    "192.0.0.8",
    "192.0.2.1",
    "192.88.99.1",
    "198.18.0.1",
    "2002:7f00:1::",
    "2002:808:808::",
    "2001::1",
    "2001:db8::1",
    "3fff::1",
    "64:ff9b:1::1",
    "100::1",
    "5f00::1",
    "::7f00:1",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_not_public(address: str):
    parsed = parse_address(address)
    assert is_private(parsed)
    assert not is_public(parsed)


@pytest.mark.parametrize("address", NEVER)
def test_special_addresses_are_neither_public_nor_private(address: str):
    parsed = parse_address(address)
    assert not is_private(parsed)
    assert not is_public(parsed)


@given(st.ip_addresses())
def test_no_address_is_both_public_and_private(address: ipaddress.IPv4Address | ipaddress.IPv6Address):
    parsed = parse_address(str(address))
    assert not (is_public(parsed) and is_private(parsed))
    if parsed.is_private or parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified:
        assert not is_public(parsed)


def test_domains_are_normalized_like_hosts():
    assert normalize_host("BÜCHER.example.") == parse_http_url("http://bücher.EXAMPLE/").host
