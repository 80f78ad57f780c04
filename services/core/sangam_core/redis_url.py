"""What routers and workers both do to a Redis URL before redis-py reads it.

A password of its own (from a Secret, in any characters) must win over one in the URL, and
redis-py prefers the URL's.
"""


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
