"""The Dockerfiles: linted, and asking only for what the build context holds."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
DOCKERFILES = [REPOSITORY / "services" / name / "Dockerfile" for name in ("router", "worker")]


def hadolint() -> str:
    """The linter of the ``dev`` extra, which has no build for some machines."""
    beside = Path(sys.executable).with_name("hadolint")
    found = str(beside) if beside.exists() else shutil.which("hadolint")
    if found is None:
        pytest.skip("hadolint is not installed (the extra `dev` brings it on Linux x86-64)")
    return found


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_the_linter_has_nothing_to_say(dockerfile: Path) -> None:
    done = subprocess.run(
        [hadolint(), "--no-color", str(dockerfile)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_what_is_copied_by_name_is_there_and_in_the_build_context(dockerfile: Path) -> None:
    allowed = {
        line.removeprefix("!")
        for line in (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    text = dockerfile.read_text(encoding="utf-8")
    copied = {
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE)
        for source in line.split()[:-1]
        if source != "."
    }
    assert copied
    assert copied <= allowed
    assert [name for name in allowed if not (REPOSITORY / name).exists()] == []


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_the_last_stage_drops_root_by_number_and_the_code_is_copied_last(dockerfile: Path) -> None:
    last = re.split(r"^FROM ", dockerfile.read_text(encoding="utf-8"), flags=re.MULTILINE)[-1]
    assert re.findall(r"^USER (.+)$", last, re.MULTILINE) == ["10001:10001"]
    assert re.findall(r"^COPY (.+)$", last, re.MULTILINE)[-1].endswith("/opt/sangam /opt/sangam")


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_the_base_image_is_an_argument_with_a_public_default(dockerfile: Path) -> None:
    text = dockerfile.read_text(encoding="utf-8")
    assert re.search(r"^ARG BASE_IMAGE=docker\.io/library/python:3\.\d+-slim", text, re.MULTILINE)
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    stages = {name for _, name in re.findall(r"^FROM (\S+) AS (\S+)$", text, re.MULTILINE)}
    from_outside = {base for base in bases if base not in stages}
    assert from_outside <= {"${BASE_IMAGE}", "${CUDA_IMAGE}", "worker-${VARIANT:-cpu}"}
    assert {"worker-cpu", "worker-gpu"} <= stages or dockerfile.parent.name == "router"
