"""What is installed: each variant's requirements fit its lock file and can be had.

The resolving asks the package index that pip is configured for; wheels are looked at by range
requests, not downloaded (the gpu variant's weigh gigabytes).
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PYPROJECT = REPOSITORY / "pyproject.toml"
VARIANTS = {
    "router": (["router"], "constraints.txt"),
    "worker-cpu": (["worker"], "constraints.txt"),
    "worker-gpu": (["worker", "gpu"], "constraints-gpu.txt"),
    # No image: the README's whole fleet on a machine with a GPU.
    "fleet-gpu": (["router", "worker", "gpu", "local"], "constraints-gpu.txt"),
}
PLATFORM_ONLY = {"setuptools", "colorama"}
"""Required on other Python versions or systems than those that resolve here."""

_INDEX_SECONDS = 60
_RESOLVE_SECONDS = 240
_NO_INDEX = re.compile(
    r"NewConnectionError|ConnectTimeout|ReadTimeout|Temporary failure in name resolution"
    r"|Network is unreachable|Max retries exceeded|ProxyError"
)


def pins(name: str) -> dict[str, str]:
    """A lock file by normalised name."""
    lines = (REPOSITORY / name).read_text(encoding="utf-8").splitlines()
    found = dict(line.split("==") for line in lines)
    return {normal(package): version for package, version in found.items()}


def normal(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def requirements_of(extras: list[str]) -> str:
    command = [sys.executable, str(REPOSITORY / "services/requirements_of.py"), str(PYPROJECT)]
    done = subprocess.run([*command, *extras], capture_output=True, text=True, check=True)
    return done.stdout


def pip(*arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "1"]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=seconds, check=False
    )


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where no index answers for a small package."""
    folder = tmp_path_factory.mktemp("probe")
    command = ["download", "--quiet", "--no-deps", "--no-cache-dir", "--dest", str(folder)]
    pin = f"idna=={pins('constraints.txt')['idna']}"
    try:
        done = pip(*command, pin, seconds=_INDEX_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"no package index has answered within {_INDEX_SECONDS} s")
    if done.returncode:
        pytest.skip(f"no package index can be reached: {done.stderr.strip().splitlines()[-1]}")


def resolve(extras: list[str], lock: str, folder: Path) -> dict[str, str]:
    """What pip would install into an empty environment, by normalised name."""
    requirements, report = folder / "requirements.txt", folder / "report.json"
    requirements.write_text(requirements_of(extras), encoding="utf-8")
    done = pip(
        *("install", "--quiet", "--dry-run", "--ignore-installed", "--only-binary", ":all:"),
        *("--use-feature", "fast-deps", "--report", str(report)),
        *("--constraint", str(REPOSITORY / lock), "--requirement", str(requirements)),
        seconds=_RESOLVE_SECONDS,
    )
    if done.returncode and _NO_INDEX.search(done.stderr):
        pytest.skip(f"the package index went away: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    installed = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {normal(each["metadata"]["name"]): each["metadata"]["version"] for each in installed}


@pytest.mark.usefixtures("index")
@pytest.mark.timeout(_INDEX_SECONDS + _RESOLVE_SECONDS + 60)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_s_requirements_resolve_to_exactly_what_is_locked(
    variant: str, tmp_path: Path
) -> None:
    extras, lock = VARIANTS[variant]
    locked = pins(lock)
    resolved = resolve(extras, lock, tmp_path)
    # A CPU build says so in its version: 2.13.0+cpu is what 2.13.0 allows.
    assert {
        name: version
        for name, version in resolved.items()
        if version.split("+")[0] != locked.get(name)
    } == {}
    if variant == "router":
        assert not {"torch", "transformers", "numpy", "safetensors"} & set(resolved)
    if variant == "worker-cpu":
        assert "torch" in resolved
        assert (
            not {name for name in resolved if name.startswith("nvidia")}
            or "+" not in resolved["torch"]
        )
    if variant == "fleet-gpu":
        assert set(locked) - set(resolved) <= PLATFORM_ONLY
    if lock == "constraints-gpu.txt":
        assert resolved["torch"] == "2.10.0"
        assert resolved["nvidia-nccl-cu12"] == "2.27.5"
        assert not [name for name in resolved if name.endswith("-cu13") and "cutlass" not in name]


def test_a_package_in_both_lock_files_has_one_version_except_torch_and_what_it_decides() -> None:
    cpu, gpu = pins("constraints.txt"), pins("constraints-gpu.txt")
    different = {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]}
    assert different == {"torch", "triton"}


def test_lock_files_are_sorted_and_pin_every_line_exactly() -> None:
    for name in ("constraints.txt", "constraints-gpu.txt"):
        lines = (REPOSITORY / name).read_text(encoding="utf-8").splitlines()
        assert [line for line in lines if not re.fullmatch(r"[\w.\-]+==[\w.+!]+", line)] == []
        assert len({normal(line.split("==")[0]) for line in lines}) == len(lines)


def test_the_requirements_are_those_of_the_project_and_of_the_extras_asked_for() -> None:
    lines = requirements_of(["worker", "gpu"]).splitlines()
    assert "pydantic>=2.11" in lines
    assert any(line.startswith("safetensors") for line in lines)
    assert any(line.startswith("flashinfer-python") for line in lines)
    assert not any(line.startswith("kubernetes") for line in lines)
