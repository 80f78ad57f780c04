"""Reads a folder of golden cases and says each one in Sangam's terms.

Decides how a case's parameters become a geometry and a ``Decoding``; the format is described in
the folder's README. Called by ``__main__`` and tests.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sangam_core.decoding import (
    STEPPED_RULES,
    Decoding,
    EosRule,
    Unmasking,
    UnmaskingRule,
)
from sangam_core.errors import ConfigurationError, InvalidRequest
from sangam_core.geometry import Geometry
from sangam_core.rules import RANKED_RULES, Family, check_decoding, decodes_in_blocks
from sangam_worker.strategies import strategy_named

CASE_FILES = "*_cases.json"


@dataclass(frozen=True, slots=True)
class Write:
    """A token written by a pass; the score is ``None`` where it is not to be compared."""

    position: int
    token: int
    score: float | None


@dataclass(frozen=True, slots=True)
class Forward:
    """One pass: the positions it feeds, and what it writes."""

    block: int
    start: int
    num_rows: int
    writes: tuple[Write, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A case and what must come out of it."""

    id: str
    family: Family
    model: Path
    mask_id: int
    prompt_ids: tuple[int, ...]
    geometry: Geometry
    decoding: Decoding
    output_ids: tuple[int, ...]
    num_passes: int
    forwards: tuple[Forward, ...]


def read_cases(folder: Path) -> list[Case]:
    """Every case of a folder.

    Raises:
        ConfigurationError: no such folder, no case in it, or one that cannot be understood.
    """
    files = sorted(folder.glob(CASE_FILES))
    if not files:
        raise ConfigurationError(f"{folder}: holds no {CASE_FILES}")
    cases: list[Case] = []
    for file in files:
        for number, raw in enumerate(_read_list(file)):
            name = raw.get("id", f"number {number}") if isinstance(raw, dict) else f"{number}"
            try:
                cases.append(_case(raw, folder))
            except (KeyError, TypeError, ValueError, InvalidRequest) as error:
                raise ConfigurationError(f"{file}: case {name}: {_reason(error)}") from error
    if not cases:
        raise ConfigurationError(f"{folder}: its {CASE_FILES} hold no case")
    ids = [case.id for case in cases]
    if len(set(ids)) < len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise ConfigurationError(f"{folder}: case {twice} is there twice")
    return cases


def _read_list(file: Path) -> list[Any]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file}: cannot be read: {error}") from None
    if not isinstance(raw, list):
        raise ConfigurationError(f"{file}: must hold a list of cases")
    return raw


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"field {error.args[0]!r} is missing"
    if isinstance(error, ValidationError):
        return "; ".join(f"{item['loc']}: {item['msg']}" for item in error.errors())
    return str(error)


def _case(raw: Mapping[str, Any], folder: Path) -> Case:
    family: Family = raw["family"]
    if family not in ("llada", "dream"):
        raise ValueError(f"family {family!r} is unknown")
    params, cache = raw["params"], raw["cache"]
    strategy_named(cache)
    in_blocks = decodes_in_blocks(family, cache)
    buffer_tokens = _positive(params, "gen_length")
    block_length = _positive(params, "block_length") if in_blocks else buffer_tokens
    if buffer_tokens % block_length:
        raise ValueError(f"gen_length {buffer_tokens} is not a multiple of {block_length}")
    geometry = Geometry(len(raw["prompt_ids"]), buffer_tokens // block_length, block_length)
    decoding = _decoding(raw, geometry.num_blocks)
    check_decoding(family, decoding)
    has_forced_first = family == "dream" and cache != "none"
    return Case(
        id=raw["id"],
        family=family,
        model=folder / "models" / raw["model"],
        mask_id=params["mask_id"],
        prompt_ids=tuple(raw["prompt_ids"]),
        geometry=geometry,
        decoding=decoding,
        output_ids=tuple(raw["output_ids"]),
        num_passes=raw["nfe"],
        forwards=tuple(
            _forward(item, scores=not (has_forced_first and item["kind"] == "full"))
            for item in raw["forwards"]
        ),
    )


def _positive(params: Mapping[str, Any], name: str) -> int:
    value = params[name]
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive whole number, not {value!r}")
    return value


def _decoding(raw: Mapping[str, Any], num_blocks: int) -> Decoding:
    params = raw["params"]
    given: dict[str, Any] = {"rule": _rule(raw)}
    for name in ("threshold", "factor", "alg_temp", "eps"):
        if params.get(name) is not None:
            given[name] = params[name]
    if params.get("steps") is not None and _has_influence(given["rule"], raw["cache"]):
        if params["steps"] % num_blocks:
            raise ValueError(f"steps {params['steps']} is not a multiple of {num_blocks} blocks")
        given["steps"] = params["steps"] // num_blocks
    stops_early = bool(params.get("early_stop"))
    return Decoding(
        unmasking=Unmasking(**given),
        cache=raw["cache"],
        temperature=params.get("temperature") or 0.0,
        top_p=params.get("top_p") or 1.0,
        top_k=params.get("top_k") or 0,
        eos_ids=(params["eos_id"],) if stops_early else (),
        eos_rule=EosRule.FILL if stops_early else EosRule.IGNORE,
    )


def _rule(raw: Mapping[str, Any]) -> UnmaskingRule:
    """The rule the reference carries out, which is not always the one that is named.

    Its cached Dream loop ranks by entropy whatever other algorithm is named (``dllm-semantics``
    section b), where Sangam does what it is told.
    """
    rule = UnmaskingRule(raw["params"].get("alg") or raw["mode"])
    is_cached_dream = raw["family"] == "dream" and raw["cache"] != "none"
    if is_cached_dream and rule in (RANKED_RULES | {UnmaskingRule.ORIGIN}):
        return UnmaskingRule.ENTROPY
    return rule


def _has_influence(rule: UnmaskingRule, cache: str) -> bool:
    """Whether ``steps`` counts: in a schedule, or as a token budget (Dream without a cache)."""
    is_budget = rule is UnmaskingRule.CONFIDENCE_THRESHOLD and cache == "none"
    return rule in STEPPED_RULES or is_budget


def _forward(raw: Mapping[str, Any], *, scores: bool) -> Forward:
    """A pass; the scores of Dream's forced first tokens are for information only."""
    return Forward(
        block=raw["block"],
        start=raw["start"],
        num_rows=raw["len"],
        writes=tuple(
            Write(position, token, score if scores else None)
            for position, token, score in raw["writes"]
        ),
    )
