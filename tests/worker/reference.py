"""Fast-dLLM's decoding loops over the dense transformer, written from their description.

Makes folders in the format of ``tests/golden`` for models of any shape: other sizes, mask ids,
RoPE bases, block lengths. Plain and slow on purpose; shares no code with the engine.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from tests.worker.checkpoints import random_state, write_checkpoint
from tests.worker.dense import Dense
from torch import Tensor

MIN_GAP = 1e-3
"""Cases that float32 could decide otherwise are left out."""


class TooClose(Exception):
    """A decision hangs on less than ``MIN_GAP``."""


class Loop:
    """One case under way."""

    def __init__(self, model: Dense, case: Mapping[str, Any]) -> None:
        self.model, self.case, self.params = model, case, case["params"]
        self.mask_id = self.params["mask_id"]
        self.x = [*case["prompt_ids"], *[self.mask_id] * self.params["gen_length"]]
        self.start = len(case["prompt_ids"])
        self.forwards: list[dict[str, Any]] = []

    def run(self) -> None:
        is_dream = self.case["family"] == "dream"
        if is_dream and self.case["cache"] == "none":
            self.whole_buffer()
            return
        length = self.params["block_length"]
        for number in range(self.params["gen_length"] // length):
            block = range(self.start + number * length, self.start + (number + 1) * length)
            (self.dream_block if is_dream else self.llada_block)(number, block)

    # -- passes ------------------------------------------------------------------------------

    def rows_of(self, block: range, step: int) -> range:
        if self.case["cache"] == "none" or step == 0:
            return range(len(self.x))
        return range(block.start, len(self.x)) if self.case["cache"] == "prefix" else block

    def predictions(self, rows: range, masked: Sequence[int], measure: str) -> list[Any]:
        """(confidence, position, token) of masked positions, best first."""
        raw = self.model.logits(self.x, rows)
        if self.case["family"] == "dream":
            raw = torch.cat((raw[:1], raw[:-1]))
        found = []
        for position in masked:
            row = raw[position - rows.start]
            row = row.clone()
            top = row.topk(2).values
            if top[0] - top[1] < MIN_GAP:
                raise TooClose
            found.append((self.measured(row.softmax(-1), measure), position, int(row.argmax())))
        return sorted(found, key=lambda item: (-item[0], item[1]))

    @staticmethod
    def measured(probabilities: Tensor, measure: str) -> float:
        if measure == "entropy":
            return float((probabilities * (probabilities + 1e-10).log()).sum())
        top = probabilities.topk(2).values
        return float(top[0] - top[1]) if measure == "topk_margin" else float(top[0])

    def write(self, block: int, rows: range, ranked: list[Any], count: int, limit: Any) -> None:
        """Write the ``count`` best; a near tie with the next one, or with the limit, is no case."""
        if 0 < count < len(ranked) and ranked[count - 1][0] - ranked[count][0] < MIN_GAP:
            raise TooClose
        if limit is not None and any(abs(item[0] - limit) < MIN_GAP for item in ranked):
            raise TooClose
        self.write_these(block, rows, ranked[:count])

    def write_these(self, block: int, rows: range, chosen: list[Any]) -> None:
        for _, position, token in chosen:
            self.x[position] = token
        kind = "full" if len(rows) == len(self.x) else self.kind()
        self.forwards.append(
            {
                "kind": kind,
                "block": block,
                "start": rows.start,
                "len": len(rows),
                "writes": sorted([p, t, c] for c, p, t in chosen),
            }
        )

    def kind(self) -> str:
        return {"prefix": "suffix", "dual": "block"}[self.case["cache"]]

    def masked(self, positions: range) -> list[int]:
        return [position for position in positions if self.x[position] == self.mask_id]

    # -- LLaDA -------------------------------------------------------------------------------

    def llada_block(self, number: int, block: range) -> None:
        step = 0
        num_blocks = self.params["gen_length"] // self.params["block_length"]
        while left := self.masked(block):
            rows = self.rows_of(block, step)
            ranked = self.predictions(rows, left, "probability")
            mode = self.case["mode"]
            if mode == "threshold":
                limit = self.params["threshold"]
                count = max(1, sum(item[0] >= limit for item in ranked))
                self.write(number, rows, ranked, count, limit)
            elif mode == "fixed":
                steps = self.params["steps"] // num_blocks
                whole, rest = divmod(len(block), steps)
                self.write(number, rows, ranked, whole + (step < rest), None)
            else:
                self.write(number, rows, ranked, self.factor_count(ranked), None)
            step += 1

    def factor_count(self, ranked: list[Any]) -> int:
        for rank in range(1, len(ranked)):
            limit = 1 - self.params["factor"] / (rank + 2)
            if abs(ranked[rank][0] - limit) < MIN_GAP:
                raise TooClose
            if ranked[rank][0] < limit:
                return rank + 1 if rank == len(ranked) - 1 else rank
        return len(ranked)

    # -- Dream -------------------------------------------------------------------------------

    def times(self, steps: int) -> list[float]:
        ends = torch.linspace(1, self.params["eps"], steps + 1)
        return [float(1 - ends[i + 1] / ends[i]) for i in range(steps)]

    def timed(self, masks: int, steps: int, step: int) -> int:
        share = torch.tensor(self.times(steps)[step] if step < steps else 1.0)
        return masks if step >= steps - 1 else int(torch.tensor(float(masks)) * share)

    def dream_block(self, number: int, block: range) -> None:
        num_blocks = self.params["gen_length"] // self.params["block_length"]
        everything = range(len(self.x))
        (first,) = self.predictions(everything, [block.start], "probability")
        self.write_these(number, everything, [first])
        step = 1
        while left := self.masked(block):
            rows = self.rows_of(block, step)
            if self.params["alg"] == "confidence_threshold":
                ranked = self.predictions(rows, left, "probability")
                limit = self.params["threshold"]
                count = max(1, sum(item[0] >= limit for item in ranked))
                self.write(number, rows, ranked, count, limit)
            else:
                ranked = self.predictions(rows, left, self.params["alg"])
                count = self.timed(len(left), self.params["steps"] // num_blocks, step)
                self.write(number, rows, ranked, count, None)
            step += 1

    def whole_buffer(self) -> None:
        rows, steps, step, carried = range(len(self.x)), self.params["steps"], 0, 0
        base = self.params["gen_length"] // steps
        while left := self.masked(rows):
            if self.params["alg"] == "confidence_threshold":
                ranked = self.predictions(rows, left, "probability")[: base + carried]
                limit = self.params["threshold"]
                if any(abs(item[0] - limit) < MIN_GAP for item in ranked):
                    raise TooClose
                chosen = ranked[:1] + [item for item in ranked[1:] if item[0] >= limit]
                carried = len(ranked) - len(chosen)
                if step >= steps - 1:
                    base = 0
                self.write_these(0, rows, chosen)
            else:
                ranked = self.predictions(rows, left, self.params["alg"])
                self.write(0, rows, ranked, self.timed(len(left), steps, step), None)
            step += 1


def write_folder(
    folder: Path, name: str, config: Mapping[str, Any], block_lengths: Sequence[int], seed: int
) -> int:
    """A golden folder for one model; returns the number of cases in it."""
    random = Random(seed)
    state = random_state(config, seed)
    is_dream = config["model_type"] == "Dream"
    head = "lm_head.weight" if is_dream else "model.transformer.ff_out.weight"
    state[head][config["mask_token_id"]] = 0.0
    write_checkpoint(folder / "models" / name, config, state)
    model = Dense(config, state)
    cases = []
    for number in range(36):
        case = _random_case(f"{name}-{number}", name, config, block_lengths, random)
        loop = Loop(model, case)
        try:
            loop.run()
        except TooClose:
            continue
        cases.append(
            case | {"output_ids": loop.x, "nfe": len(loop.forwards), "forwards": loop.forwards}
        )
    (folder / f"{'dream' if is_dream else 'llada'}_cases.json").write_text(json.dumps(cases))
    return len(cases)


def _random_case(
    case_id: str, name: str, config: Mapping[str, Any], block_lengths: Sequence[int], random: Random
) -> dict[str, Any]:
    is_dream = config["model_type"] == "Dream"
    cache = random.choice(["none", "prefix", "dual"])
    block_length = random.choice(block_lengths)
    num_blocks = random.choice([1, 2, 3])
    steps = num_blocks * random.choice([2, 3, block_length])
    params: dict[str, Any] = {
        "gen_length": num_blocks * block_length,
        "block_length": block_length,
        "mask_id": config["mask_token_id"],
        "temperature": 0.0,
        "steps": steps,
        "threshold": None,
        "factor": None,
    }
    if is_dream:
        algorithms = ["entropy", "confidence_threshold"]
        algorithms += ["maskgit_plus", "topk_margin"] if cache == "none" else []
        alg = random.choice(algorithms)
        has_threshold = alg == "confidence_threshold"
        mode = "threshold" if has_threshold else "fixed"
        params |= {"alg": alg, "alg_temp": None, "top_p": None, "top_k": None, "eps": 1e-3}
        if cache == "none":
            # A budget needs a whole number of tokens a pass.
            params["block_length"] = None
            params["steps"] = num_blocks if has_threshold else steps
    else:
        mode = random.choice(["fixed", "threshold", "factor"])
        has_threshold = mode == "threshold"
        params["factor"] = random.choice([0.8, 1.0, 1.5]) if mode == "factor" else None
        params["steps"] = steps if mode == "fixed" else None
        params |= {"early_stop": False, "eos_id": None}
    params["threshold"] = random.choice([0.3, 0.6, 0.9]) if has_threshold else None
    prompt = [random.randrange(1, 90) for _ in range(random.choice([1, 6, 21, 50]))]
    return {
        "id": case_id,
        "family": "dream" if is_dream else "llada",
        "model": name,
        "cache": cache,
        "mode": mode,
        "params": params,
        "prompt_ids": [token for token in prompt if token != config["mask_token_id"]],
    }
