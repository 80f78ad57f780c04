"""Makes the Redis client that the ledger runs on.

Decides timeouts and connection settings: nothing may hang, and retrying is the ledger's decision
(``session``), since a command whose reply was lost may have been carried out.
"""

from pydantic import SecretStr
from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from sangam_core.errors import ConfigurationError
from sangam_core.redis_url import client_settings, without_password
from sangam_router.ledger.scripts import Client

_CLUSTER_NUM_RETRIES = 1
"""A cluster client needs one more try to follow a fail-over; scripts bear being repeated."""

_HEALTH_CHECK_SECONDS = 15.0
"""A connection that is idle for longer is probed before it is used."""


def connect(
    url: str,
    *,
    password: SecretStr | None = None,
    cluster: bool = False,
    timeout_seconds: float,
) -> Client:
    """A client for a Redis or Valkey >= 6.2, or a cluster of them. Connects on first use.

    Args:
        url: ``redis://[[user]:password@]host:port[/db]``, or ``rediss://`` for TLS (redis-py's
            query parameters, e.g. ``?ssl_ca_certs=/ca.crt``, are understood). Of a cluster, any
            node.
        password: wins over one in the URL.
        timeout_seconds: of connecting, and of every reply.

    Raises:
        ConfigurationError: the URL cannot be used.
    """
    url, settings = client_settings(url, password, timeout_seconds)
    settings["health_check_interval"] = _HEALTH_CHECK_SECONDS
    try:
        if cluster:
            return RedisCluster.from_url(
                url, retry=Retry(NoBackoff(), _CLUSTER_NUM_RETRIES), **settings
            )
        return Redis.from_url(url, retry=Retry(NoBackoff(), 0), **settings)
    except (ValueError, TypeError, exceptions.RedisError) as error:
        raise ConfigurationError(f"redis url {without_password(url)!r}: {error}") from error
