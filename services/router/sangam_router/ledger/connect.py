"""Makes the Redis client that the ledger runs on.

Decides timeouts and connection settings: nothing may hang, and retrying is the ledger's decision
(``session``), since a command whose reply was lost may have been carried out.
"""

from typing import Any

from pydantic import SecretStr
from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from sangam_core.errors import ConfigurationError
from sangam_core.redis_url import without_password
from sangam_router.ledger.scripts import Client

_CLUSTER_NUM_RETRIES = 1
"""A cluster client needs one more try to follow a fail-over; scripts bear being repeated."""


def connect(
    url: str,
    *,
    password: SecretStr | None = None,
    cluster: bool = False,
    timeout_seconds: float = 2.0,
    health_check_seconds: float = 15.0,
) -> Client:
    """A client for a Redis or Valkey >= 6.2, or a cluster of them. Connects on first use.

    Args:
        url: ``redis://[[user]:password@]host:port[/db]``, or ``rediss://`` for TLS (redis-py's
            query parameters, e.g. ``?ssl_ca_certs=/ca.crt``, are understood). Of a cluster, any
            node.
        password: wins over one in the URL.
        timeout_seconds: of connecting, and of every reply.
        health_check_seconds: a connection idle for longer is probed before it is used.

    Raises:
        ConfigurationError: the URL cannot be used.
    """
    settings: dict[str, Any] = {
        "decode_responses": True,
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": timeout_seconds,
        "socket_keepalive": True,
        "health_check_interval": health_check_seconds,
        "protocol": 2,
    }
    if password is not None:
        settings["password"] = password.get_secret_value()
        url = without_password(url)
    try:
        if cluster:
            return RedisCluster.from_url(
                url, retry=Retry(NoBackoff(), _CLUSTER_NUM_RETRIES), **settings
            )
        return Redis.from_url(url, retry=Retry(NoBackoff(), 0), **settings)
    except (ValueError, TypeError, exceptions.RedisError) as error:
        raise ConfigurationError(f"redis url {without_password(url)!r}: {error}") from error
