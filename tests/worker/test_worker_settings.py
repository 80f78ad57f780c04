"""The worker's settings: what is read, what is refused and how it is said."""

from pathlib import Path

import pytest

from sangam_core.errors import ConfigurationError
from sangam_core.placement import Role
from sangam_core.settings import read_settings, variables
from sangam_worker.__main__ import EXIT_CONFIGURATION, main
from sangam_worker.settings import WorkerSettings


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in variables(WorkerSettings):
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("SANGAM_INTERNAL_TOKEN", "secret")


def problem_with(monkeypatch: pytest.MonkeyPatch, **env: str) -> str:
    """What is said about an environment that must be refused."""
    for name, value in env.items():
        monkeypatch.setenv(f"SANGAM_{name}", value)
    with pytest.raises(ConfigurationError) as caught:
        read_settings(WorkerSettings)
    return str(caught.value)


def test_defaults_need_nothing_but_the_token() -> None:
    settings = read_settings(WorkerSettings)
    assert (settings.role, settings.model) == (Role.COLOCATED, "small")
    assert settings.worker_id != read_settings(WorkerSettings).worker_id
    assert settings.reachable_host == "127.0.0.1"
    assert [settings.tau_tokens(role) for role in (Role.PREFILL, Role.DECODE)] == [8192, 1024]
    assert settings.tau_tokens(Role.COLOCATED) == 1024


def test_variables_set_the_fields(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "ROLE": "prefill",
        "TAU_TOKENS_PREFILL": "5000",
        "PORT_RANGE": "20000-20010",
        "PORT_FILE": str(tmp_path / "port"),
        "ADVERTISE_HOST": "10.0.0.7",
        "HOST": "0.0.0.0",
    }.items():
        monkeypatch.setenv(f"SANGAM_{name}", value)
    settings = read_settings(WorkerSettings)
    assert settings.role is Role.PREFILL
    assert settings.tau_tokens(Role.PREFILL) == 5000
    assert settings.ports == range(20000, 20011)
    assert settings.port_file == tmp_path / "port"
    assert settings.reachable_host == "10.0.0.7"


def test_a_set_port_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANGAM_PORT", "8123")
    monkeypatch.setenv("SANGAM_PORT_RANGE", "20000-29999")
    assert read_settings(WorkerSettings).ports == range(8123, 8124)


def test_every_field_says_what_it_means() -> None:
    silent = [v.name for v in variables(WorkerSettings) if not v.field.description]
    assert not silent


@pytest.mark.parametrize(
    ("env", "word"),
    [
        ({"ROLE": "chef"}, "SANGAM_ROLE"),
        ({"DTYPE": "float8"}, "SANGAM_DTYPE"),
        ({"INTERNAL_TOKEN": ""}, "SANGAM_INTERNAL_TOKEN"),
        ({"TOTAL_PAGES": "10", "POOL_BYTES": "10"}, "SANGAM_POOL_BYTES"),
        ({"ATTENTION": "magic"}, "SANGAM_ATTENTION"),
        ({"GPU_MEMORY_UTILIZATION": "90"}, "SANGAM_GPU_MEMORY_UTILIZATION"),
        ({"GPU_MEMORY_UTILIZATION": "0"}, "SANGAM_GPU_MEMORY_UTILIZATION"),
        ({"MAX_BATCH_BLOCKS": "0"}, "SANGAM_MAX_BATCH_BLOCKS"),
        ({"MAX_SEQUENCE_TOKENS": "0"}, "SANGAM_MAX_SEQUENCE_TOKENS"),
        ({"CUDA_GRAPHS": "often"}, "SANGAM_CUDA_GRAPHS"),
        ({"TOTAL_PAGES": "0"}, "SANGAM_TOTAL_PAGES"),
        ({"LEASE_SECONDS": "1.5"}, "SANGAM_LEASE_SECONDS"),
        ({"LEASE_SECONDS": "inf"}, "SANGAM_LEASE_SECONDS"),
        ({"HOST": "0.0.0.0"}, "SANGAM_ADVERTISE_HOST"),
        ({"HOST": "[::1]"}, "SANGAM_HOST"),
        ({"ADVERTISE_HOST": "[fd00::7]"}, "SANGAM_ADVERTISE_HOST"),
        ({"PORT_RANGE": "30000-20000"}, "SANGAM_PORT_RANGE"),
        ({"PORT_RANGE": "many"}, "SANGAM_PORT_RANGE"),
        ({"REDIS_NAMESPACE": "a{b"}, "SANGAM_REDIS_NAMESPACE"),
        ({"TRANSFERRED_DECODE_SHARE": "1.5"}, "SANGAM_TRANSFERRED_DECODE_SHARE"),
    ],
)
def test_a_bad_value_is_refused_by_its_variable_s_name(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], word: str
) -> None:
    said = problem_with(monkeypatch, **env)
    assert word in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("device", "env", "format_and_backend"),
    [
        ("cpu", {}, ("float32", "torch")),
        ("cpu", {"DTYPE": "bfloat16"}, ("bfloat16", "torch")),
        ("cuda", {}, ("bfloat16", "flashinfer")),
        ("cuda:3", {"ATTENTION": "flashinfer-fa2"}, ("bfloat16", "flashinfer-fa2")),
        ("cuda:0", {"DTYPE": "float32", "ATTENTION": "torch"}, ("float32", "torch")),
    ],
)
def test_format_and_attention_follow_the_device_unless_they_are_set(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    env: dict[str, str],
    format_and_backend: tuple[str, str],
) -> None:
    for name, value in {"DEVICE": device, **env}.items():
        monkeypatch.setenv(f"SANGAM_{name}", value)
    settings = read_settings(WorkerSettings)
    assert (settings.number_format, settings.attention_backend) == format_and_backend


@pytest.mark.parametrize(
    ("env", "fix"),
    [
        ({"ATTENTION": "flashinfer"}, "SANGAM_DEVICE to cuda:0"),
        ({"ATTENTION": "flashinfer-fa3"}, "SANGAM_ATTENTION to auto"),
        ({"DEVICE": "cuda:0", "DTYPE": "float32"}, "SANGAM_DTYPE to bfloat16"),
        ({"DEVICE": "cuda:0", "DTYPE": "float32"}, "SANGAM_ATTENTION to torch"),
        ({"KV_TRANSPORT": "nccl"}, "SANGAM_KV_TRANSPORT to auto"),
        ({"MAX_SEQUENCE_TOKENS": "32"}, "set it to 33 or more"),
        ({"MAX_SEQUENCE_TOKENS": "64", "BLOCK_LENGTH": "64"}, "set it to 65 or more"),
        ({"DEVICE": "gpu"}, "SANGAM_DEVICE: must be cpu or cuda:N (got 'gpu')"),
        ({"DEVICE": "cuda:first"}, "SANGAM_DEVICE: must be cpu or cuda:N"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], fix: str
) -> None:
    said = problem_with(monkeypatch, **env)
    assert fix in said
    assert "\n" not in said


def test_the_shortest_sequence_is_a_block_and_a_token_of_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SANGAM_MAX_SEQUENCE_TOKENS", "33")
    assert read_settings(WorkerSettings).max_sequence_tokens == 33


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANGAM_REDIS_URL", "redis://:hush@10.0.0.1")
    assert "hush" not in problem_with(monkeypatch, ROLE="chef")
    monkeypatch.setenv("SANGAM_ROLE", "decode")
    assert "hush" not in repr(read_settings(WorkerSettings))


def test_the_process_says_what_is_wrong_and_ends_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SANGAM_ROLE", "chef")
    assert main() == EXIT_CONFIGURATION == 2
    said = capsys.readouterr().err
    assert said.startswith("sangam-worker: SANGAM_ROLE: ")
    assert said.count("\n") == 1
