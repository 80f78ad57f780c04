"""A Redis URL loses its password and nothing else."""

import pytest

from sangam_core.redis_url import without_password


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
