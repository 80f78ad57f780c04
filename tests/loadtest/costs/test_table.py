"""Tables of constants: complete, in their units, within bounds; complaints name the place."""

from pathlib import Path

import pytest

from sangam_core.errors import ConfigurationError
from sangam_loadtest.costs.constants import SmallConstants
from sangam_loadtest.costs.shapes import shape_of
from sangam_loadtest.costs.table import KINDS, read_table
from sangam_loadtest.costs.table_file import Entry, write_table

GOOD = """\
[small.bf16]
layer_seconds = { value = 2e-5, unit = "seconds a layer", source = "a test" }
bytes_factor = { value = 1.5, unit = "times the bound", source = "a test" }
"""


def a_table(folder: Path, text: str) -> Path:
    path = folder / "own.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_shipped_table_has_all_that_the_two_gpus_models_and_systems_need() -> None:
    table = read_table()
    assert {"h100", "h200"} <= set(table.gpus.entries)
    assert {"sangam", "paper", "fast-dllm"} == set(table.systems.entries)
    for section in KINDS:
        assert getattr(table, section).entries
    assert table.backend_of(shape_of("llada-8b")) == "fa3-mha"
    assert table.backend_of(shape_of("dream-7b")) == "fa2-gqa"


def test_a_model_that_is_not_named_gets_the_attention_of_its_kind() -> None:
    table = read_table()
    assert table.backend_of(shape_of("small")) == table.backends["mha"]


def test_an_own_table_takes_the_place_of_entries_and_leaves_the_others(tmp_path: Path) -> None:
    table = read_table(a_table(tmp_path, GOOD))
    assert table.small["bf16"] == SmallConstants(2e-5, 1.5)
    assert table.small["fp8"] == read_table().small["fp8"]
    assert table.products["bf16"] == read_table().products["bf16"]


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = a_table(tmp_path, GOOD)
    read_table(path)
    path.write_text(GOOD.replace("1.5", "2.5"), encoding="utf-8")
    assert read_table(path).small["bf16"].bytes_factor == 2.5


@pytest.mark.parametrize(
    ("wrong", "right", "line", "told"),
    [
        ("value = 1.5", "value = -1", 3, "small.bf16.bytes_factor must be a number in 0 .. 100"),
        ("value = 1.5", "value = nan", 3, "small.bf16.bytes_factor must be a number in 0 .. 100"),
        ("value = 1.5", "value = true", 3, "small.bf16.bytes_factor must be a number in"),
        ("value = 1.5", "value = '2'", 3, "small.bf16.bytes_factor must be a number in"),
        ("seconds a layer", "ms a layer", 2, "small.bf16.layer_seconds must be in 'seconds a lay"),
        (', source = "a test" }', " }", 2, "small.bf16.layer_seconds must be { value = ..., unit"),
        ('"a test"', '""', 2, "small.bf16.layer_seconds must say its source"),
        ("bytes_factor", "bites_factor", 3, "small.bf16.bites_factor is unknown; there are: lay"),
        ("[small.bf16]", "[tiny.bf16]", 1, "tiny is no section; there are: gpus, products"),
        ("[small.bf16]", "[small]", 2, "small.layer_seconds"),
    ],
)
def test_a_malformed_value_is_refused_with_file_line_and_field(
    tmp_path: Path, wrong: str, right: str, line: int, told: str
) -> None:
    path = a_table(tmp_path, GOOD.replace(wrong, right))
    with pytest.raises(ConfigurationError) as raised:
        read_table(path)
    assert str(raised.value).startswith(f"{path}, line {line}: {told}")


def test_a_missing_value_is_refused_at_the_table_that_lacks_it(tmp_path: Path) -> None:
    path = a_table(tmp_path, "\n" + GOOD.rsplit("bytes_factor", 1)[0])
    with pytest.raises(ConfigurationError, match=r"line 2: small.bf16.bytes_factor is missing"):
        read_table(path)


def test_a_word_out_of_its_choices_is_refused_with_them(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    paper = read_table().systems["paper"]
    sources = dict.fromkeys(type(paper).__dataclass_fields__, "a test")
    write_table(path, "a test", [Entry("systems", "mine", paper, sources)])
    text = path.read_text().replace('"every_row"', '"some_rows"', 1)
    path.write_text(text)
    with pytest.raises(
        ConfigurationError, match=r"systems.mine.head_rows must be one of every_row"
    ):
        read_table(path)


def test_bad_toml_is_refused_with_its_line(tmp_path: Path) -> None:
    path = a_table(tmp_path, GOOD + "[small.bf16\n")
    with pytest.raises(ConfigurationError, match=f"{path}: not a table of constants: .*line 4"):
        read_table(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"gone.toml: No such file"):
        read_table(tmp_path / "gone.toml")


def test_a_backend_without_constants_is_refused(tmp_path: Path) -> None:
    path = a_table(tmp_path, '[backends]\nllada-8b = "fa9-mha"\n')
    with pytest.raises(ConfigurationError, match=r"backends.llada-8b names 'fa9-mha'"):
        read_table(path)


def test_an_entry_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(ConfigurationError, match=r"no \[gpus.a100\]; known: h200, h100 .*fit"):
        read_table().gpus["a100"]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "own.toml"
    sources = {"layer_seconds": 'a "quoted"\nsource', "bytes_factor": "a \\ test"}
    constants = SmallConstants(1.25e-5, 0.75)
    entries = [
        Entry("small", "odd name", constants, sources),
        Entry("backends", "org/model", "fa3-gqa"),
    ]
    write_table(path, "two lines\nof heading", entries)
    table = read_table(path)
    assert table.small["odd name"] == constants
    assert table.backends["org/model"] == "fa3-gqa"
