"""A Redis URL loses its password and nothing else."""

import pytest
from pydantic import SecretStr

from sangam_core.redis_url import client_settings, without_password


@pytest.mark.parametrize(
    ("url", "bare"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://:secret@host:6379/0", "redis://host:6379/0"),
        (
            "rediss://user:se@cr:et@host/1?ssl_ca_certs=/ca.crt",
            "rediss://user@host/1?ssl_ca_certs=/ca.crt",
        ),
        ("redis://user@host", "redis://user@host"),
        ("redis://:se/cret@host:6379/0", "redis://host:6379/0"),
        ("redis://user:se?cr/et@host/0", "redis://user@host/0"),
        ("redis://:secret@host/0?client_name=a@b", "redis://host/0?client_name=a@b"),
    ],
)
def test_a_url_loses_its_password_and_nothing_else(url: str, bare: str) -> None:
    assert without_password(url) == bare


def test_a_password_of_its_own_stands_beside_a_url_without_one() -> None:
    url, settings = client_settings("redis://u:old@host/1", SecretStr("n/w"), 0.5)
    assert (url, settings["password"]) == ("redis://u@host/1", "n/w")
    url, settings = client_settings("redis://u:old@host/1", None, 0.5)
    assert url == "redis://u:old@host/1"
    assert "password" not in settings


def test_connecting_and_every_reply_have_a_limit() -> None:
    _, settings = client_settings("redis://host", None, 0.5)
    assert (settings["socket_timeout"], settings["socket_connect_timeout"]) == (0.5, 0.5)
