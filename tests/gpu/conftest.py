"""``--require-gpu``: nothing passes by not being run. ``make test-gpu`` says it, CI does not.

Without it these tests are skipped where there is no GPU. With it, a machine without a GPU, or
without what the tests import, fails at once with what is missing, and a test that is skipped fails
the run unless it asks for hardware of another kind, which the summary then lists.
"""

import importlib.metadata
import importlib.util
import sys

import pytest

if importlib.util.find_spec("torch") is None:
    sys.exit(
        f"torch is not installed for {sys.executable}; name a Python that has it: "
        "make test-gpu PYTHON=..."
    )

import torch

MODULES = ("flashinfer", "triton", "nccl")
OTHER_HARDWARE = ("needs two CUDA devices", "this GPU has no ", "needs a GPU that ")
"""How reasons begin that a machine with a GPU may have."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption(
        "--require-gpu", action="store_true", help="fail where tests/gpu cannot run in full"
    )
    # A machine with a GPU may lack it; then nothing ends a test that hangs, but all can run.
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "read by pytest-timeout, which is not here")


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout: read by pytest-timeout, which is not here")
    if is_required(config):
        # What warns on a machine of other versions is not what is checked there.
        config.addinivalue_line("filterwarnings", "default")


def is_required(config: pytest.Config) -> bool:
    return bool(config.getoption("--require-gpu", default=False))


def pytest_sessionstart(session: pytest.Session) -> None:
    if is_required(session.config):
        missing = what_is_missing()
        if missing is not None:
            pytest.exit(f"--require-gpu: {missing}", returncode=pytest.ExitCode.USAGE_ERROR)


def what_is_missing() -> str | None:
    """What these tests need and this machine has not."""
    if not torch.cuda.is_available():
        built = "no CUDA in it" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
        return f"there is no GPU that torch {torch.__version__} ({built}) can use"
    for name in MODULES:
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed; from the checkout: pip install '.[gpu]'"
    return None


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if is_required(session.config) and not exitstatus and unexcused_skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if not is_required(config) or what_is_missing() is not None:
        return
    terminalreporter.section("GPU")
    terminalreporter.line(describe_machine())
    for kind in ("passed", "failed", "error"):
        terminalreporter.line(f"{len(terminalreporter.stats.get(kind, [])):5} {kind}")
    skipped = reasons(config)
    unexcused = unexcused_skips(config)
    for reason in sorted(set(skipped)):
        verdict = "FAILS THE RUN" if reason in unexcused else "other hardware"
        terminalreporter.line(f"{skipped.count(reason):5} skipped: {reason} ({verdict})")


def describe_machine() -> str:
    name, count = torch.cuda.get_device_name(), torch.cuda.device_count()
    flashinfer = importlib.metadata.version("flashinfer-python")
    return (
        f"{count} x {name}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"FlashInfer {flashinfer}"
    )


def reasons(config: pytest.Config) -> list[str]:
    """Why tests were skipped, once for each."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    found = []
    for report in getattr(reporter, "stats", {}).get("skipped", []):
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        found.append(text.removeprefix("Skipped: "))
    return found


def unexcused_skips(config: pytest.Config) -> list[str]:
    return [reason for reason in reasons(config) if not reason.startswith(OTHER_HARDWARE)]
