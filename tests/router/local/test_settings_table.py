"""Rows of the settings table, and the file that they are written into."""

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field, SecretStr

from sangam_core.errors import ConfigurationError
from sangam_core.settings import ServiceSettings
from sangam_router.local.settings_table import main, settings_class, settings_table, with_table


class Colour(StrEnum):
    """An enumeration."""

    RED = "red"


class Example(ServiceSettings):
    """A class with every kind of default."""

    port: int
    """Port, ``0`` for any."""
    colour: Colour = Colour.RED
    """Either a|b."""
    is_open: bool = False
    """Whether."""
    theta: float = math.inf
    """Theta."""
    limit: int | None = None
    """Limit."""
    token: SecretStr = SecretStr("")
    """Token."""
    url: SecretStr = SecretStr("redis://here")
    """Address."""
    name: Annotated[str, Field(min_length=1)] = Field(default_factory=lambda: "random")
    """Name."""
    num_bytes: int = 10
    """Bytes,
    over two lines."""


class Silent(ServiceSettings):
    """A class with a field that says nothing."""

    port: int = 1


THIS = f"{__name__}:Example"
ROWS = [
    "| `SANGAM_PORT` | required | Port, `0` for any. |",
    "| `SANGAM_COLOUR` | `red` | Either a\\|b. |",
    "| `SANGAM_IS_OPEN` | `false` | Whether. |",
    "| `SANGAM_THETA` | `inf` | Theta. |",
    "| `SANGAM_LIMIT` |  | Limit. |",
    "| `SANGAM_TOKEN` |  | Token. |",
    "| `SANGAM_URL` | `redis://here` | Address. |",
    "| `SANGAM_NAME` | made up | Name. |",
    "| `SANGAM_NUM_BYTES` | `10` | Bytes, over two lines. |",
]


def test_every_variable_is_a_row_in_the_order_of_declaration() -> None:
    assert settings_table(Example).splitlines() == [
        "| variable | default | meaning |",
        "|---|---|---|",
        *ROWS,
    ]


def test_a_field_without_a_meaning_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="SANGAM_PORT: has no meaning"):
        settings_table(Silent)


def test_only_what_stands_between_the_markers_is_replaced() -> None:
    text = "before\n<!-- settings:a -->\nold\n<!-- /settings:a -->\nafter\n"
    once = with_table(text, "a", "new")
    assert once == "before\n<!-- settings:a -->\nnew\n<!-- /settings:a -->\nafter\n"
    assert with_table(once, "a", "new") == once


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<!-- settings:a -->",
        "<!-- /settings:a -->\n<!-- settings:a -->",
        "<!-- settings:a --><!-- settings:a --><!-- /settings:a -->",
    ],
)
def test_markers_that_are_not_there_in_order_are_named(text: str) -> None:
    with pytest.raises(ConfigurationError, match="settings:a"):
        with_table(text, "a", "new")


@pytest.mark.parametrize(
    "where",
    ["", "no_such_module:Settings", "sangam_core.settings:NoSuch", "sangam_core.settings:Variable"],
)
def test_a_class_that_is_no_settings_class_is_named(where: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{where}: "):
        settings_class(where)


def test_the_command_rewrites_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("# X\n<!-- settings:a -->\n<!-- /settings:a -->\n", encoding="utf-8")
    assert main([str(readme), f"a={THIS}"]) == 0
    assert "\n".join(ROWS) in readme.read_text(encoding="utf-8")
    assert main([str(readme), f"b={THIS}"]) == 1
    assert "settings:b" in capsys.readouterr().err
    assert main([str(tmp_path / "none.md"), f"a={THIS}"]) == 1
    assert main([str(readme)]) == 2
