"""The command leaves images, tables and one page that needs no other file."""

import csv
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.loadtest.report.records import label, records, records_of, run, write_run
from typer.testing import CliRunner, Result

from sangam_loadtest.cli import app
from sangam_loadtest.records import RequestRecord
from sangam_loadtest.report.build import write_report
from sangam_loadtest.report.drawn import Table, listed, told
from sangam_loadtest.report.loading import load_runs
from sangam_loadtest.report.page import notes_on
from sangam_loadtest.report.runs import run_of
from sangam_loadtest.report.summary_table import summary_table

PASSES_HEAD = "model,engine,launch,prefill_tokens,decode_blocks,context_tokens,total_ms\n"


def called(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["report", *arguments], env={"COLUMNS": "200"})


class Page(HTMLParser):
    """What is on a page: images, headings, tables' cells; and that tags are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: list[dict[str, str | None]] = []
        self.headings: list[str] = []
        self.rows: list[list[str]] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        if tag not in ("meta", "img"):
            self._open.append(tag)
        if tag == "img":
            self.images.append(told)
        if tag == "tr":
            self.rows.append([])
        if told.get("id"):
            self.ids.append(told["id"] or "")
        if tag in ("a", "link", "script"):
            self.links.append(told.get("href") or told.get("src") or "")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("h1", "h2"):
            self.headings.append(data)
        if self._open and self._open[-1] in ("td", "th"):
            self.rows[-1].append(data)


def write_runs(folder: Path) -> None:
    for configuration in ("8C", "4P4D"):
        for rate in (2.0, 6.0):
            run_label = label(configuration=configuration, rate=rate)
            path = folder / f"{configuration}-{rate:g}.jsonl"
            write_run(path, records_of(run_label, 60), run_label)
    (folder / "8C-2.passes.csv").write_text(
        PASSES_HEAD + "llada-8b,simulated,graph,0,1,900,5\nllada-8b,simulated,graph,0,2,900,6\n"
    )


def test_report_writes_images_tables_and_a_page(tmp_path: Path) -> None:
    write_runs(tmp_path / "runs")
    output = tmp_path / "out"
    result = called(str(tmp_path / "runs"), "--output", str(output), "--title", "5 < 6 & so on")
    assert result.exit_code == 0, result.output
    names = ["latency", "breakdown", "distributions", "iterations", "passes"]
    for name in names:
        assert (output / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"{name}.png: " in result.output
    assert "not drawn: Sweep of the token budget τ: No configuration was run with two" in (
        result.output
    )
    text = (output / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.headings[0] == "5 < 6 & so on"
    assert page.headings[1:] == [
        "Runs",
        "Latency against request rate",
        "Where the time goes",
        "Queueing and decode time",
        "Iterations against output length",
        "Decode iteration time against batch",
        "What is missing",
    ]
    assert page.ids == ["runs", *names, "missing"]
    assert page.links == [f"#{name}" for name in page.ids]
    for image in page.images:
        assert (image["src"] or "").startswith("data:image/png;base64,")
        assert len(image["alt"] or "") > 40
        assert 400 <= int(image["width"] or 0) <= 1100
    assert "Runs: 4 simulated; requests: 240." in text
    assert "prefers-color-scheme: dark" in text
    with (output / "summary.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["configuration"], row["requests/s"]) for row in rows] == [
        ("8C", "2.0"),
        ("8C", "6.0"),
        ("4P4D", "2.0"),
        ("4P4D", "6.0"),
    ]
    assert float(rows[0]["answered"]) == 60
    assert ["LLaDA-8B", "ShareGPT", "8C", "2", *page.rows[6][4:]] == page.rows[6]


def test_report_takes_files_a_rate_passes_and_another_format(tmp_path: Path) -> None:
    write_runs(tmp_path)
    more = tmp_path / "more.csv"
    more.write_text(PASSES_HEAD + "dream-7b,measured,graph,0,4,900,5\n")
    result = called(
        *(str(tmp_path / "8C-2.jsonl"), str(tmp_path / "8C-6.jsonl"), "--rate", "2"),
        *("--passes", str(more), "--format", "svg", "--output", str(tmp_path / "out")),
    )
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "latency.svg").read_text().startswith("<?xml")
    breakdown = (tmp_path / "out" / "breakdown.csv").read_text()
    assert "8C,2.0," in breakdown
    assert "8C,6.0," not in breakdown
    assert "Dream-7B,measured graph" in (tmp_path / "out" / "passes.csv").read_text()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["none.jsonl"], "none.jsonl: there is no such file or folder"),
        (["."], "no .jsonl file in this folder"),
        (["none.jsonl", "--format", "gif"], "--format gif: must be one of png, svg, pdf"),
    ],
)
def test_bad_arguments_are_one_line_that_says_what_to_do(
    arguments: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = called(*arguments, "--output", "out")
    assert result.exit_code == 1
    assert why in result.output.replace("\n", " ")
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_a_report_of_a_server_without_timings_has_latency_alone(tmp_path: Path) -> None:
    rows = [RequestRecord(n, float(n), float(n), 10, 20, latency_seconds=2.0) for n in range(9)]
    result = called(
        str(write_run(tmp_path / "other.jsonl", rows)), "--output", str(tmp_path / "out")
    )
    assert result.exit_code == 0, result.output
    page = Page((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
    assert len(page.images) == 1
    assert result.output.count("not drawn: ") == 5
    assert "--no-timings" in result.output


def test_the_page_says_what_a_reader_must_know_of_the_runs(tmp_path: Path) -> None:
    failing = [*records(num_requests=5), RequestRecord(9, 9.0, 9.0, 1, 1, error="timeout")]
    write_run(tmp_path / "bare.jsonl", failing)
    write_run(tmp_path / "cut.jsonl", records(num_requests=5), label(), is_interrupted=True)
    write_run(tmp_path / "unnamed.jsonl", records(num_requests=5), label(configuration=None))
    notes = notes_on([*load_runs([tmp_path]), run(num=5)])
    assert notes == [
        f"Without a summary beside them, so named after their files: {tmp_path}/bare.jsonl.",
        f"Without a label (--label), so named after their files: {tmp_path}/unnamed.jsonl.",
        f"Interrupted: {tmp_path}/cut.jsonl.",
        f"With failed requests, whose latency is not counted: {tmp_path}/bare.jsonl.",
    ]


def test_the_summary_leaves_out_columns_that_no_run_has() -> None:
    full = summary_table([run(num=50)])
    assert "decode queueing (s)" in full.columns
    row = dict(zip(full.columns, full.rows[0], strict=True))
    each = run(num=50)
    assert row["P99 (s)"] == pytest.approx(each.percentile("latency_seconds", 99))
    tokens_rate, answered_rate = row["tokens/s"], row["answered/s"]
    assert isinstance(tokens_rate, float)
    assert isinstance(answered_rate, float)
    assert tokens_rate / answered_rate == pytest.approx(each.mean("output_tokens"))


def test_the_summary_tells_a_true_rate_that_is_not_the_nominal_one() -> None:
    assert "true requests/s" not in summary_table([run(num=5)]).columns
    clipped = run_of(label(), records(num_requests=5), {"true_rate": 6.3})
    table = summary_table([clipped, run("8C", num=5)])
    place = table.columns.index("true requests/s")
    assert [row[place] for row in table.rows] == [None, 6.3]


def test_every_run_failing_still_makes_a_summary(tmp_path: Path) -> None:
    failed = run_of(label(), [RequestRecord(0, 0.0, 0.0, 1, 1, error="timeout")])
    report = write_report([failed], tmp_path)
    assert report.drawn == ()
    assert len(report.missing) == 6
    row = dict(zip(summary_table([failed]).columns, summary_table([failed]).rows[0], strict=True))
    assert (row["answered"], row["failed"]) == (0, 1)
    assert "mean (s)" not in row


def test_tables_read_well_and_escape_what_markdown_would_take() -> None:
    table = Table(("name", "s"), (("a|b", 0.12345), ("c", None), ("d", 12345.6)))
    assert table.to_markdown() == (
        "| name | s |\n| --- | --: |\n| a\\|b | 0.123 |\n| c | - |\n| d | 12,346 |\n"
    )
    assert [told(cell) for cell in (3.3, 18.24, 0.5, 6.0, 123.4, float("nan"), 7)] == [
        "3.30",
        "18.2",
        "0.500",
        "6",
        "123",
        "-",
        "7",
    ]
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"
