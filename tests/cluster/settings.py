"""What the cluster tests are told: which cluster, which images, how to reach the ingress.

Read from the environment, so that the same tests run on the small cluster of CI, on kind, and on a
GPU cluster (tests/README.md, "Tests on a cluster").
"""

import os
import shlex
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
CHART = REPOSITORY / "charts" / "sangam"
CPU_VALUES = CHART / "ci" / "cpu-values.yaml"

NAMESPACE = os.environ.get("SANGAM_TEST_NAMESPACE", "sangam-test")

INGRESS_URL = os.environ.get("SANGAM_TEST_INGRESS_URL", "http://10.250.0.1")
"""Where the ingress controller listens; requests name their host by header."""

INGRESS_CLASSES = os.environ.get("SANGAM_TEST_INGRESS_CLASSES", "traefik,nginx").split(",")

IMAGES = {
    "router.image": os.environ.get("SANGAM_TEST_ROUTER_IMAGE", "localhost/sangam-router:test"),
    "workers.defaults.image": os.environ.get(
        "SANGAM_TEST_WORKER_IMAGE", "localhost/sangam-worker:test"
    ),
    "redis.image": os.environ.get("SANGAM_TEST_REDIS_IMAGE", "localhost/redis:7"),
}

NODE_CIDR = os.environ.get("SANGAM_TEST_NODE_CIDR", "10.250.0.0/24")
"""The nodes' addresses, for the network policies."""

APISERVER_OUTAGE = shlex.split(os.environ.get("SANGAM_TEST_APISERVER_OUTAGE", ""))
"""A command that takes the API server away and brings it back; unset: that test is skipped."""

EXTRA_VALUES = os.environ.get("SANGAM_TEST_VALUES", "")
"""One more values file, for a cluster's own needs."""


def image_flags() -> list[str]:
    """``--set`` flags that name the images under test."""
    flags: list[str] = []
    for key, image in IMAGES.items():
        repository, _, tag = image.rpartition(":")
        flags += ["--set", f"{key}.repository={repository}", "--set-string", f"{key}.tag={tag}"]
    return flags
