"""Which addresses are public, in every form they can be written in, and which hosts a list permits."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest

from callyard.worker.io.addresses import HostRules, find_refusal, normalize_pattern, parse_address
from callyard.worker.io.config import ANYWHERE

REFUSED = {
    "127.0.0.1": "loopback",
    "127.255.255.254": "loopback",
    "0.0.0.0": "unspecified",
    "0.1.2.3": "unspecified",
    "10.0.0.1": "private",
    "172.16.0.1": "private",
    "172.31.255.255": "private",
    "192.168.1.1": "private",
    "169.254.169.254": "link-local",
    "100.64.0.1": "shared address space",
    "192.0.0.8": "reserved",
    "192.0.2.1": "private",
    "192.88.99.1": "reserved",
    "198.18.0.1": "reserved",
    "198.51.100.1": "private",
    "224.0.0.1": "multicast",
    "239.255.255.250": "multicast",
    "240.0.0.1": "reserved",
    "255.255.255.255": "broadcast",
    "::": "unspecified",
    "::1": "loopback",
    "fe80::1": "link-local",
    "fe80::1%eth0": "link-local",
    "fc00::1": "private",
    "fd12:3456::1": "private",
    "fec0::1": "private",
    "ff02::1": "multicast",
    "2001:db8::1": "reserved",
    "100::1": "reserved",
    "3fff::1": "reserved",
    "64:ff9b:1::1": "private",
    "::ffff:127.0.0.1": "loopback",
    "::ffff:10.0.0.1": "private",
    "::ffff:a9fe:a9fe": "link-local",
    "::127.0.0.1": "loopback",
    "64:ff9b::7f00:1": "loopback",
    "64:ff9b::a9fe:a9fe": "link-local",
    "2002:7f00:1::": "loopback",
    "2002:a00:1::1": "private",
    "2001:0:0:0:0:0:80ff:fffe": "loopback",  # Teredo, whose client is 127.0.0.1
}
PUBLIC = [
    *("8.8.8.8", "1.1.1.1", "93.184.216.34", "172.32.0.1", "100.128.0.1", "223.255.255.254"),
    *("2606:4700:4700::1111", "2a00:1450::1", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1"),
]


@pytest.mark.requirement("X42")
@pytest.mark.parametrize(("text", "kind"), REFUSED.items())
def test_refused_addresses(text: str, kind: str) -> None:
    address = parse_address(text)
    assert address is not None
    assert find_refusal(address) == kind
    assert find_refusal(address, ANYWHERE) is None


@pytest.mark.requirement("X42")
@pytest.mark.parametrize("text", PUBLIC)
def test_public_addresses(text: str) -> None:
    assert find_refusal(ip_address(text)) is None


@pytest.mark.requirement("X42")
def test_a_network_allows_itself_only_however_its_address_is_written() -> None:
    allowed = [ip_network("10.1.0.0/16")]
    assert find_refusal(ip_address("10.1.2.3"), allowed) is None
    assert find_refusal(ip_address("::ffff:10.1.2.3"), allowed) is None
    assert find_refusal(ip_address("10.2.0.1"), allowed) == "private"
    assert find_refusal(ip_address("127.0.0.1"), allowed) == "loopback"


@pytest.mark.parametrize("text", ["2130706433", "0x7f.1", "127.1", "0177.0.0.1", "localhost", "", "1.2.3.4.5"])
def test_what_only_a_resolver_reads_is_no_literal(text: str) -> None:
    assert parse_address(text) is None


@pytest.mark.requirement("X42")
@pytest.mark.parametrize(
    ("pattern", "host", "port", "permitted"),
    [
        ("*", "anything.example", 80, True),
        ("example.com", "example.com", 443, True),
        ("example.com", "example.com.", 443, True),
        ("example.com", "www.example.com", 443, False),
        ("example.com", "badexample.com", 443, False),
        ("example.com", "example.com.evil.net", 443, False),
        ("*.example.com", "a.example.com", 443, True),
        ("*.example.com", "a.b.example.com", 443, True),
        ("*.example.com", "example.com", 443, False),
        ("*.example.com", "evilexample.com", 443, False),
        ("example.com:8443", "example.com", 8443, True),
        ("example.com:8443", "example.com", 443, False),
        ("*:443", "example.com", 443, True),
        ("*:443", "example.com", 80, False),
        ("EXAMPLE.com.", "example.com", 80, True),
        ("bücher.example", "xn--bcher-kva.example", 80, True),
        ("127.0.0.1", "127.0.0.1", 80, True),
        ("127.0.0.1:80", "127.0.0.1", 81, False),
        ("::1", "::1", 80, True),
        ("[::1]:80", "0:0:0:0:0:0:0:1", 80, True),
        ("[::1]:80", "::1", 81, False),
    ],
)
def test_host_patterns(pattern: str, host: str, port: int, permitted: bool) -> None:
    assert HostRules((normalize_pattern(pattern),)).permits(host, port) is permitted


@pytest.mark.parametrize(
    "text", ["", " ", "https://example.com", "example.com/path", "a*b.com", "*.*.com", "u@host", "a b"]
)
def test_patterns_that_can_never_match(text: str) -> None:
    with pytest.raises(ValueError, match="got"):
        normalize_pattern(text)
