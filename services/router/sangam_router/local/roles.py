"""How many workers of each role a local cluster has; refuses mixes that could not serve."""

from dataclasses import dataclass

from sangam_core.errors import ConfigurationError
from sangam_core.placement import Role


@dataclass(frozen=True, slots=True)
class RoleCounts:
    """Workers by role."""

    prefill: int = 0
    decode: int = 0
    colocated: int = 0

    def roles(self) -> list[Role]:
        """One entry a worker, prefill workers first."""
        return (
            [Role.PREFILL] * self.prefill
            + [Role.DECODE] * self.decode
            + [Role.COLOCATED] * self.colocated
        )

    def __str__(self) -> str:
        named = ((self.prefill, "prefill"), (self.decode, "decode"), (self.colocated, "colocated"))
        return ", ".join(f"{count} {name}" for count, name in named if count)


DEFAULT_ROLES = RoleCounts(colocated=2)
"""Workers without any role option: enough to see blocks spread, and one may die."""


def resolve_roles(prefill: int | None, decode: int | None, colocated: int | None) -> RoleCounts:
    """Fill in what was not said.

    Without any option two colocated workers; with ``prefill`` or ``decode`` given, none.

    Raises:
        ConfigurationError: the mix has nobody to prefill or nobody to decode, or a worker that
            would never get work; says what to add.
    """
    if prefill is None and decode is None and colocated is None:
        return DEFAULT_ROLES
    counts = RoleCounts(prefill or 0, decode or 0, colocated or 0)
    if counts == RoleCounts():
        raise ConfigurationError("no worker at all: add --colocated N, or --prefill N --decode N")
    if counts.prefill and not counts.decode and not counts.colocated:
        raise ConfigurationError(
            "prefill workers hand their blocks on, and nobody decodes them: "
            "add --decode N or --colocated N"
        )
    if counts.decode and not counts.prefill:
        raise ConfigurationError(
            "decode workers take their blocks from prefill workers, and there is none: "
            "add --prefill N (or use --colocated N alone)"
        )
    return counts
