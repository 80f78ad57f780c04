"""A worker with an engine of any kind, in this process, asked over its API.

Apart from ``engine_checks``, as it needs what serves HTTP. Called by ``test_engine_checks`` and by
``tests/gpu``.
"""

from tests.worker.case_client import Place, run_case
from tests.worker.engine_checks import EngineKind, golden_cases
from tests.worker.harness import a_client, a_worker

from sangam_worker.verify import run_cases


async def check_a_worker_serves(kind: EngineKind, family: str) -> None:
    """A worker gives over its API what its engine gives without one.

    One request at a time: the same passes, so the same bits.
    """
    cases = golden_cases(family)[:4]
    engine = kind.engine(cases[0].model)
    driven = {ran.case.id: ran.output_ids for ran in run_cases(cases, engine)}
    served: dict[str, tuple[int, ...]] = {}
    async with a_worker(kind.engine(cases[0].model)) as worker, a_client() as client:  # type: ignore[arg-type]
        place = Place(client.http, worker.url)
        for case in cases:
            served[case.id] = await run_case(case, place)
        await client.becomes_idle(worker)
    assert served == driven
