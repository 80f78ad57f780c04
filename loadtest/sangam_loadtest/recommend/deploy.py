"""How a candidate is deployed: values of the Helm chart, and the command that tries it locally.

Decides names and which settings need saying; a test holds them against the chart's schema and the
services' settings. Called by ``tell``.
"""

import math

from sangam_core.admission import DEFICIT
from sangam_core.placement import Role
from sangam_core.placements import HYBRID
from sangam_loadtest.recommend.candidates import Candidate, Mode
from sangam_loadtest.simulator.system import Split
from sangam_router.model_files import SHIPPED_MODEL

_HUB_IDS = {
    "llada-8b": "GSAI-ML/LLaDA-8B-Instruct",
    "dream-7b": "Dream-org/Dream-v0-Instruct-7B",
}


def helm_values(candidate: Candidate, model: str) -> dict[str, str]:
    """Values of charts/sangam by their dotted names. Where the chart's default is the same it is
    said all the same for counts and budgets: a recommendation should not change with a default.

    Args:
        model: as the cost model knows it; a folder or a hub id is taken as it is.
    """
    counts, policy = Split.parse(candidate.split).counts, candidate.policy
    roles = (Role.PREFILL, Role.COLOCATED, Role.DECODE)
    values = {role.value: str(counts.get(role, 0)) for role in roles}
    taus = {Role.PREFILL: policy.tau_prefill, Role.COLOCATED: policy.tau, Role.DECODE: policy.tau}
    values |= {f"tau.{role.value}": str(taus[role]) for role in roles if role in counts}
    if candidate.mode is Mode.DISAGGREGATED:
        values["overflow"] = "false"
    elif candidate.mode is Mode.HYBRID and policy.theta != math.inf:
        values["theta"] = _number(policy.theta)
    if policy.placement != HYBRID:
        values["router.settings.placement"] = policy.placement
    if policy.max_blocks != math.inf:
        values["router.settings.maxBlocksPerDecoder"] = _number(policy.max_blocks)
    if policy.mask_buffer is not None:
        values["router.settings.fixedMaskBufferTokens"] = str(policy.mask_buffer)
    if policy.admission != DEFICIT:
        values["workers.defaults.settings.admission"] = policy.admission
    if model != SHIPPED_MODEL:
        values["model.name"] = _HUB_IDS.get(model, model)
        values["model.servedName"] = model.rstrip("/").rpartition("/")[2].lower()
    return values


def helm_command(candidate: Candidate, model: str) -> str:
    """``helm install`` with these values; images are the operator's."""
    told = ",".join(f"{name}={value}" for name, value in helm_values(candidate, model).items())
    return f"helm install sangam charts/sangam --set {told}"


def local_command(candidate: Candidate) -> str:
    """``sangam up`` with the same roles and settings, on this machine with the small model."""
    counts, policy = Split.parse(candidate.split).counts, candidate.policy
    environment = []
    if policy.placement != HYBRID:
        environment.append(f"SANGAM_PLACEMENT={policy.placement}")
    if policy.max_blocks != math.inf:
        environment.append(f"SANGAM_MAX_BLOCKS_PER_DECODER={_number(policy.max_blocks)}")
    if policy.mask_buffer is not None:
        environment.append(f"SANGAM_FIXED_MASK_BUFFER_TOKENS={policy.mask_buffer}")
    if policy.admission != DEFICIT:
        environment.append(f"SANGAM_ADMISSION={policy.admission}")
    options = [f"--{role.value} {number}" for role, number in counts.items()]
    options.append(f"--tau {policy.tau}")
    if Role.PREFILL in counts:
        options.append(f"--prefill-tau {policy.tau_prefill}")
    if candidate.mode is Mode.DISAGGREGATED:
        options.append("--no-overflow")
    elif candidate.mode is Mode.HYBRID and policy.theta != math.inf:
        options.append(f"--theta {_number(policy.theta)}")
    return " ".join([*environment, "sangam up", *options])


def _number(value: float) -> str:
    return f"{value:.10g}"
