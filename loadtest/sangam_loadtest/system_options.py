"""Options that say which deployment is simulated, shared by ``simulate`` and ``recommend``.

Decides names, help and defaults; what values mean together is checked by ``System`` and by the
cost model's table.
"""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from sangam_core.admission import ADMISSION_POLICIES, DEFICIT
from sangam_core.errors import ConfigurationError
from sangam_core.placement import Role
from sangam_core.placements import HYBRID, PLACEMENTS
from sangam_loadtest.costs.capacity import pool_pages
from sangam_loadtest.costs.model import CostModel, cost_model
from sangam_loadtest.records import read_records
from sangam_loadtest.simulator.commits import (
    DEFAULT_COMMITS,
    CommitCounts,
    GeometricCommits,
    RecordedCommits,
)
from sangam_loadtest.simulator.system import (
    DEFAULT_TAU_TOKENS,
    Split,
    System,
    max_batch_blocks,
    transferred_decode_share,
)

_COSTS, _POLICY, _ANSWERS = "Costs", "Scheduling and placement", "Answers"


def _option(panel: str, help_text: str, *names: str, minimum: float | None = None) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=panel, min=minimum)


@dataclass(frozen=True)
class CostOptions:
    """What passes cost, and how many tokens each commits."""

    gpu: Annotated[str, _option(_COSTS, "h100, h200, or another of the table.")] = "h100"
    model: Annotated[
        str, _option(_COSTS, "llada-8b, dream-7b, small, a model's folder or a hub id.")
    ] = "llada-8b"
    system: Annotated[
        str, _option(_COSTS, "Whose engine: sangam, paper, fast-dllm, or another of the table.")
    ] = "sangam"
    quantization: Annotated[str, _option(_COSTS, "Of the products: bf16 or fp8.")] = "bf16"
    link: Annotated[
        str | None, _option(_COSTS, "Between workers: nic, nvlink. (Default: the system's.)")
    ] = None
    constants: Annotated[
        Path | None,
        _option(_COSTS, "A table that `sangam loadtest fit` wrote. (Default: the shipped one.)"),
    ] = None
    pages: Annotated[
        int | None,
        _option(
            _COSTS,
            "KV pages of 16 tokens of a worker. (Default: what fits beside the model.)",
            minimum=1,
        ),
    ] = None
    commits_per_pass: Annotated[
        float | None,
        _option(_ANSWERS, "Mean tokens a pass. (Default: the model's, see the README.)", minimum=1),
    ] = None
    commits_from: Annotated[
        Path | None,
        _option(_ANSWERS, "Records of a real run, whose blocks' commits are drawn from."),
    ] = None

    def cost_model(self) -> CostModel:
        """The cost model of these options."""
        return cost_model(
            self.gpu, self.model, self.system, self.quantization, self.constants, link=self.link
        )

    def total_pages(self) -> int:
        """Of a worker."""
        if self.pages is not None:
            return self.pages
        return pool_pages(self.gpu, self.model, self.system, self.quantization, self.constants)

    def commits(self) -> CommitCounts:
        """How many tokens passes commit."""
        if self.commits_from is not None:
            if self.commits_per_pass is not None:
                raise ConfigurationError("--commits-per-pass and --commits-from exclude each other")
            return RecordedCommits.of(read_records(self.commits_from))
        mean = self.commits_per_pass or DEFAULT_COMMITS.get(self.model)
        if mean is None:
            raise ConfigurationError(
                f"how many tokens a pass of {self.model!r} commits is not known: say "
                "--commits-per-pass, or --commits-from a real run's records"
            )
        return GeometricCommits.calibrated(mean)


@dataclass(frozen=True)
class PolicyOptions:
    """Roles, budgets and thresholds."""

    tau: Annotated[
        int,
        _option(_POLICY, "Token budget of a colocated worker's iteration.", minimum=1),
    ] = DEFAULT_TAU_TOKENS[Role.COLOCATED]
    tau_prefill: Annotated[
        int, _option(_POLICY, "Token budget of a prefill worker's iteration.", minimum=1)
    ] = DEFAULT_TAU_TOKENS[Role.PREFILL]
    theta: Annotated[
        float,
        _option(_POLICY, "Load (tokens) of prefill workers from which on prefills overflow."),
    ] = 8192.0
    overflow: Annotated[
        bool, _option(_POLICY, "Prefills may overflow onto colocated workers (hybrid).")
    ] = True
    mask_buffer: Annotated[
        int | None,
        _option(
            _ANSWERS,
            "L of every request, tokens. (Default: each answer's length in whole blocks; with "
            "--system paper the trace's L of the paper.)",
            minimum=1,
        ),
    ] = None
    batch_one: Annotated[
        bool, _option(_POLICY, "One request at a time on each worker: the paper's baseline.")
    ] = False
    placement: Annotated[str, _option(_POLICY, f"Placement policy: {', '.join(PLACEMENTS)}.")] = (
        HYBRID
    )
    max_blocks: Annotated[
        float,
        _option(_POLICY, "New requests wait while the fleet holds so many blocks a decoder."),
    ] = math.inf
    admission: Annotated[
        str, _option(_POLICY, f"Admission policy: {', '.join(ADMISSION_POLICIES)}.")
    ] = DEFICIT

    def named(self, split: str) -> str:
        """The deployment in a report: the split, and what was asked for besides (tau has its own
        place there), so that runs which differ are not taken for repeats."""
        parts = [split]
        for item in fields(self):
            value, usual = getattr(self, item.name), item.default
            if item.name != "tau" and value != usual:
                told = f"{value:g}" if isinstance(value, float) else str(value)
                parts.append(f"{item.name.replace('_', ' ')} {told}")
        return ", ".join(parts)

    def system(self, split: Split, total_pages: int, *, system: str, buffer: int | None) -> System:
        """A deployment.

        Args:
            system: whose; the paper's has no rule of ours for transferred decodes, nor a largest
                batch.
            buffer: L where none was asked for.
        """
        return System(
            split,
            total_pages,
            tau_tokens={
                Role.PREFILL: self.tau_prefill,
                Role.COLOCATED: self.tau,
                Role.DECODE: self.tau,
            },
            theta_tokens=self.theta,
            is_overflow_allowed=self.overflow,
            transferred_decode_share=transferred_decode_share(system),
            mask_buffer_tokens=self.mask_buffer or buffer,
            is_batch_one=self.batch_one,
            placement=self.placement,
            max_blocks_per_decoder=self.max_blocks,
            admission=self.admission,
            max_batch_blocks=max_batch_blocks(system),
        )
