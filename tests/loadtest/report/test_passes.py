"""Files of passes are read for their decode passes, and refused by line and column."""

from pathlib import Path

import pytest

from sangam_loadtest.report.passes import load_passes
from sangam_loadtest.report.runs import ReportError

HEAD = "model,engine,launch,prefill_tokens,decode_blocks,context_tokens,total_ms,host_ms\n"


def write(path: Path, *lines: str, head: str = HEAD) -> Path:
    path.write_text(head + "".join(line + "\n" for line in lines))
    return path


def test_passes_with_a_prefill_are_left_out_and_engines_kept_apart(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.csv",
        "llada-8b,fa3,graph,0,8,1024,9.5,0.1",
        "llada-8b,fa3,graph,2048,8,1024,70,0.1",
        "llada-8b,fa3,eager,0,8,1024,9.9,7",
        "llada-8b,fa3,graph,0,16,2048,16,",
        "llada-8b,fa3,graph,512,0,512,12,",
    )
    first, second = load_passes([path, path])
    assert (first.model, first.name, second.name) == ("llada-8b", "fa3 graph", "fa3 eager")
    assert first.decode_blocks.tolist() == [8, 16]
    assert first.context_tokens.tolist() == [1024, 2048]
    assert first.seconds.tolist() == pytest.approx([0.0095, 0.016])


def test_files_of_one_engine_are_told_apart_by_name_or_pooled(tmp_path: Path) -> None:
    line = "llada-8b,fa3,graph,0,8,1024,9.5,0.1"
    paths = [write(tmp_path / "a.passes.csv", line), write(tmp_path / "b.csv", line, line)]
    assert [each.name for each in load_passes(paths)] == ["fa3 graph (a)", "fa3 graph (b)"]
    (pooled,) = load_passes(paths, is_pooled=True)
    assert (pooled.name, len(pooled.seconds)) == ("fa3 graph", 3)


def test_bad_files_are_named_with_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    write(path, head="model,decode_blocks,total_ms\n")
    with pytest.raises(ReportError, match=r"a\.csv, line 1: no column context_tokens, prefill"):
        load_passes([path])
    write(path, "m,e,l,0,8,1024,9.5,0.1", "m,e,l,0,8,many,9.5,0.1")
    with pytest.raises(ReportError, match=r"line 3: context_tokens must be a number, not 'many'"):
        load_passes([path])
    write(path, "m,e,l,0,8,1024")
    with pytest.raises(ReportError, match=r"line 2: total_ms must be a number, not None"):
        load_passes([path])
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ReportError, match="not a text file"):
        load_passes([path])
    with pytest.raises(ReportError, match="No such file"):
        load_passes([tmp_path / "none.csv"])
