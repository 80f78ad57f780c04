"""What routers and workers both do to a Redis URL before redis-py reads it.

A password of its own (from a Secret, in any characters) must win over one in the URL, and
redis-py prefers the URL's.
"""


def without_password(url: str) -> str:
    """The URL with its user, but without a password: ``redis://u:p@host`` is ``redis://u@host``."""
    scheme, found, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    credentials, at, address = authority.rpartition("@")
    user = credentials.partition(":")[0]
    return f"{scheme}{found}{user}{at if user else ''}{address}{slash}{path}"
