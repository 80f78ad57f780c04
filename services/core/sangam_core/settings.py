"""How services read their settings: one frozen tree, once, from ``SANGAM_`` variables.

Each service declares its own tree (each field with meaning, unit and reason), reads it in
``__main__`` with ``read_settings`` and passes it down. A bad value stops the start with one
line that names the variable.
"""

from typing import TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from sangam_core.errors import ConfigurationError

ENV_PREFIX = "SANGAM_"


class ServiceSettings(BaseSettings):
    """Base of a service's settings tree.

    Nested groups are read as ``SANGAM_GROUP__FIELD``.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        frozen=True,
        extra="ignore",
        use_attribute_docstrings=True,
    )


SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


def read_settings(kind: type[SettingsT]) -> SettingsT:
    """Read a settings tree from the environment.

    Raises:
        ConfigurationError: naming every variable that is missing or bad, on one line.
    """
    try:
        return kind()
    except ValidationError as error:
        problems = "; ".join(
            f"{ENV_PREFIX}{'__'.join(str(part) for part in problem['loc']).upper()}: "
            f"{problem['msg']} (got {problem.get('input')!r})"
            for problem in error.errors()
        )
        raise ConfigurationError(problems) from None
