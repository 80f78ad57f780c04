"""Runs blocks of a case, whole or from a step on, as a worker does after a loss elsewhere."""

from dataclasses import dataclass

from tests.worker.requests import a_start

from sangam_core.answer import Completion
from sangam_core.decoding import Commit, Resume
from sangam_worker.block_state import block_state_from
from sangam_worker.engine import Engine
from sangam_worker.scheduler import Progress
from sangam_worker.verify.cases import Case
from sangam_worker.verify.drive import Site


@dataclass
class Block:
    """What a client has been sent of a block."""

    case: Case
    number: int
    ids: list[int]
    passes: list[Progress]

    @property
    def initial_masks(self) -> int:
        positions = self.case.geometry.block_range(self.number)
        return sum(self.ids[position] == self.case.mask_id for position in positions)

    def resume_at(self, step: int) -> Resume:
        before = self.passes[:step]
        return Resume(
            step=step,
            initial_masks=self.initial_masks,
            commits=tuple(commit for item in before for commit in item.commits),
            carry=before[-1].carry if before else 0.0,
        )


def run_block(site: Site, block: Block, resume: Resume | None = None) -> list[Progress]:
    """Run a block to its end; the passes that count."""
    start = a_start(block.case, block=block.number, ids=block.ids, resume=resume)
    config = site.engine.model_config
    site.scheduler.submit(block_state_from(start, config.mask_id, config.vocab_size))
    counted = []
    done = Completion.NOTHING
    while done is Completion.NOTHING:
        ((_, progress),) = site.iterate()
        done = progress.completion
        if progress.counts:
            counted.append(progress)
        else:
            assert progress.commits == ()
    assert site.scheduler.is_empty
    return counted


def blocks_of(engine: Engine, case: Case) -> list[Block]:
    """Every block of a case, run without losing anything."""
    ids = [*case.prompt_ids, *[case.mask_id] * case.geometry.mask_buffer_tokens]
    blocks = []
    for number in range(case.geometry.num_blocks):
        block = Block(case, number, list(ids), [])
        block.passes = run_block(Site(engine, 512), block)
        for item in block.passes:
            overlay(ids, item.commits)
        blocks.append(block)
    return blocks


def overlay(ids: list[int], commits: tuple[Commit, ...]) -> None:
    for commit in commits:
        ids[commit.position] = commit.token


def told(passes: list[Progress]) -> list[tuple[object, ...]]:
    """All that a client is told of passes."""
    return [(item.step, item.commits, item.carry, item.completion) for item in passes]
