"""Trace files are read, filtered and ordered; malformed ones are refused where they are wrong."""

import json
from pathlib import Path

import pytest

from sangam_core.errors import ConfigurationError
from sangam_loadtest.traces.csv_file import Columns
from sangam_loadtest.traces.length_filter import LengthFilter
from sangam_loadtest.traces.questions import is_answer_right
from sangam_loadtest.traces.request import TraceError
from sangam_loadtest.traces.source import TraceSpec, take_requests
from sangam_loadtest.traces.synthetic import Sessions


def written(folder: Path, name: str, content: str) -> str:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return str(path)


def conversation(*turns: tuple[str, str]) -> dict[str, object]:
    return {"id": "c", "conversations": [{"from": who, "value": text} for who, text in turns]}


VIDUR = (
    "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69\n20,5.0,25,4\n"
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:50.9951690,396,109\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
)


def test_a_csv_of_lengths_is_read(tmp_path: Path) -> None:
    spec = TraceSpec(written(tmp_path, "a.csv", VIDUR), in_file_order=True)
    requests = take_requests(spec, 2)
    assert [(r.prompt_tokens, r.output_tokens) for r in requests] == [(3772, 54), (20, 5)]
    assert requests[0].arrival_seconds is None
    assert requests[0].is_exact_output


def test_time_stamps_become_seconds_after_the_first_request(tmp_path: Path) -> None:
    spec = TraceSpec(written(tmp_path, "a.csv", AZURE), in_file_order=True)
    requests = take_requests(spec, 2)
    assert [r.prompt_tokens for r in requests] == [374, 396]
    assert [r.arrival_seconds for r in requests] == pytest.approx([0.0, 4.314579], abs=1e-5)


def test_columns_can_be_named(tmp_path: Path) -> None:
    path = written(tmp_path, "a.csv", "at,in,out\n10,5,6\n12.5,7,8\n")
    columns = Columns(prompt="in", output="out", arrival="at")
    requests = take_requests(TraceSpec(path, columns=columns, in_file_order=True), 2)
    assert [(r.arrival_seconds, r.prompt_tokens) for r in requests] == [(0.0, 5), (2.5, 7)]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("prompt_tokens,output_tokens\n5,6\n7,x\n", r"a.csv, line 3, output_tokens: .*'x'"),
        ("prompt_tokens,output_tokens\n0,6\n", r"line 2, prompt_tokens: .*'0'"),
        ("prompt_tokens,output_tokens\n1.5,6\n", r"line 2, prompt_tokens: .*'1.5'"),
        ("prompt_tokens,output_tokens\nnan,6\n", r"line 2, prompt_tokens"),
        ("prompt_tokens,output_tokens\n5\n", r"line 2: 1 values where the header names 2"),
        ("prompt_tokens,tokens\n5,6\n", r"line 1: no column output_tokens or .*there are: prompt"),
        ("prompt_tokens,output_tokens,timestamp\n5,6,noon\n", r"line 2, timestamp: .*'noon'"),
        ("prompt_tokens,output_tokens\n", r"no requests"),
        ("", r"a.csv, line 1: empty; it must name the columns, e.g. prompt_tokens,output_tokens"),
        ("\n5,6\n", r"line 1: empty"),
        ('prompt_tokens,output_tokens\n"5,6\n', r"a.csv, line"),
    ],
)
def test_a_malformed_csv_is_refused_where_it_is_wrong(
    tmp_path: Path, content: str, told: str
) -> None:
    path = written(tmp_path, "a.csv", content)
    with pytest.raises(TraceError, match=told):
        take_requests(TraceSpec(path), 1)


def test_a_file_is_shuffled_by_the_seed(tmp_path: Path) -> None:
    rows = "".join(f"{n},{n}\n" for n in range(1, 51))
    path = written(tmp_path, "a.csv", "prompt_tokens,output_tokens\n" + rows)
    first = take_requests(TraceSpec(path, seed=1), 50)
    assert first == take_requests(TraceSpec(path, seed=1), 50)
    assert first != take_requests(TraceSpec(path, seed=2), 50)
    assert sorted(r.prompt_tokens for r in first) == list(range(1, 51))


def test_a_file_with_too_few_requests_says_so_unless_it_may_be_repeated(tmp_path: Path) -> None:
    path = written(tmp_path, "a.csv", VIDUR)
    with pytest.raises(TraceError, match="2 requests pass the filter, 5 are wanted"):
        take_requests(TraceSpec(path), 5)
    assert len(take_requests(TraceSpec(path, is_repeated=True), 5)) == 5


def test_lengths_are_filtered(tmp_path: Path) -> None:
    spec = TraceSpec("sharegpt", lengths=LengthFilter(min_prompt=100, max_output=64, max_total=900))
    requests = take_requests(spec, 200)
    assert all(r.prompt_tokens >= 100 and r.output_tokens <= 64 for r in requests)
    assert all(r.prompt_tokens + r.output_tokens <= 900 for r in requests)


def test_a_filter_that_nothing_passes_ends_with_an_error() -> None:
    with pytest.raises(TraceError, match="none of 100000 requests in a row passes the filter; low"):
        take_requests(TraceSpec("sharegpt", lengths=LengthFilter(min_prompt=5000)), 1)
    with pytest.raises(ConfigurationError, match="max_output"):
        LengthFilter(min_output=9, max_output=8)


@pytest.mark.parametrize(
    ("lengths", "told"),
    [
        (LengthFilter(max_total=5), "raise --max-total 5 to 11 or more"),
        (LengthFilter(min_prompt=50), "lower --min-prompt 50 to 9 or less"),
        (
            LengthFilter(max_output=1, max_total=8),
            "raise --max-output 1 to 5 or more; raise --max-total 8 to 11 or more",
        ),
        (
            LengthFilter(min_prompt=9, min_output=8),
            "no request meets all of --min-prompt 9, --min-output 8: widen them",
        ),
    ],
)
@pytest.mark.parametrize("is_repeated", [False, True])
def test_the_options_that_leave_no_request_are_named_with_the_fix(
    tmp_path: Path, lengths: LengthFilter, told: str, is_repeated: bool
) -> None:
    path = written(tmp_path, "a.csv", "prompt_tokens,output_tokens\n6,5\n9,7\n4,8\n")
    with pytest.raises(TraceError, match=f"passes the filter; {told}$"):
        take_requests(TraceSpec(path, lengths=lengths, is_repeated=is_repeated), 2)


def test_each_answer_of_a_sharegpt_conversation_is_a_request(tmp_path: Path) -> None:
    content = [
        conversation(("human", "Hi"), ("gpt", "Hello you"), ("human", "Bye"), ("gpt", "Ciao")),
        conversation(("gpt", "an answer to nothing"), ("human", "never answered")),
    ]
    path = written(tmp_path, "s.json", json.dumps(content))
    first, second = take_requests(TraceSpec(path, in_file_order=True), 2)
    assert first.messages == (("user", "Hi"),)
    assert first.output_tokens == len("Hello you")  # a token of the shipped model is a byte
    assert second.messages == (("user", "Hi"), ("assistant", "Hello you"), ("user", "Bye"))
    assert second.prompt_tokens > first.prompt_tokens > 2


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('[{"conversations":\n  oops}]', r"s.json, line 2, column 3"),
        ("{}", "JSON list"),
        ('[{"id": 1}]', r"\[0\].conversations: must be a list"),
        ('[{"conversations": [{"from": "human"}]}]', r"\[0\].conversations\[0\].value"),
        ('[{"conversations": [{"from": "cat", "value": "m"}]}]', r"\[0\].from.*'cat'"),
        ("[]", "no conversation"),
    ],
)
def test_malformed_sharegpt_is_refused_where_it_is_wrong(
    tmp_path: Path, content: str, told: str
) -> None:
    with pytest.raises(TraceError, match=told):
        take_requests(TraceSpec(written(tmp_path, "s.json", content)), 1)


def test_arxiv_articles_are_prompts_and_abstracts_give_the_length(tmp_path: Path) -> None:
    lines = [
        json.dumps({"article": "A long article.", "abstract": "Short."}),
        "",
        json.dumps({"article_text": ["One.", "Two."], "abstract_text": ["<S> Sum </S>"]}),
    ]
    path = written(tmp_path, "a.jsonl", "\n".join(lines))
    first, second = take_requests(TraceSpec(path, in_file_order=True), 2)
    assert (first.text, first.prompt_tokens, first.output_tokens) == ("A long article.", 15, 6)
    assert second.text == "One. Two."


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"article": "x", "abstract": "y"}\n{"article"', r"a.jsonl, line 2, column"),
        ('{"article": "x"}', r"line 1, abstract: must be a text"),
        ("[1]", r"line 1, column 1: must be a JSON object"),
        ("\n", "no articles"),
    ],
)
def test_malformed_arxiv_is_refused_where_it_is_wrong(
    tmp_path: Path, content: str, told: str
) -> None:
    with pytest.raises(TraceError, match=told):
        take_requests(TraceSpec(written(tmp_path, "a.jsonl", content)), 1)


def test_questions_know_their_right_answers() -> None:
    requests = take_requests(TraceSpec("questions", seed=3), 40)
    assert requests == take_requests(TraceSpec("questions", seed=3), 40)
    sums = [r for r in requests if r.task == "sum2"]
    assert sums
    assert all(r.right_answer is not None and not r.is_exact_output for r in requests)
    assert is_answer_right(sums[0], sums[0].right_answer or "") is True
    assert is_answer_right(sums[0], "no idea") is False


def test_unknown_traces_and_missing_files_are_named() -> None:
    with pytest.raises(TraceError, match="sharegpt, arxiv, questions"):
        take_requests(TraceSpec("wikipedia"), 1)
    with pytest.raises(TraceError, match=r"nowhere.csv: No such file"):
        take_requests(TraceSpec("nowhere.csv"), 1)
    with pytest.raises(ConfigurationError, match="sessions"):
        take_requests(TraceSpec("questions", sessions=Sessions()), 1)
