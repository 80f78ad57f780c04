"""How much is measured: on a GPU the issue's sizes, on a CPU what takes seconds.

Decides grids and sizes, no more. Read by the parts.
"""

from dataclasses import dataclass
from itertools import product

from benchmarks.iterations import BLOCK_LENGTH, Iteration
from sangam_core.geometry import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a run.

    Attributes:
        blocks, contexts: decode passes, each with each. eager_blocks: those launched eagerly too
            (all sizes at each context would need twice the pool).
        prefills: tokens. mixed: (prefill tokens, decode blocks, context).
        product_rows: of products alone. sampler_rows: of the sampler alone.
        step_context_tokens: of the batch 1 comparison. gap_blocks: of the CPU gap.
        transfer_tokens: of one KV transfer; max_ctas: that NCCL gets for it.
        fp8_prefills, fp8_blocks: passes with FP8 products, decodes at the first context.
        num_repeats: medians are of so many.
    """

    blocks: tuple[int, ...] = (8, 1, 32, 16, 64, 2, 4, 24, 48)
    contexts: tuple[int, ...] = (1024, 2048)
    eager_blocks: tuple[int, ...] = (8, 1, 32, 64, 16, 4, 2)
    prefills: tuple[int, ...] = (2048, 512, 1024, 4096, 8192)
    mixed: tuple[tuple[int, int, int], ...] = ((2048, 16, 2048), (1024, 8, 1024), (512, 32, 1024))
    product_rows: tuple[int, ...] = (32, 64, 128, 256, 512, 1024, 2048)
    sampler_rows: tuple[int, ...] = (32, 1024)
    step_context_tokens: int = 2048
    gap_blocks: int = 8
    gap_context_tokens: int = 1024
    transfer_tokens: int = 2048
    max_ctas: tuple[int, ...] = (4, 2, 8, 16)
    fp8_prefills: tuple[int, ...] = (2048, 1024, 512, 4096)
    fp8_blocks: tuple[int, ...] = (8, 32, 1, 16)
    copy_bytes: int = 4 * 2**30
    product_side: int = 8192
    num_repeats: int = 7

    @property
    def graph_iterations(self) -> list[Iteration]:
        """Decode passes by graph, the goals' first, then by context."""
        return [_decode(b, c) for c, b in product(self.contexts, self.blocks)]

    @property
    def eager_iterations(self) -> list[Iteration]:
        """Prefills, mixed passes, and decode passes without a graph, in order of importance."""
        prefills = [Iteration(tokens, 0, tokens, BLOCK_LENGTH) for tokens in self.prefills]
        mixed = [Iteration(*each, BLOCK_LENGTH) for each in self.mixed]
        decodes = [_decode(b, c) for c, b in product(self.contexts, self.eager_blocks)]
        return prefills + mixed + decodes

    @property
    def transfer_pages(self) -> int:
        """Those of a pass, of what a transfer reads and of what it writes."""
        return 3 * (self.transfer_tokens // PAGE_TOKENS)

    @property
    def fp8_iterations(self) -> list[Iteration]:
        """Passes that are measured with FP8 products too."""
        prefills = [Iteration(tokens, 0, tokens, BLOCK_LENGTH) for tokens in self.fp8_prefills]
        return prefills + [_decode(blocks, self.contexts[0]) for blocks in self.fp8_blocks]

    @property
    def attention_iterations(self) -> list[Iteration]:
        """Batches that each attention backend runs."""
        return [*self.graph_iterations, *self.eager_iterations[: len(self.prefills)]]

    @property
    def breakdown_iterations(self) -> list[Iteration]:
        """What the goals name."""
        decodes = [_decode(blocks, self.contexts[0]) for blocks in self.fp8_blocks[:3]]
        return [*decodes, self.eager_iterations[0]]


def _decode(blocks: int, context_tokens: int) -> Iteration:
    """Blocks with every position masked: the head on 32 rows each, as the profiles have it."""
    return Iteration(0, blocks, context_tokens, BLOCK_LENGTH)


H200 = Sizes()

TINY = Sizes(
    blocks=(2, 1),
    contexts=(64,),
    eager_blocks=(2,),
    prefills=(48,),
    mixed=((48, 2, 64),),
    product_rows=(16,),
    sampler_rows=(4,),
    step_context_tokens=96,
    gap_blocks=2,
    gap_context_tokens=64,
    transfer_tokens=64,
    max_ctas=(1,),
    fp8_prefills=(48,),
    fp8_blocks=(2,),
    copy_bytes=2**20,
    product_side=64,
    num_repeats=2,
)
"""For a CPU: everything runs, and no figure means anything."""
