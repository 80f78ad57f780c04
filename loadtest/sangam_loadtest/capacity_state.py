"""The file by which an interrupted search for capacity goes on.

Decides its format and that it belongs to the same search: every parameter is compared, since
probes of another trace or server would silently give a wrong answer. Called by the ``capacity``
command.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sangam_core.errors import SangamError
from sangam_loadtest.capacity import ProbeResult
from sangam_loadtest.run_files import write_json

_VERSION = 1


class StateError(SangamError):
    """The state file is of another search, or is damaged."""


class CapacityState:
    """The probes made so far, kept in a file.

    Args:
        parameters: all that a probe's result depends on, as plain JSON data.

    Raises:
        StateError: the file is of a search with other parameters, or no state file.
    """

    def __init__(self, path: Path, parameters: Mapping[str, Any]) -> None:
        self._path = path
        self._parameters = json.loads(json.dumps(parameters))
        self.probes: list[ProbeResult] = self._read() if path.exists() else []

    def add(self, result: ProbeResult) -> None:
        """Keep a probe's result, on disk before this returns."""
        self.probes.append(result)
        write_json(
            self._path,
            {
                "version": _VERSION,
                "parameters": self._parameters,
                "probes": [_plain(probe) for probe in self.probes],
            },
        )

    def _read(self) -> list[ProbeResult]:
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            version, kept = content["version"], content["parameters"]
            probes = [ProbeResult(**probe) for probe in content["probes"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateError(
                f"{self._path}: not the state of a search ({error!r}); name another with --state"
            ) from error
        if version != _VERSION:
            raise StateError(f"{self._path}: of version {version}, not {_VERSION}")
        if different := _differences(kept, self._parameters):
            raise StateError(
                f"{self._path}: of a search with other parameters ({'; '.join(different)}); "
                "name another file with --state, or delete this one"
            )
        return probes


def _plain(result: ProbeResult) -> dict[str, Any]:
    return {
        "rate": result.rate,
        "values": result.values,
        "num_requests": result.num_requests,
        "num_failed": result.num_failed,
        "violations": result.violations,
    }


def _differences(kept: Any, asked: Any, where: str = "") -> list[str]:
    """Paths at which two pieces of JSON data differ, with both values."""
    if isinstance(kept, dict) and isinstance(asked, dict):
        found: list[str] = []
        for key in sorted(kept.keys() | asked.keys()):
            path = f"{where}.{key}" if where else str(key)
            found += _differences(kept.get(key), asked.get(key), path)
        return found
    return [] if kept == asked else [f"{where}: {kept!r} there, {asked!r} here"]
