"""CUDA graphs on a real GPU: what ``tests/worker/test_graphs.py`` checks by running code again.

Replays are held against the formula and against eager passes. Kernels that are not there yet are
compiled first, which takes minutes.
"""

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from tests.gpu.engines import model_at
from tests.gpu.marks import FLASHINFER_ON_A_GPU
from tests.gpu.shapes import KERNELS, SHAPES, skip_without
from tests.worker.attention_batches import a_pool
from tests.worker.engine_checks import MODELS
from tests.worker.fixed_batches import FixedRows, random_decodes
from tests.worker.requests import a_decoding, a_pass, a_plan
from torch import Tensor

from sangam_core.decoding import UnmaskingRule
from sangam_core.errors import ConfigurationError
from sangam_core.geometry import PAGE_TOKENS
from sangam_worker.attention.flashinfer_backend import flashinfer_attention
from sangam_worker.engine import Engine
from sangam_worker.engine_loading import load_engine
from sangam_worker.graphs.capture import CudaCapture
from sangam_worker.plan import Pass

pytestmark = FLASHINFER_ON_A_GPU

BFLOAT16 = torch.bfloat16
BLOCK = 32
TOTAL_PAGES = 200


# Attention alone


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_blocks", [1, 8])
def test_a_captured_attention_follows_every_new_plan(
    num_blocks: int, shape: str, kernel: str
) -> None:
    """The kernels of one capture, on other pages, other lengths, and fewer blocks."""
    skip_without(kernel)
    torch.manual_seed(0)
    num_heads, num_kv_heads, head_dim = SHAPES[shape]
    pool = a_pool(num_kv_heads, head_dim, total_pages=400, dtype=BFLOAT16, device="cuda")
    for layer in pool.layers_and_scratch:
        layer[pool.scratch_page].fill_(torch.nan)
    backend = flashinfer_attention(pool, num_heads, kernel)
    rows = FixedRows(backend, pool, num_heads, num_blocks, BLOCK)
    replay = CudaCapture(pool.device)(rows.run)
    random = Random(0)
    for number in (num_blocks, max(1, num_blocks - 3), 1, num_blocks):
        rows.check(random_decodes(random, pool, number, BLOCK, longest=700), replay)


@pytest.mark.parametrize("shape", SHAPES)
def test_so_do_all_tilings_of_our_own_kernel(shape: str) -> None:
    """Few enough blocks that keys are split by 1, 2 and more."""
    torch.manual_seed(0)
    (num_heads, num_kv_heads, head_dim), num_blocks = SHAPES[shape], 3
    pool = a_pool(num_kv_heads, head_dim, total_pages=400, dtype=BFLOAT16, device="cuda")
    for layer in pool.layers_and_scratch:
        layer[pool.scratch_page].fill_(torch.nan)
    backend, random = flashinfer_attention(pool, num_heads), Random(0)
    full = FixedRows(backend, pool, num_heads, num_blocks, BLOCK).batch.fixed
    ours = [each for each in backend.fixed_kernels(full) if each.startswith("blocks")]
    assert ours
    for name in ours:
        rows = FixedRows(backend, pool, num_heads, num_blocks, BLOCK, name)
        replay = CudaCapture(pool.device)(rows.run)
        for number in (num_blocks, 1):
            rows.check(random_decodes(random, pool, number, BLOCK, longest=700), replay)


def test_a_graph_s_kernels_are_measured_and_those_of_attention_all_answer_alike() -> None:
    with capture_logs() as logs:
        engine = an_engine(is_measured=True)
    assert not [each for each in logs if each["event"] == "attention kernel left out"]
    assert [*engine.graph_choices] == [1, 2, 4, 8]
    known = ("fa2", "fa3", "blocks")
    assert all(each["attention"].startswith(known) for each in engine.graph_choices.values())
    if find_spec("nvmath") is not None:
        assert all(len(each) >= 4 for each in engine.graph_choices.values()), "products as well"
    for layer in engine.kv_pool.layers:
        assert not layer.any(), "the trials left nothing"
    decodes = prefilled(engine, num_blocks=5)
    replayed, eager = engine.replay(a_plan(*decodes)), engine.forward(a_plan(*decodes))
    assert replayed is not None
    wanted = eager[: len(replayed)].float()
    assert (replayed.float() - wanted).norm() < 0.3 * wanted.norm(), "random weights amplify"


def test_what_was_captured_and_dropped_is_in_no_later_capture_s_way() -> None:
    """As a trial's graph is, the first of all, while somebody still has what it gave."""
    x, given = torch.ones(1000, device="cuda"), list[Tensor]()
    capture = CudaCapture(x.device)
    for factor in (2.0, 3.0):
        replay = capture(partial(_append_product, given, x, factor))
        replay()
        assert (given[-1] == factor).all()
        del replay
    assert (given[1] == 2.0).all(), "and is nobody else's"


def _append_product(given: list[Tensor], x: Tensor, factor: float) -> None:
    given.append(x * factor)


@pytest.mark.parametrize("shape", ["llada-8b", "dream-7b"])
def test_the_largest_bucket_fits_the_workspace_that_fa2_asks_for(shape: str) -> None:
    torch.manual_seed(0)
    num_heads, num_kv_heads, head_dim = SHAPES[shape]
    pool = a_pool(num_kv_heads, head_dim, total_pages=700, dtype=BFLOAT16, device="cuda")
    backend = flashinfer_attention(pool, num_heads, "fa2")
    capture, random = CudaCapture(pool.device), Random(0)
    for num_blocks in (64, 24):
        rows = FixedRows(backend, pool, num_heads, num_blocks, BLOCK)
        replay = capture(rows.run)
        for number in (num_blocks, num_blocks - 7):
            rows.check(random_decodes(random, pool, number, BLOCK, longest=170), replay)


# Whole engines


def an_engine(
    model: str = "random:llada-100m",
    *,
    buckets: Sequence[int] = (1, 2, 4, 8),
    block_tokens: int = BLOCK,
    attention: str = "flashinfer",
    is_measured: bool = False,
    **changes: Any,
) -> Engine:
    """``is_measured``: takes seconds, with the whole device for it."""
    engine = load_engine(
        model,
        dtype="bfloat16",
        device="cuda",
        total_pages=TOTAL_PAGES,
        attention=attention,
        operators="flashinfer",
        graph_buckets=buckets,
        graph_block_tokens=block_tokens,
        **changes,
    )
    engine.capture_graphs(is_measured=is_measured)
    return engine


def prefilled(
    *engines: Engine, num_blocks: int, block_tokens: int = BLOCK, longest: int = 300
) -> list[Pass]:
    """Prefills on all engines, and the decodes that follow them; half of each block is masked."""
    config = engines[0].model_config
    random, free = Random(0), list(range(TOTAL_PAGES))
    prefills, decodes = [], []
    for number in range(num_blocks):
        length = random.randint(2 * block_tokens, longest)
        start = random.randrange(1, length - block_tokens + 1)
        block = range(start, start + block_tokens)
        masked = sorted(random.sample(block, block_tokens // 2))
        ids = [random.randrange(200) for _ in range(length)]
        for position in masked:
            ids[position] = config.mask_id
        given: dict[str, Any] = {
            "name": str(number),
            "block": block,
            "masked": masked,
            "pages": tuple(free.pop() for _ in range(-(-length // PAGE_TOKENS))),
            "decoding": a_decoding(threshold=0.5),
        }
        prefills.append(a_pass(ids, step=0, **given))
        decodes.append(a_pass(ids, rows=block, **given))
    for engine in engines:
        engine.execute(a_plan(*prefills))
    return decodes


def error_of(logits: Tensor, exact: Tensor) -> float:
    """Root mean square."""
    return float((logits.float().cpu() - exact).square().mean().sqrt())


@pytest.mark.parametrize("attention", ["flashinfer-fa2", "flashinfer-fa3"])
@pytest.mark.parametrize("name", MODELS)
def test_replays_are_as_near_to_float32_as_eager_passes(
    name: str, attention: str, tmp_path: Path
) -> None:
    skip_without(attention)
    model = model_at(name, tmp_path)
    engine = an_engine(str(model), block_tokens=8, attention=attention)
    exact = load_engine(str(model), total_pages=TOTAL_PAGES)
    decodes = prefilled(engine, exact, num_blocks=7, block_tokens=8, longest=100)
    for passes in (decodes, decodes[:1], decodes[::-1], decodes[2:5], decodes):
        plan = a_plan(*passes)
        replayed = engine.replay(plan)
        assert replayed is not None
        wanted = exact.forward(plan)[: len(replayed)]
        eager = engine.forward(plan)[: len(replayed)]
        assert error_of(replayed, wanted) <= 1.5 * error_of(eager, wanted)


def test_the_same_tokens_give_the_same_bits_on_every_replay() -> None:
    engine = an_engine()
    decodes = prefilled(engine, num_blocks=6)
    first = engine.replay(a_plan(*decodes))
    assert first is not None
    for passes in (decodes[:2], decodes[3:]):
        engine.replay(a_plan(*passes))
    engine.forward(a_plan(*decodes[:3]))
    again = engine.replay(a_plan(*decodes))
    assert again is not None
    assert torch.equal(first, again)


def test_replayed_outcomes_are_those_of_the_replayed_logits() -> None:
    """The sampler picks rows among all of a bucket's, on the device and behind the copy."""
    engine = an_engine("random:dream-100m")
    decodes = prefilled(engine, num_blocks=5)
    decodings = [
        a_decoding(threshold=0.3),
        a_decoding(temperature=0.8, top_p=0.9, seed=6),
        a_decoding(UnmaskingRule.ENTROPY, steps=3),
        a_decoding(temperature=0.8, seed=5),
        a_decoding(UnmaskingRule.TOPK_MARGIN, steps=2),
    ]
    decodes = [
        item._replace(decoding=decoding) for item, decoding in zip(decodes, decodings, strict=True)
    ]
    for passes in (decodes, decodes[1:2], [decodes[0], decodes[2]]):
        logits = engine.replay(a_plan(*passes))
        outcome = engine.launch(a_plan(*passes)).outcome()
        assert logits is not None
        start = 0
        for item, decided in zip(passes, outcome.passes, strict=True):
            own = logits[start : start + len(item.masked)].float()
            start += len(item.masked)
            own[:, engine.model_config.mask_id] = -torch.inf
            assert decided.error is None
            assert decided.commits
            if item.decoding.temperature == 0:
                best = own.argmax(-1).tolist()
                for commit in decided.commits:
                    assert commit.token == best[item.masked.index(commit.position)]


@pytest.mark.parametrize("buckets", [(1, 2, 4, 8), ()])
def test_a_launch_waits_for_nothing_and_its_outcome_for_one_event(buckets: Sequence[int]) -> None:
    engine = an_engine(buckets=buckets)
    decodes = prefilled(engine, num_blocks=5)
    plans = [a_plan(*passes) for passes in (decodes, decodes, decodes[:2], decodes[:1])]
    for plan in plans:
        engine.execute(plan)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcomes = [engine.launch(plan).outcome() for plan in plans]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(item.commits for outcome in outcomes for item in outcome.passes)


def test_a_launch_returns_while_the_device_is_busy() -> None:
    engine = an_engine()
    decodes = prefilled(engine, num_blocks=5)
    engine.execute(a_plan(*decodes))
    busy = torch.randn(8192, 8192, device="cuda").to(BFLOAT16)
    torch.cuda.synchronize()
    for _ in range(40):  # some 60 ms on an H200
        busy = (busy @ busy).div_(90)
    behind = torch.cuda.Event()
    behind.record()
    launched = engine.launch(a_plan(*decodes[:4]))
    assert not behind.query(), "the launch waited"
    assert launched.outcome().passes
    assert behind.query()


@pytest.mark.parametrize("buckets", [(1, 2, 4, 8), ()])
def test_a_launch_that_fails_leaves_nothing_running(buckets: Sequence[int]) -> None:
    """Its pages are others' then, and transfers write to them on streams of their own."""
    engine = an_engine(buckets=buckets)
    decodes = prefilled(engine, num_blocks=2)
    engine.execute(a_plan(*decodes))
    busy = torch.randn(8192, 8192, device="cuda").to(BFLOAT16)
    torch.cuda.synchronize()
    for _ in range(40):
        busy = (busy @ busy).div_(90)
    behind = torch.cuda.Event()
    behind.record()
    # The sampler fails, behind the pass.
    decodes[1] = decodes[1]._replace(decoding=None)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        engine.launch(a_plan(*decodes))
    assert behind.query()


def test_the_device_s_own_time_is_known() -> None:
    engine = an_engine()
    decodes = prefilled(engine, num_blocks=5)
    engine.execute(a_plan(*decodes))
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    began.record()
    launched = engine.launch(a_plan(*decodes))
    launched.outcome()
    ended.record()
    ended.synchronize()
    assert launched.device_seconds is not None
    assert 0 < launched.device_seconds <= began.elapsed_time(ended) / 1000


def test_replays_allocate_nothing_that_stays() -> None:
    engine = an_engine()
    decodes = prefilled(engine, num_blocks=8)
    for count in (8, 3, 1):
        engine.execute(a_plan(*decodes[:count]))
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(10):
        for count in (8, 3, 1, 5):
            engine.execute(a_plan(*decodes[:count]))
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


def test_buckets_share_memory_and_what_they_take_is_reported() -> None:
    def taken(buckets: Sequence[int]) -> int:
        engine = load_engine(
            "random:llada-100m",
            dtype="bfloat16",
            device="cuda",
            total_pages=TOTAL_PAGES,
            attention="flashinfer",
            operators="flashinfer",
            graph_buckets=buckets,
        )
        # Whatever is loaded and compiled on first use does not count.
        engine.forward(a_plan(a_pass([1] * 40, pages=(1, 2, 3), masked=[3])))
        told: list[tuple[int, int]] = []
        bytes_taken = engine.capture_graphs(
            lambda done, total: told.append((done, total)), is_measured=False
        )
        assert told == [(number, len(buckets)) for number in range(len(buckets) + 1)]
        return bytes_taken

    one, all_of_them = taken((64,)), taken((64, 56, 48, 40, 32))
    logits_bytes = 64 * BLOCK * 8192 * 2
    assert one >= logits_bytes
    assert all_of_them - one < 4 * 40 * 2**20 + logits_bytes, "4 more plans, and little else"


def test_pages_beside_a_replay_stay_as_they_are() -> None:
    engine = an_engine()
    decodes = prefilled(engine, num_blocks=3)
    named = sorted({page for item in decodes for page in item.pages})
    others = torch.tensor(sorted(set(range(TOTAL_PAGES)) - set(named)), device="cuda")
    for layer in engine.kv_pool.layers:
        layer[others] = torch.nan
    engine.execute(a_plan(*decodes))
    engine.execute(a_plan(*decodes[:1]))
    for layer in engine.kv_pool.layers:
        assert layer[others].isnan().all()
        assert layer[torch.tensor(named, device="cuda")].isfinite().all()


def test_torch_s_attention_refuses_to_be_captured() -> None:
    engine = load_engine(
        "random:llada-100m", device="cuda", total_pages=4, graph_buckets=(1,), attention="torch"
    )
    with pytest.raises(ConfigurationError, match="no CUDA graph can hold it"):
        engine.capture_graphs()
