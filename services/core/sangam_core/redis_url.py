"""What routers and workers both do to a Redis URL before redis-py reads it, and ask of a client.

A password of its own (from a Secret, in any characters) must win over one in the URL, and
redis-py prefers the URL's. The clients, and what they repeat, are the services' decision.
"""

from typing import Any

from pydantic import SecretStr


def client_settings(
    url: str, password: SecretStr | None, timeout_seconds: float
) -> tuple[str, dict[str, Any]]:
    """The URL and the arguments that every client of redis-py is made with.

    Args:
        password: wins over one in the URL.
        timeout_seconds: of connecting, and of every reply: nothing may hang.
    """
    settings: dict[str, Any] = {
        "decode_responses": True,
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": timeout_seconds,
        "socket_keepalive": True,
        "protocol": 2,
    }
    if password is None:
        return url, settings
    return without_password(url), settings | {"password": password.get_secret_value()}


def without_password(url: str) -> str:
    """The URL with its user, but without a password: ``redis://u:p@host`` is ``redis://u@host``.

    Also where the password holds what a URL may not (``/``, ``?``): such a URL is shown in errors.
    """
    scheme, found, rest = url.partition("://")
    head, mark, query = rest.partition("?")
    if "@" in query and "@" not in head:
        head, mark, query = rest, "", ""
    credentials, at, address = head.rpartition("@")
    user = credentials.partition(":")[0]
    return f"{scheme}{found}{user}{at if user else ''}{address}{mark}{query}"
