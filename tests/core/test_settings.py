"""Settings are read once, frozen, and a bad one is named on one line that holds no secret."""

import os
from typing import Annotated, Literal

import pytest
from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import NoDecode

from sangam_core.errors import ConfigurationError
from sangam_core.settings import ServiceSettings, read_settings, variables


class ExampleSettings(ServiceSettings):
    """A service's settings."""

    port: Annotated[int, Field(ge=1, le=65535)]
    """Port."""
    role: Literal["prefill", "decode"] = "prefill"
    """Role."""
    is_loud: bool = False
    """A flag."""
    token: Annotated[SecretStr, Field(min_length=8)] | None = None
    """Shared secret."""
    api_keys: tuple[str, ...] = ()
    """Keys."""
    words: Annotated[tuple[str, ...], NoDecode] = ()
    """Read by the service itself, not as JSON."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 5.0
    """Longest wait for an answer."""

    @field_validator("words", mode="before")
    @classmethod
    def _split_words(cls, value: object) -> object:
        return tuple(value.split(",")) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _port_suits_role(self) -> "ExampleSettings":
        if self.role == "decode" and self.port == 1:
            raise ValueError("SANGAM_PORT: a decode worker cannot have port 1")
        return self


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("SANGAM_"):
            monkeypatch.delenv(name)


def error_of(monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError) as caught:
        read_settings(ExampleSettings)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_variables_fill_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANGAM_PORT", "8000")
    monkeypatch.setenv("sangam_role", "decode")
    monkeypatch.setenv("SANGAM_API_KEYS", '["a", "b"]')
    monkeypatch.setenv("SANGAM_TIMEOUT_SECONDS", "1.5")
    read = read_settings(ExampleSettings)
    assert (read.port, read.role, read.api_keys) == (8000, "decode", ("a", "b"))
    assert read.timeout_seconds == 1.5


def test_variables_of_other_programs_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "1")
    monkeypatch.setenv("TIMEOUT_SECONDS", "9")
    monkeypatch.setenv("SANGAM_PORT", "8000")
    assert read_settings(ExampleSettings).port == 8000


def test_settings_are_frozen() -> None:
    made = ExampleSettings(port=1)
    with pytest.raises(ValidationError, match="frozen"):
        made.port = 2  # type: ignore[misc]


def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert error_of(monkeypatch) == "SANGAM_PORT: required, but not set"


def test_a_bad_value_is_named_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    message = error_of(monkeypatch, SANGAM_PORT="http")
    assert message.startswith("SANGAM_PORT: ")
    assert message.endswith("(got 'http')")


def test_a_flag_that_is_none_is_told_what_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    message = error_of(monkeypatch, SANGAM_PORT="1", SANGAM_IS_LOUD="maybe")
    assert message == "SANGAM_IS_LOUD: must be true or false (got 'maybe')"


def test_an_address_from_kubernetes_is_told_for_what_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message = error_of(monkeypatch, SANGAM_PORT="tcp://10.0.0.7:8000")
    assert "enableServiceLinks" in message
    assert message.endswith("(got 'tcp://10.0.0.7:8000')")


def test_a_bad_number_is_told_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    message = error_of(monkeypatch, SANGAM_PORT="1", SANGAM_TIMEOUT_SECONDS="-1")
    assert message == "SANGAM_TIMEOUT_SECONDS: Input should be greater than 0 (got '-1')"


def test_every_bad_variable_is_on_the_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    message = error_of(monkeypatch, SANGAM_PORT="0", SANGAM_ROLE="oracle")
    assert [problem.split(":")[0] for problem in message.split("; ")] == [
        "SANGAM_PORT",
        "SANGAM_ROLE",
    ]


def test_a_bad_item_of_a_list_is_named_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    message = error_of(monkeypatch, SANGAM_PORT="1", SANGAM_API_KEYS='["a", 7]')
    assert message.startswith("SANGAM_API_KEYS[1]: ")


def test_a_list_that_is_not_json_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    message = error_of(monkeypatch, SANGAM_PORT="1", SANGAM_API_KEYS="a,b")
    assert message.startswith('SANGAM_API_KEYS: must be JSON, such as ["a", "b"]')


def test_a_list_that_the_service_splits_itself_need_not_be_json(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message = error_of(monkeypatch, SANGAM_PORT="1", SANGAM_WORDS="a,b", SANGAM_API_KEYS="a,b")
    assert "SANGAM_WORDS" not in message
    monkeypatch.delenv("SANGAM_API_KEYS")
    assert read_settings(ExampleSettings).words == ("a", "b")


def test_a_misspelt_argument_is_refused() -> None:
    with pytest.raises(ValidationError, match="prot"):
        ExampleSettings(port=1, prot=2)  # type: ignore[call-arg]


def test_a_rule_over_several_settings_speaks_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    message = error_of(monkeypatch, SANGAM_PORT="1", SANGAM_ROLE="decode", SANGAM_TOKEN="sesame-12")
    assert message == "SANGAM_PORT: a decode worker cannot have port 1"


def test_a_secret_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    message = error_of(monkeypatch, SANGAM_PORT="1", SANGAM_TOKEN="sesame")
    assert message.startswith("SANGAM_TOKEN: ")
    assert "sesame" not in message


def test_a_secret_is_not_shown_beside_a_missing_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "sesame" not in error_of(monkeypatch, SANGAM_TOKEN="sesame-12")


def test_the_variables_are_listed_in_the_order_of_declaration() -> None:
    listed = {variable.name: variable.field for variable in variables(ExampleSettings)}
    assert list(listed) == [
        "SANGAM_PORT",
        "SANGAM_ROLE",
        "SANGAM_IS_LOUD",
        "SANGAM_TOKEN",
        "SANGAM_API_KEYS",
        "SANGAM_WORDS",
        "SANGAM_TIMEOUT_SECONDS",
    ]
    assert listed["SANGAM_PORT"].description == "Port."
