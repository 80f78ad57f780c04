"""The worker's internal HTTP API: blocks, transfers, roles, probes, metrics.

``create_app`` puts it together from the parts; nothing here decides anything about blocks.
"""

from sangam_worker.api.app import ApiParts, create_app

__all__ = ["ApiParts", "create_app"]
