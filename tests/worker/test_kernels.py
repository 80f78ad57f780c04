"""What a worker's log says about kernels before the first request needs them."""

import importlib
from pathlib import Path

import pytest

from sangam_worker.kernels import kernels_note


def installed(site: Path, monkeypatch: pytest.MonkeyPatch, *kernels: str) -> None:
    """A package of FlashInfer's name and layout; importing it would fail."""
    package = site / "flashinfer"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')", encoding="utf-8")
    for kernel in kernels:
        folder = package / "data" / "aot" / kernel
        folder.mkdir(parents=True)
        (folder / f"{kernel}.so").touch()
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()


def test_without_flashinfer_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    monkeypatch.delitem(__import__("sys").modules, "flashinfer", raising=False)
    assert kernels_note({}) is None


def test_kernels_of_the_image_are_counted_without_importing_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, monkeypatch, "page", "batch_prefill")
    note = kernels_note({"FLASHINFER_WORKSPACE_BASE": "/cache/flashinfer"})
    assert note is not None
    assert note.startswith("2 FlashInfer kernels came with the image")
    assert note.endswith("kept in /cache/flashinfer/.cache/flashinfer")


def test_an_image_without_kernels_says_that_first_use_takes_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, monkeypatch)
    note = kernels_note({}) or ""
    assert "no FlashInfer kernel came with the image" in note
    assert str(Path.home() / ".cache/flashinfer") in note
