"""Live roles on Kubernetes: pods' annotations become workers' desired state in Redis.

``FleetWatcher`` is the entry; ``kubernetes_pods`` speaks to the API server. Workers themselves get
no API permission: they read Redis (``sangam_core.lease.DesiredState``).
"""

from sangam_router.fleet_watch.watcher import FleetWatcher, WatchStatus

__all__ = ["FleetWatcher", "WatchStatus"]
