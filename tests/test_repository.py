"""Rules of the house that no linter holds: sizes, docstrings that open files, names, documents."""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from sangam_core.unknown_settings import NAMES_FILE, unknown_settings
from sangam_router.local.settings_names import settings_names
from sangam_router.local.settings_table import settings_class, settings_table, with_table

REPOSITORY = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for folder in ("services", "loadtest")
    for path in (REPOSITORY / folder).rglob("*.py")
    if not {"build", "node_modules"} & set(path.parts)
)
DOCUMENTS = sorted(
    [
        *REPOSITORY.glob("*.md"),
        *(
            path
            for folder in ("services", "loadtest", "charts", "manifests", "tests")
            for path in (REPOSITORY / folder).rglob("*.md")
        ),
    ]
)
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
EMPTY_WORDS = re.compile(r"(Manager|Utils?|Helpers?|Base)(?=[A-Z]|$)")
EMPTY_MODULES = re.compile(r"(^|_)(manager|utils?|helpers?|base)(?=_|$)")
SETTINGS = {
    "router": "sangam_router.settings:RouterSettings",
    "worker": "sangam_worker.settings:WorkerSettings",
}


def name_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def functions_of(path: Path) -> Iterator[tuple[str, int]]:
    """Every function with the lines of its body: signature and docstring are declarations."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            first, last = (body[0].lineno, body[-1].end_lineno) if body else (1, 0)
            assert last is not None
            yield f"{name_of(path)}:{node.lineno} {node.name}", last - first + 1


def without_code(path: Path) -> str:
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)


def anchors_of(path: Path) -> set[str]:
    """What a document's headings can be linked by (GitHub's rule)."""
    titles = re.findall(r"^#+ (.+)$", without_code(path), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(path: Path) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(path)):
        where, _, anchor = link.partition("#")
        if "://" in where:
            continue
        target = path.parent / where if where else path
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    return broken


def test_the_sources_are_found() -> None:
    names = {name_of(path) for path in SOURCES}
    assert "services/core/sangam_core/lifecycle.py" in names
    assert "services/router/sangam_router/driver.py" in names
    assert "services/worker/sangam_worker/scheduler.py" in names
    assert "loadtest/sangam_loadtest/__init__.py" in names


def test_every_file_opens_with_a_docstring() -> None:
    assert [name_of(path) for path in SOURCES if not ast.get_docstring(tree_of(path))] == []


def test_no_file_is_longer_than_the_limit() -> None:
    lengths = {name_of(p): len(p.read_text(encoding="utf-8").splitlines()) for p in SOURCES}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_no_function_is_longer_than_the_limit() -> None:
    lengths = dict(found for path in SOURCES for found in functions_of(path))
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}


def test_nothing_is_raised_out_of_except_star() -> None:
    """Before Python 3.11.4 it would come out as a group, past whoever waits for it."""
    found = [
        f"{name_of(path)}:{raised.lineno}"
        for path in SOURCES
        for tried in ast.walk(tree_of(path))
        if isinstance(tried, ast.TryStar)
        for handler in tried.handlers
        for raised in ast.walk(handler)
        if isinstance(raised, ast.Raise)
    ]
    assert found == []


def test_no_class_is_named_after_nothing() -> None:
    classes = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and EMPTY_WORDS.search(node.name)
    ]
    assert classes == []


def test_no_module_is_named_after_nothing() -> None:
    names = {part for path in SOURCES for part in Path(name_of(path)).with_suffix("").parts}
    assert [name for name in sorted(names) if EMPTY_MODULES.search(name)] == []


@pytest.mark.parametrize(
    ("name", "is_empty"),
    [("base", True), ("kv_utils", True), ("database", False), ("baseline", False), ("plan", False)],
)
def test_a_modules_empty_words_are_found_and_not_parts(name: str, is_empty: bool) -> None:
    assert bool(EMPTY_MODULES.search(name)) is is_empty


@pytest.mark.parametrize(
    ("name", "is_empty"),
    [
        ("WorkerManager", True),
        ("BaseWorker", True),
        ("TokenUtils", True),
        ("HelperThread", True),
        ("DatabaseLease", False),
        ("Baseline", False),
        ("Utility", False),
    ],
)
def test_the_search_for_empty_words_finds_words_and_not_parts(name: str, is_empty: bool) -> None:
    assert bool(EMPTY_WORDS.search(name)) is is_empty


def test_nobody_is_told_to_install_by_name_what_pypi_has_of_another_project() -> None:
    readers = [*SOURCES, *DOCUMENTS, *(REPOSITORY / "tests/gpu").glob("*.py")]
    by_name = re.compile(r"\bsangam\[[a-z,]+\]")
    assert [name_of(p) for p in readers if by_name.search(p.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("document", [*map(name_of, DOCUMENTS)])
def test_every_link_in_a_document_leads_somewhere(document: str) -> None:
    assert broken_links(REPOSITORY / document) == []


@pytest.mark.parametrize("document", [*map(name_of, DOCUMENTS)])
def test_what_follows_a_table_is_no_row_of_it(document: str) -> None:
    """GitHub takes every line up to an empty one for a row."""
    lines = without_code(REPOSITORY / document).splitlines()
    swallowed = [
        line
        for above, line in pairwise(lines)
        if above.startswith("|") and line.strip() and not line.startswith(("|", "<!--"))
    ]
    assert swallowed == []


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "## On a GPU: `fp8`, not yet\n"
        "[a](#on-a-gpu-fp8-not-yet) [b](page.md) [c](https://nowhere.invalid/x)\n"
        "[d](#on-a-gpu) [e](other.md)\n```\n[f](code.md)\n```\n"
    )
    assert broken_links(page) == ["#on-a-gpu", "other.md"]


@pytest.mark.parametrize("service", SETTINGS)
def test_the_settings_table_of_a_service_is_the_one_of_its_code(service: str) -> None:
    text = (REPOSITORY / f"services/{service}/README.md").read_text(encoding="utf-8")
    table = settings_table(settings_class(SETTINGS[service]))
    assert with_table(text, service, table) == text, (
        "run: python -m sangam_router.local.settings_table "
        f"services/{service}/README.md {service}={SETTINGS[service]}"
    )


def test_the_list_of_settings_that_every_service_knows_is_the_one_of_the_code() -> None:
    path = REPOSITORY / "services/core/sangam_core" / NAMES_FILE
    assert path.read_text(encoding="ascii") == settings_names(list(SETTINGS.values())), (
        f"run: python -m sangam_router.local.settings_names {name_of(path)} "
        f"{' '.join(SETTINGS.values())}"
    )


@pytest.mark.parametrize("path", [*map(name_of, DOCUMENTS), "Makefile"])
def test_no_service_would_warn_of_a_variable_that_people_are_told_to_set(path: str) -> None:
    text = (REPOSITORY / path).read_text(encoding="utf-8")
    named = set(re.findall(r"\bSANGAM_[A-Z_]*[A-Z]\b(?!_)", text))
    assert [each.name for each in unknown_settings(dict.fromkeys(named, ""))] == []
