"""Hosts and ports as URLs have them."""

from urllib.parse import urlsplit

import pytest

from sangam_core.addresses import http_url


@pytest.mark.parametrize(
    "host", ["10.0.0.7", "worker-0.example", "fd00::7", "::1", "::ffff:10.0.0.7"]
)
def test_a_url_gives_host_and_port_back(host: str) -> None:
    parts = urlsplit(http_url(host, 20001))
    assert (parts.hostname, parts.port) == (host, 20001)


def test_an_ipv6_address_stands_in_brackets() -> None:
    assert http_url("fd00::7", 20001) == "http://[fd00::7]:20001"
    assert http_url("10.0.0.7", 20001) == "http://10.0.0.7:20001"
