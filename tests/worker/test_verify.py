"""Golden cases through scheduler and engine, on every placement, and the command that runs them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.worker.checkpoints import GOLDEN, an_engine, dream_config, llada_config
from tests.worker.reference import write_folder

from sangam_worker.verify import Case, first_difference, read_cases, run_cases
from sangam_worker.verify.__main__ import main
from sangam_worker.verify.cases import Write

CASES = read_cases(GOLDEN)
LLADA = [case for case in CASES if case.family == "llada"]
DREAM = [case for case in CASES if case.family == "dream"]


def differences(cases: list[Case], *, num_engines: int = 1, in_flight: int = 1) -> dict[str, str]:
    most_pages = max(case.geometry.num_pages for case in cases)
    engines = [
        an_engine(cases[0].model, total_pages=in_flight * most_pages) for _ in range(num_engines)
    ]
    ran = list(run_cases(cases, *engines, in_flight=in_flight))
    assert sorted(item.case.id for item in ran) == sorted(case.id for case in cases)
    found = {}
    for item in ran:
        difference = first_difference(item.case, item.output_ids, item.forwards)
        if difference is not None:
            found[item.case.id] = difference
    return found


def shuffled(cases: list[Case], seed: int) -> list[Case]:
    return Random(seed).sample(cases, len(cases))


def test_there_are_93_llada_and_50_dream_cases() -> None:
    assert (len(LLADA), len(DREAM)) == (93, 50)


@pytest.mark.parametrize("cache", ["dual", "prefix", "none"])
@pytest.mark.parametrize("cases", [LLADA, DREAM], ids=["llada", "dream"])
def test_golden_cases_are_exact_one_at_a_time(cases: list[Case], cache: str) -> None:
    assert differences([case for case in cases if case.decoding.cache == cache]) == {}


@pytest.mark.parametrize("cases", [LLADA, DREAM], ids=["llada", "dream"])
def test_golden_cases_are_exact_with_many_in_flight_in_random_order(cases: list[Case]) -> None:
    assert differences(shuffled(cases, 0), in_flight=24) == {}


@pytest.mark.parametrize("cases", [LLADA, DREAM], ids=["llada", "dream"])
def test_golden_cases_are_exact_prefilled_on_one_worker_and_decoded_on_another(
    cases: list[Case],
) -> None:
    assert differences(shuffled(cases, 2), num_engines=2, in_flight=7) == {}


# -- other folders ---------------------------------------------------------------------------

OTHERS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "llada-gqa": (
        llada_config(
            d_model=96,
            n_heads=6,
            n_kv_heads=2,
            n_layers=2,
            mlp_hidden_size=200,
            rope_theta=10000.0,
            mask_token_id=5,
            vocab_size=131,
            embedding_size=131,
            eos_token_id=[3, 4],
        ),
        [2, 4, 12],
    ),
    "llada-bias": (
        llada_config(n_layers=1, include_qkv_bias=True, mask_token_id=0, rms_norm_eps=1e-6),
        [1, 16, 20],
    ),
    "dream-wide-heads": (
        dream_config(
            head_dim=32,
            num_attention_heads=6,
            num_key_value_heads=3,
            num_hidden_layers=2,
            rope_theta=50000.0,
            mask_token_id=7,
            vocab_size=140,
            eos_token_id=6,
            bos_token_id=6,
            rms_norm_eps=1e-5,
        ),
        [2, 5, 16],
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_folders_of_other_models_and_block_lengths_are_exact(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cases made by ``reference``, which shares no code with the engine."""
    config, block_lengths = OTHERS[name]
    number = write_folder(tmp_path, name, config, block_lengths, seed=1)
    assert number >= 10
    for options in (["--in-flight", "5"], ["--split", "--in-flight", "3", "--seed", "4"]):
        assert main([str(tmp_path), *options]) == 0, capsys.readouterr().out
        assert capsys.readouterr().out.splitlines()[-1] == f"{number} of {number} cases exact"


# -- a difference is noticed -----------------------------------------------------------------


def ran_la_006() -> tuple[Case, list[Any], list[int]]:
    case = next(case for case in LLADA if case.id == "la-006")
    return case, list(case.forwards), list(case.output_ids)


def test_what_was_expected_has_no_difference() -> None:
    case, forwards, ids = ran_la_006()
    assert first_difference(case, ids, forwards) is None


def changed_write(forward: Any, change: Callable[[Write], Write]) -> Any:
    first, *others = forward.writes
    kind = type(forward)
    return kind(forward.block, forward.start, forward.num_rows, (change(first), *others))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda w: Write(w.position, 1, w.score), "position 7: wrote 1, expected 40"),
        (lambda w: Write(5, w.token, w.score), "position 5: wrote 40, expected nothing"),
        (lambda w: Write(w.position, w.token, w.score + 2e-4), "position 7: score"),
        (lambda w: Write(w.position, w.token, float("nan")), "position 7: score nan"),
    ],
)
def test_a_wrong_token_position_or_score_is_a_difference(
    change: Callable[[Write], Write], complaint: str
) -> None:
    case, forwards, ids = ran_la_006()
    forwards[0] = changed_write(forwards[0], change)
    difference = first_difference(case, ids, forwards)
    assert difference is not None
    assert difference.startswith(f"pass 0: {complaint}")


def test_one_pass_too_few_is_a_difference() -> None:
    case, forwards, ids = ran_la_006()
    assert first_difference(case, ids, forwards[:-1]) == "22 passes, expected 23"


def test_another_output_is_a_difference() -> None:
    case, forwards, ids = ran_la_006()
    ids[-1] += 1
    assert first_difference(case, ids, forwards) == "position 68: token 43, expected 42"


# -- the command -----------------------------------------------------------------------------


def a_folder(
    at: Path, family: str, number: int, change: Callable[[Any], None] | None = None
) -> Path:
    """A folder of ``number`` cases of one family."""
    name = {"llada": "llada-tiny-a", "dream": "dream-tiny-a"}[family]
    shutil.copytree(GOLDEN / "models" / name, at / "models" / name)
    raw = json.loads((GOLDEN / f"{family}_cases.json").read_text())[:number]
    if change is not None:
        change(raw)
    (at / f"{family}_cases.json").write_text(json.dumps(raw))
    return at


def test_the_command_says_how_many_are_exact_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = a_folder(tmp_path, "dream", 5)
    assert main([str(folder), "--in-flight", "3", "--split"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "5 of 5 cases exact"


def test_the_command_names_what_differs_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(raw: Any) -> None:
        raw[1]["output_ids"][-1] += 1

    folder = a_folder(tmp_path, "llada", 4, change)
    assert main([str(folder)]) == 1
    *before, last = capsys.readouterr().out.splitlines()
    assert last == "3 of 4 cases exact"
    assert before[-1].startswith("la-001: position 68: token")


def test_another_number_of_passes_than_nfe_is_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = a_folder(tmp_path, "llada", 1, lambda raw: raw[0].update(nfe=63))
    assert main([str(folder)]) == 1
    assert "la-000: 64 passes, expected nfe 63" in capsys.readouterr().out


def test_cached_dream_ranks_by_entropy_whatever_algorithm_a_case_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(raw: Any) -> None:
        raw[:] = [
            case for case in raw if case["cache"] == "dual" and case["params"]["alg"] == "entropy"
        ][:3]
        names = ("maskgit_plus", "topk_margin", "origin")
        for case, name in zip(raw, names, strict=True):
            case["params"]["alg"] = name

    folder = a_folder(tmp_path, "dream", 50, change)
    assert main([str(folder)]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda raw: raw[0].pop("params"), "case la-000: field 'params' is missing"),
        (lambda raw: raw[0].update(family="bert"), "family 'bert' is unknown"),
        (lambda raw: raw[0].update(cache="half"), "case la-000: cache 'half' is unknown"),
        (lambda raw: raw[0]["params"].update(block_length=0), "block_length must be a positive"),
        (lambda raw: raw[0]["params"].update(gen_length=None), "gen_length must be a positive"),
        (lambda raw: raw[0]["params"].update(mask_id=7), "mask_id is 7"),
        (lambda raw: raw[0]["params"].update(block_length=7), "not a multiple of 7"),
        (lambda raw: raw[0]["params"].update(steps=63), "steps 63 is not a multiple"),
        (lambda raw: raw[0].update(model="none"), "none: there is no such folder"),
        (lambda raw: raw[0].update(id="la-001"), "la-001 is there twice"),
        (
            lambda raw: raw[0].update(prompt_ids=[999]),
            "case la-000: its token ids must be in 0..287",
        ),
        (lambda raw: raw.clear(), "hold no case"),
    ],
)
def test_a_folder_that_cannot_be_run_is_one_clear_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Any], None],
    complaint: str,
) -> None:
    folder = a_folder(tmp_path, "llada", 2, change)
    assert main([str(folder)]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


def test_a_folder_without_cases_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "holds no *_cases.json" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-1", "x"])
def test_in_flight_must_be_a_positive_number(value: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(GOLDEN), "--in-flight", value])
    assert stop.value.code == 2
