"""What a local cluster takes from the environment, and what it decides itself."""

from pathlib import Path

from sangam_router.local.cluster import ClusterOptions, LocalCluster, Place
from sangam_router.local.processes import ProcessSpec, SupervisedProcess, Watchdog


async def is_well() -> bool:
    return True


def a_place(**env: str) -> Place:
    spec = ProcessSpec("p", ("true",), Path("p.log"), is_well, env)
    return Place(SupervisedProcess(spec, Watchdog(), lambda event: None), "http://127.0.0.1:1")


def test_variables_whose_values_are_replaced_are_told_once_each(tmp_path: Path) -> None:
    cluster = LocalCluster(ClusterOptions(log_dir=tmp_path))
    cluster.routers.append(a_place(SANGAM_MODEL="small", OMP_NUM_THREADS="1"))
    cluster.workers.append(a_place(SANGAM_MODEL="small", SANGAM_ROLE="prefill"))
    cluster.workers.append(a_place(SANGAM_MODEL="small", SANGAM_ROLE="decode"))
    environment = {
        "SANGAM_MODEL": "other",
        "SANGAM_ROLE": "prefill",
        "SANGAM_THETA_TOKENS": "5",
        "OMP_NUM_THREADS": "9",
    }
    assert cluster.overruled(environment) == ["SANGAM_MODEL", "SANGAM_ROLE"]
    assert cluster.overruled({"SANGAM_MODEL": "small"}) == []
