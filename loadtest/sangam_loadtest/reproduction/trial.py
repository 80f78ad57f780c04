"""One point of the evaluation: a deployment under a load, simulated, and its file.

Decides what a trial fixes (the paper's generator, sessions in ShareGPT, L, eight H100) and when a
trial's file still holds: its name carries a digest of the trial and of the code and constants that
its numbers come from. Called by ``studies`` (which trials) and ``runner`` (running them).
"""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import sangam_core
import sangam_loadtest
import sangam_worker
from sangam_core.admission import DEFICIT
from sangam_core.placement import Role
from sangam_core.placements import HYBRID
from sangam_loadtest.arrivals import ArrivalProcess, Arrivals
from sangam_loadtest.costs.capacity import pool_pages
from sangam_loadtest.costs.model import cost_model
from sangam_loadtest.load import Load, planned
from sangam_loadtest.records import RequestRecord
from sangam_loadtest.run_files import RunLabel
from sangam_loadtest.simulator.commits import DEFAULT_COMMITS, GeometricCommits
from sangam_loadtest.simulator.simulate import Simulation, simulate
from sangam_loadtest.simulator.system import PAPER, Split, System, transferred_decode_share
from sangam_loadtest.traces.source import TraceSpec
from sangam_loadtest.traces.synthetic import SYNTHETIC_TRACES, Sessions

GPU = "h100"
LINK = "nvlink"
"""The paper's eight GPUs: one machine."""
OURS = "sangam"
THETA_TOKENS = 8192
"""The paper's threshold is not known; the study ``thresholds`` says how much it matters."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A simulated run.

    Attributes:
        study: which part of the evaluation it belongs to.
        label: what figures call the deployment; the split where empty.
        rate: nominal requests a second of the paper's generator.
        commits_per_pass: instead of the model's own.
    """

    study: str
    model: str
    trace: str
    split: str
    rate: float
    system: str = PAPER
    label: str = ""
    tau_tokens: int = 1024
    tau_prefill_tokens: int = 8192
    theta_tokens: float = THETA_TOKENS
    placement: str = HYBRID
    admission: str = DEFICIT
    max_blocks_per_decoder: float = math.inf
    commits_per_pass: float | None = None
    quantization: str = "bf16"
    is_batch_one: bool = False
    num_requests: int = 1000
    seed: int = 0

    @property
    def load(self) -> Load:
        """Its requests and their times."""
        sessions = Sessions() if self.trace == "sharegpt" else None
        return Load(
            TraceSpec(self.trace, self.seed, sessions=sessions),
            Arrivals(ArrivalProcess.CLIPPED, self.rate, seed=self.seed),
            num_requests=self.num_requests,
        )

    @property
    def deployment(self) -> System:
        """Its workers and policies."""
        return System(
            Split.parse(self.split),
            pool_pages(GPU, self.model, self.system, self.quantization),
            tau_tokens={
                Role.PREFILL: self.tau_prefill_tokens,
                Role.COLOCATED: self.tau_tokens,
                Role.DECODE: self.tau_tokens,
            },
            theta_tokens=self.theta_tokens,
            transferred_decode_share=transferred_decode_share(self.system),
            mask_buffer_tokens=SYNTHETIC_TRACES[self.trace].mask_buffer_tokens,
            is_batch_one=self.is_batch_one,
            placement=self.placement,
            max_blocks_per_decoder=self.max_blocks_per_decoder,
            admission=self.admission,
        )

    @property
    def run_label(self) -> RunLabel:
        """What reports know it by."""
        return RunLabel.of(
            "simulated",
            self.load,
            configuration=self.label or self.split,
            model=self.model,
            system=self.system,
            tau_tokens=self.tau_tokens,
        )

    @property
    def digest(self) -> str:
        """Of everything that its numbers depend on."""
        told = json.dumps([asdict(replace(self, study="", label="")), _code_digest()])
        return hashlib.sha256(told.encode()).hexdigest()[:20]

    def path(self, folder: Path) -> Path:
        """Where its records are."""
        words = (self.model, self.trace, self.system, self.split, f"{self.rate:g}", self.digest)
        return folder / ("-".join(words) + ".jsonl")

    def run(self) -> Simulation:
        """Simulate it."""
        return simulate(
            planned(self.load),
            self.deployment,
            cost_model(GPU, self.model, self.system, self.quantization, link=LINK),
            GeometricCommits.calibrated(self.commits_per_pass or DEFAULT_COMMITS[self.model]),
            seed=self.seed,
        )


def without_placements(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Records without the longest thing in them, which no figure needs."""
    return [replace(record, placements=[]) for record in records]


@cache
def _code_digest() -> str:
    """Of the code and constants that a simulation runs."""
    found = hashlib.sha256()
    roots = [Path(package.__file__ or "").parent for package in (sangam_core, sangam_worker)]
    own = Path(sangam_loadtest.__file__).parent
    files = [path for root in roots for path in root.glob("*.py")]
    for part in ("simulator", "costs", "traces"):
        files += [*(own / part).glob("*.py"), *(own / part).glob("*.toml")]
    for path in sorted([*files, own / "arrivals.py", own / "load.py", Path(__file__)]):
        found.update(path.read_bytes())
    return found.hexdigest()
