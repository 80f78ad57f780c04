"""The file of all settings' names, as the command writes it."""

from pathlib import Path

import pytest

from sangam_router.local.settings_names import main, settings_names

HERE = "tests.router.local.test_settings_table:Example"


def test_names_are_sorted_one_a_line_and_each_once() -> None:
    lines = settings_names([HERE, HERE]).splitlines()
    assert lines[:2] == ["SANGAM_COLOUR", "SANGAM_IS_OPEN"]
    assert "SANGAM_NUM_BYTES" in lines
    assert lines == sorted(set(lines))


def test_the_command_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "names.txt"
    assert main([str(path), HERE]) == 0
    assert path.read_text(encoding="ascii") == settings_names([HERE])
    assert main([str(path), "no_such_module:Settings"]) == 1
    assert main([str(tmp_path / "none" / "names.txt"), HERE]) == 1
    assert main([str(path)]) == 2
    assert "usage" in capsys.readouterr().err
