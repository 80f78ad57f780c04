"""A block lost at any step goes on elsewhere exactly as it would have (design section 5)."""

import pytest
from tests.worker.checkpoints import DREAM, LLADA, an_engine
from tests.worker.requests import a_start, random_cases
from tests.worker.restarts import Block, blocks_of, run_block, told

from sangam_core.decoding import Resume
from sangam_core.wire import KVSource
from sangam_worker.block_state import Stage, block_state_from
from sangam_worker.scheduler import Progress
from sangam_worker.verify.drive import Site

MODELS = {"llada": LLADA, "dream": DREAM}


@pytest.mark.parametrize("family", MODELS)
def test_a_block_lost_at_any_step_continues_with_the_same_bits(family: str) -> None:
    engine, elsewhere = (an_engine(MODELS[family], total_pages=16) for _ in range(2))
    num_restarts = 0
    for case in random_cases(engine.model_config.family, engine.model_config.mask_id, 16, seed=9):
        for block in blocks_of(engine, case)[-2:]:
            for step in range(0, len(block.passes), max(1, len(block.passes) // 4)):
                resumed = run_block(Site(elsewhere, 512), block, block.resume_at(step))
                assert told(resumed) == told(block.passes[step:])
                num_restarts += step > 0
    assert num_restarts > 25


def run_handed_over(prefill: Site, decode: Site, block: Block, resume: Resume) -> list[Progress]:
    """Repeat the prefill on one site, move its KV, and decode on the other."""
    config = prefill.engine.model_config
    start = a_start(block.case, block=block.number, ids=block.ids, resume=resume, hands_over=True)
    sent = block_state_from(start, config.mask_id, config.vocab_size)
    prefill.scheduler.submit(sent)
    ((_, progress),) = prefill.iterate()
    assert (progress.counts, progress.stage) == (False, Stage.HOLDING)
    moved = a_start(
        block.case,
        block=block.number,
        ids=sent.ids,
        source=KVSource(worker_id="w", epoch="e", url="http://w.invalid"),
        resume=Resume(step=sent.step, initial_masks=sent.initial_masks, carry=sent.carry),
    )
    received = block_state_from(moved, config.mask_id, config.vocab_size)
    assert decode.scheduler.reserve(received)
    for layer in range(config.num_layers):
        pages = prefill.engine.kv_pool.gather(layer, sent.pages)
        decode.engine.kv_pool.scatter(layer, received.pages, pages)
    prefill.scheduler.remove(sent.key)
    decode.scheduler.arrived(received.key)
    counted = []
    while not decode.scheduler.is_empty:
        counted += [progress for _, progress in decode.iterate()]
    return counted


@pytest.mark.parametrize("family", MODELS)
def test_a_restart_that_is_handed_over_continues_with_the_same_bits(family: str) -> None:
    engine, elsewhere = (an_engine(MODELS[family], total_pages=16) for _ in range(2))
    elsewhere_site = Site(elsewhere, 512)
    elsewhere_site.scheduler.pages.allocate(2)
    num_restarts = 0
    for case in random_cases(engine.model_config.family, engine.model_config.mask_id, 8, seed=21):
        if case.decoding.cache == "none":
            continue
        block = blocks_of(engine, case)[-1]
        for step in range(1, len(block.passes), max(1, len(block.passes) // 3)):
            resumed = run_handed_over(
                Site(engine, 512), elsewhere_site, block, block.resume_at(step)
            )
            assert told(resumed) == told(block.passes[step:])
            num_restarts += 1
    assert num_restarts > 5


@pytest.mark.parametrize("family", MODELS)
def test_a_restart_at_step_0_starts_afresh(family: str) -> None:
    engine = an_engine(MODELS[family], total_pages=16)
    case = random_cases(engine.model_config.family, engine.model_config.mask_id, 1, seed=3)[0]
    block = blocks_of(engine, case)[0]
    assert told(run_block(Site(engine, 512), block, block.resume_at(0))) == told(block.passes)
