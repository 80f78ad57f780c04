"""Mistyped variables are found and corrected; those of others are left alone."""

import pytest

from sangam_core.unknown_settings import UnknownSetting, settings_names, unknown_settings

NAMES = settings_names()


def found(**environment: str) -> list[UnknownSetting]:
    return unknown_settings(environment)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("SANGAM_TAU_TOKEN_COLOCATED", ["SANGAM_TAU_TOKENS_COLOCATED"]),
        ("SANGAM_LOGLEVEL", ["SANGAM_LOG_LEVEL"]),
        ("SANGAM_MODE", ["SANGAM_MODEL"]),
        ("SANGAM_MODEL_NAME", ["SANGAM_SERVED_MODEL_NAME"]),
        ("SANGAM_THETA", ["SANGAM_THETA_TOKENS"]),
        ("SANGAM_PREFILL_TAU_TOKENS", ["SANGAM_TAU_TOKENS_PREFILL"]),
        ("SANGAM_PUBLIK_PORT", ["SANGAM_PUBLIC_PORT"]),
        (
            "SANGAM_TAU_TOK",
            [
                "SANGAM_TAU_TOKENS_COLOCATED",
                "SANGAM_TAU_TOKENS_DECODE",
                "SANGAM_TAU_TOKENS_PREFILL",
            ],
        ),
        ("SANGAM_COLOUR", []),
        ("SANGAM_SECONDS", []),
        ("SANGAM_", []),
    ],
)
def test_a_name_that_nothing_reads_is_told_with_what_it_resembles(
    name: str, meant: list[str]
) -> None:
    (unknown,) = found(**{name: "5"})
    assert unknown.name == name
    assert list(unknown.meant) == meant


def test_the_problem_names_what_was_meant_and_never_the_value() -> None:
    (unknown,) = found(SANGAM_REDIS_PASWORD="sesame")
    assert unknown.problem == (
        "there is no such setting, so it is ignored; did you mean SANGAM_REDIS_PASSWORD?"
    )
    assert "sesame" not in f"{unknown}"
    several = UnknownSetting("SANGAM_X", ("SANGAM_A", "SANGAM_B", "SANGAM_C")).problem
    assert several.endswith("did you mean SANGAM_A, SANGAM_B or SANGAM_C?")
    assert UnknownSetting("SANGAM_X", ()).problem.endswith("so it is ignored")


def test_the_settings_of_every_service_are_known_to_each() -> None:
    assert {"SANGAM_THETA_TOKENS", "SANGAM_TAU_TOKENS_PREFILL"} <= NAMES
    assert unknown_settings(dict.fromkeys(NAMES, "1")) == []


def test_case_does_not_matter_as_it_does_not_where_settings_are_read() -> None:
    assert found(sangam_theta_tokens="5") == []
    assert [each.name for each in found(sangam_theta="5")] == ["SANGAM_THETA"]


@pytest.mark.parametrize(
    "name",
    [
        "SANGAM_API_KEY",
        "SANGAM_REDIS_SERVER",
        "SANGAM_SHARED",
        "SANGAM_CLUSTER_HOME",
        "SANGAM_CLUSTER_NAME",
        "SANGAM_TEST_QUESTIONS",
        "PATH",
        "SANGAMX_THETA",
    ],
)
def test_what_is_read_elsewhere_is_left_alone(name: str) -> None:
    assert found(**{name: "1"}) == []


@pytest.mark.parametrize("release", ["SANGAM", "SANGAM_ROUTER", "SANGAM_LLADA_8B_ROUTER_HEADLESS"])
def test_what_kubernetes_tells_of_services_is_left_alone(release: str) -> None:
    links = {
        "SERVICE_HOST": "10.0.0.7",
        "SERVICE_PORT": "8000",
        "SERVICE_PORT_HTTP": "8000",
        "PORT": "tcp://10.0.0.7:8000",
        "PORT_8000_TCP": "tcp://10.0.0.7:8000",
        "PORT_8000_TCP_PROTO": "tcp",
        "PORT_8000_TCP_PORT": "8000",
        "PORT_8000_TCP_ADDR": "10.0.0.7",
    }
    assert found(**{f"{release}_{name}": value for name, value in links.items()}) == []


def test_a_mistyped_port_is_not_taken_for_a_service() -> None:
    assert [each.name for each in found(SANGAM_ROUTER_PORT="8000")] == ["SANGAM_ROUTER_PORT"]


def test_names_are_looked_up_among_those_given() -> None:
    (unknown,) = unknown_settings({"SANGAM_THETA_TOKENS": "1"}, known=["SANGAM_THETA_TOKEN"])
    assert unknown.meant == ("SANGAM_THETA_TOKEN",)
