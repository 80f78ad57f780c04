"""The Helm chart's schema of the `settings` maps, written from the settings classes.

Decides which settings are the chart's own business (it sets them itself, from other values) and how
the rest read as JSON Schema. It knows no service: the classes are named on the command line.

    python -m sangam_router.local.settings_schema charts/sangam/values.schema.json \\
        routerSettings=sangam_router.settings:RouterSettings \\
        workerSettings=sangam_worker.settings:WorkerSettings

replaces the file's definitions of these names and leaves the rest. A test holds the file to it.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sangam_core.errors import ConfigurationError
from sangam_core.settings import ServiceSettings
from sangam_router.local.settings_table import settings_class

CHART_SETS = frozenset(
    {
        # both: from `model`, `redis`, `auth`
        "model",
        "block_length",
        "internal_token",
        "redis_url",
        "redis_password",
        "redis_cluster",
        "redis_namespace",
        # routers: from `model`, `theta`, `overflow`, `router`, and what a pod must be
        "served_model_name",
        "theta_tokens",
        "overflow",
        "shutdown_seconds",
        "worker_lease_seconds",
        "api_keys",
        "public_host",
        "public_port",
        "internal_host",
        "internal_port",
        "router_id",
        "kubernetes_namespace",
        "kubernetes_pod_selector",
        # workers: from the counts, `tau`, `workers`, and what a pod must be
        "role",
        "tau_tokens_prefill",
        "tau_tokens_decode",
        "tau_tokens_colocated",
        "worker_id",
        "worker_name",
        "node_name",
        "host",
        "port",
        "port_range",
        "port_file",
        "advertise_host",
        "drain_deadline_seconds",
    }
)
"""Settings that no `settings` map may hold: the chart fills them from values that say more."""

_KEPT = (
    "type",
    "enum",
    "const",
    "minimum",
    "exclusiveMinimum",
    "maximum",
    "exclusiveMaximum",
    "minLength",
    "maxLength",
    "pattern",
)
"""What of a field's JSON Schema says which values are good."""

_PLAIN = frozenset({"string", "integer", "number", "boolean"})


def camel_case(name: str) -> str:
    """``lease_seconds`` as the chart's values have it: ``leaseSeconds``."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def settings_schema(kind: type[ServiceSettings]) -> dict[str, Any]:
    """JSON Schema of a `settings` map: every setting that the chart does not set itself.

    Raises:
        ConfigurationError: a field is no plain value, which a map cannot hold.
    """
    whole = kind.model_json_schema()
    definitions = whole.get("$defs", {})
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            camel_case(name): _value_schema(name, schema, definitions)
            for name, schema in whole["properties"].items()
            if name not in CHART_SETS
        },
    }


def _value_schema(name: str, schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    described = {**schema}
    for option in schema.get("anyOf", []):
        if option.get("type") != "null":
            described |= option
    if reference := described.get("$ref"):
        described = definitions[reference.rsplit("/", 1)[-1]] | described
    if described.get("type") not in _PLAIN:
        raise ConfigurationError(
            f"{name}: is no plain value; the chart has to set it itself (CHART_SETS)"
        )
    meaning = " ".join(described.get("description", "").split()).replace("``", "`")
    return {"description": meaning} | {key: described[key] for key in _KEPT if key in described}


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite a schema file's definitions: ``FILE NAME=MODULE:CLASS ...``."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) < 2 or not all("=" in pair for pair in arguments[1:]):
        sys.stderr.write("usage: settings_schema FILE NAME=MODULE:CLASS ...\n")
        return 2
    path = Path(arguments[0])
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
        for pair in arguments[1:]:
            name, _, where = pair.partition("=")
            schema["definitions"][name] = settings_schema(settings_class(where))
    except (ConfigurationError, OSError, ValueError, KeyError) as error:
        sys.stderr.write(f"{path}: {error}\n")
        return 1
    path.write_text(json.dumps(schema, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
