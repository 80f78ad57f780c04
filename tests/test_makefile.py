"""What `make` hands on and takes away, as it would do it (`make --dry-run`)."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[1]
FROM_MAKE = ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS")


def make(*arguments: str, folder: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    """As called by a person, not by the `make test` that runs this."""
    env = {name: value for name, value in os.environ.items() if name not in FROM_MAKE}
    return subprocess.run(
        ["make", *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def would_run(*arguments: str) -> str:
    ran = make("--dry-run", *arguments)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_second_fleet_gets_both_of_its_ports() -> None:
    told = would_run("up", "PORT=8100", "INTERNAL_PORT=9100")
    assert "--port 8100 " in told
    assert "--internal-port 9100" in told


def test_cleaning_keeps_the_results_of_load_tests() -> None:
    removed = would_run("clean", "VENV=.some-venv").split()
    assert {".some-venv", ".sangam/logs"} <= set(removed)
    assert ".sangam" not in removed


def test_a_misspelt_option_of_up_is_refused_with_those_that_there_are() -> None:
    ran = make("--dry-run", "up", "PREFIL=2", "THETA=512", "tua=9")
    assert ran.returncode != 0
    assert ran.stdout == ""
    (line,) = ran.stderr.splitlines()
    told, there_are = line.split(" It has ")
    assert set(told.partition("make up: ")[2].strip(".").split()) == {"PREFIL", "tua"}
    assert {"PREFILL", "TAU", "PORT"} <= set(there_are.strip(".").split())


def test_what_the_makefile_reads_besides_is_taken_with_up() -> None:
    others = ("PYTHON=python3", "VENV=a place", "TORCH_INDEX=https://a.b/c=d", "BIN=/usr/bin")
    assert "/usr/bin/sangam up" in would_run("up", "PREFILL=1", *others)


def test_every_option_of_up_is_handed_on() -> None:
    refused = make("--dry-run", "up", "PREFIL=2").stderr
    options = refused.partition(" It has ")[2].partition(".")[0].split()
    told = would_run("up", *(f"{name}=7" for name in options)).split()
    assert len(options) == 9
    assert {f"--{name.lower().replace('_', '-')}" for name in options} <= set(told)


@pytest.mark.parametrize("variant", ["cpu", "gpu"])
def test_images_are_named_as_the_chart_looks_for_them(variant: str) -> None:
    chart = REPOSITORY / "charts/sangam"
    version = yaml.safe_load((chart / "Chart.yaml").read_text("utf-8"))["appVersion"]
    values = yaml.safe_load((chart / "values.yaml").read_text("utf-8"))
    worker = values["workers"]["defaults"]["image"]["repository"]
    tags = tags_of(would_run("images", "BUILDER=docker", f"VARIANT={variant}"))
    router = values["router"]["image"]["repository"]
    assert tags == [f"{router}:{version}", f"{worker}:{version}-{variant}"]


def test_images_can_be_named_for_a_registry() -> None:
    told = would_run("images", "BUILDER=docker", "REGISTRY=a.b/c", "TAG=2", "VARIANT=gpu")
    assert tags_of(told) == ["a.b/c/sangam-router:2", "a.b/c/sangam-worker:2-gpu"]


def tags_of(told: str) -> list[str]:
    words = told.split()
    return [words[index + 1] for index, word in enumerate(words) if word == "-t"]


@pytest.mark.parametrize("target", ["manifests", "demo-cpu"])
def test_without_helm_nothing_is_written_and_one_line_says_so(target: str, tmp_path: Path) -> None:
    folder, before = a_copy(tmp_path)
    ran = make("--silent", target, "HELM=no-such-helm", folder=folder)
    assert ran.returncode != 0
    assert ran.stdout == ""
    assert "no no-such-helm is on the PATH; name one with HELM=" in ran.stderr.splitlines()
    assert contents(folder) == before


@pytest.mark.parametrize("target", ["manifests", "demo-cpu"])
def test_a_helm_that_fails_leaves_no_half_of_the_demo(target: str, tmp_path: Path) -> None:
    folder, before = a_copy(tmp_path)
    helm = tmp_path / "helm"
    helm.write_text("#!/bin/sh\necho half a file\nexit 3\n")
    helm.chmod(0o755)
    ran = make("--silent", target, f"HELM={helm}", folder=folder)
    assert ran.returncode != 0
    assert ran.stdout == ""
    assert contents(folder) == before


def a_copy(place: Path) -> tuple[Path, dict[str, bytes]]:
    """The Makefile with what `make manifests` reads and writes, and the bytes of each file."""
    folder = place / "checkout"
    folder.mkdir()
    shutil.copy(REPOSITORY / "Makefile", folder)
    shutil.copytree(REPOSITORY / "manifests", folder / "manifests")
    shutil.copytree(REPOSITORY / "charts", folder / "charts")
    return folder, contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
