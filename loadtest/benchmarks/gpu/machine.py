"""What ran a benchmark: versions, the card and its state, the code. Told in the results' file.

Decides what is asked of whom, and that nothing of it can fail a run: what does not answer is told
as unknown. Called by ``commands``.
"""

import hashlib
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

REPOSITORY = Path(__file__).parents[3]
_PACKAGES = (
    "torch", "triton", "flashinfer-python", "nccl4py", "apache-tvm-ffi", "transformers", "numpy",
)  # fmt: skip
_SOURCES = ("services", "loadtest")
_CARD = (
    "driver_version", "power.limit", "clocks.max.sm", "clocks.max.mem", "ecc.mode.current",
    "persistence_mode", "compute_mode", "memory.total",
)  # fmt: skip
_STATE = (
    "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "clocks_event_reasons.active",
)  # fmt: skip
_SECONDS = 10.0


def describe_machine() -> dict[str, str]:
    """Everything that does not change during a run."""
    found = {"python": platform.python_version(), **_versions()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = f"{properties.name}, {properties.multi_processor_count} multiprocessors"
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, _nccl()))
        found["card"] = asked(_CARD) or asked(_CARD[:2]) or "unknown: nvidia-smi does not answer"
    found["processor"] = _processor()
    return found | _code()


class DeviceState:
    """Clocks, temperature, power: asked again and again until nobody answers once."""

    def __init__(self) -> None:
        self._answers = torch.cuda.is_available()

    def __call__(self) -> str:
        """In words; empty where nobody answers."""
        if not self._answers:
            return ""
        said = asked(_STATE) or asked(_STATE[:4])  # older drivers call the reasons otherwise
        self._answers = bool(said)
        return said


def asked(fields: Sequence[str], program: str = "nvidia-smi", seconds: float = _SECONDS) -> str:
    """What ``nvidia-smi`` says of the first card; empty where it does not."""
    command = [program, "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    done = _said(command, seconds)
    values = [value.strip() for value in done.split(",")]
    if len(values) != len(fields):
        return ""
    return ", ".join(f"{name} {value}" for name, value in zip(fields, values, strict=True))


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def _nccl() -> tuple[int, ...]:
    try:
        return tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    except (RuntimeError, AttributeError):
        return (0,)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def _code() -> dict[str, str]:
    """The commit where git is, and a digest of the sources, which is also there without."""
    git = ["git", "-C", str(REPOSITORY)]
    commit = _said([*git, "rev-parse", "HEAD"])
    changed = _said([*git, "status", "--porcelain", "--untracked-files=no"])
    told = f"{commit}{' with changes' if changed else ''}" if commit else "unknown"
    return {"commit": told, "sources": digest(REPOSITORY)}


def digest(repository: Path) -> str:
    """Twelve digits of all Python sources of the services and the load tests."""
    sums = hashlib.sha256()
    for folder in _SOURCES:
        for file in sorted((repository / folder).rglob("*.py")):
            sums.update(file.relative_to(repository).as_posix().encode() + b"\0")
            sums.update(file.read_bytes())
    return sums.hexdigest()[:12]


def _said(command: Sequence[str], seconds: float = _SECONDS) -> str:
    """What a program says, empty when it fails, hangs or is not there."""
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=seconds, text=True, errors="replace", check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
