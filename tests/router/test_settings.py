"""The router's settings: words that people write, and combinations that cannot be."""

import math

import pytest
from tests.router.builders import router_settings

from sangam_core.errors import ConfigurationError
from sangam_core.settings import read_settings, variables
from sangam_router.settings import RouterSettings


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANGAM_INTERNAL_TOKEN", "secret")


def read(monkeypatch: pytest.MonkeyPatch, **values: str) -> RouterSettings:
    for name, value in values.items():
        monkeypatch.setenv(f"SANGAM_{name}", value)
    return read_settings(RouterSettings)


def test_defaults_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read(monkeypatch)
    assert settings.model == "small"
    assert settings.policy.theta_tokens == math.inf
    assert settings.policy.is_overflow_allowed


def test_router_ids_differ() -> None:
    assert router_settings().router_id != router_settings().router_id


def test_keys_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = read(monkeypatch, API_KEYS=" one,two ,,").api_keys
    assert [key.get_secret_value() for key in keys] == ["one", "two"]


@pytest.mark.parametrize("word", ["inf", "Infinity"])
def test_theta_may_be_infinite(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    assert read(monkeypatch, THETA_TOKENS=word).theta_tokens == math.inf


def test_static_disaggregation_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not read(monkeypatch, OVERFLOW="false").policy.is_overflow_allowed


def test_an_empty_mask_buffer_means_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, FIXED_MASK_BUFFER_TOKENS="").fixed_mask_buffer_tokens is None


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"INTERNAL_TOKEN": ""}, "SANGAM_INTERNAL_TOKEN must be set"),
        ({"FIXED_MASK_BUFFER_TOKENS": "40"}, "multiple of SANGAM_BLOCK_LENGTH=32"),
        ({"PUBLIC_PORT": "70000"}, "SANGAM_PUBLIC_PORT"),
        ({"LOG_LEVEL": "loud"}, "SANGAM_LOG_LEVEL"),
        ({"MAX_FAN_OUT": "0"}, "SANGAM_MAX_FAN_OUT"),
        ({"API_KEYS": " , "}, "SANGAM_API_KEYS: .*holds no key"),
        ({"ROUTER_LEASE_SECONDS": "inf"}, "SANGAM_ROUTER_LEASE_SECONDS: .* finite"),
        ({"SHUTDOWN_SECONDS": "inf"}, "SANGAM_SHUTDOWN_SECONDS: .* finite"),
    ],
)
def test_a_value_that_cannot_be_is_named(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        read(monkeypatch, **values)


def test_every_setting_says_what_it_means() -> None:
    undocumented = [v.name for v in variables(RouterSettings) if not v.field.description]
    assert not undocumented
