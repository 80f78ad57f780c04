"""What a worker's GPU thread does before the worker serves, with the toy engine."""

import threading

import pytest
from tests.worker.fakes import ToyEngine, ToyLaunched, ToyModel
from tests.worker.harness import a_worker

from sangam_core.errors import ConfigurationError
from sangam_worker.plan import Pass, Plan
from sangam_worker.warm_up import WarmUps

ON_GPU = {"device": "cuda:0", "kv_transport": "gloo"}


class Witness(ToyEngine):
    """Keeps which thread launched what."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.launches: list[tuple[str, tuple[Pass, ...]]] = []

    def launch(self, plan: Plan) -> ToyLaunched:
        self.launches.append((threading.current_thread().name, plan.passes))
        return super().launch(plan)


async def test_a_gpu_s_thread_has_run_every_kind_of_iteration_when_the_worker_serves() -> None:
    """What libraries make by thread is made before a request comes."""
    engine = Witness()
    async with a_worker(engine, **ON_GPU) as worker:
        kinds = WarmUps(ToyModel(), worker.settings.block_length, 64).of_every_kind()
        assert engine.launches == [("gpu", each.passes) for each in kinds]
        assert worker.loop.ailment() is None


async def test_a_cpu_s_thread_runs_nothing_before_a_request_comes() -> None:
    engine = Witness()
    async with a_worker(engine):
        assert engine.launches == []


async def test_a_model_that_does_not_work_on_the_gpu_s_thread_never_serves() -> None:
    engine = ToyEngine(poison={"prefill"})
    with pytest.raises(ConfigurationError, match="the model does not work: in a prefill"):
        async with a_worker(engine, **ON_GPU):
            pytest.fail("it serves")
