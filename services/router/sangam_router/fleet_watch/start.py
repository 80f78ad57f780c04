"""Makes the watcher that the settings ask for, or none. Called by ``router``."""

import asyncio
import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sangam_core.lease import LedgerKeys
from sangam_router.fleet_watch.watcher import FleetWatcher
from sangam_router.ledger.desires import Desires
from sangam_router.ledger.scripts import Client
from sangam_router.metrics import RouterMetrics
from sangam_router.settings import RouterSettings


@asynccontextmanager
async def fleet_watcher(
    settings: RouterSettings, redis: Client, metrics: RouterMetrics
) -> AsyncIterator[FleetWatcher | None]:
    """A watcher (to be run), or None where no namespace is set.

    Raises:
        ConfigurationError: there is no way to an API server.
    """
    if not settings.kubernetes_namespace:
        yield None
        return
    # In a thread: the client's import takes half a second.
    kubernetes_pods = await asyncio.to_thread(
        importlib.import_module, "sangam_router.fleet_watch.kubernetes_pods"
    )
    pods = kubernetes_pods.KubernetesPods(
        await kubernetes_pods.cluster_configuration(),
        namespace=settings.kubernetes_namespace,
        selector=settings.kubernetes_pod_selector,
    )
    try:
        yield FleetWatcher(
            pods,
            Desires(
                redis,
                LedgerKeys(settings.redis_namespace),
                settle_seconds=settings.worker_lease_seconds,
            ),
            metrics.fleet_watch,
            resync_seconds=settings.kubernetes_resync_seconds,
        )
    finally:
        await pods.aclose()
