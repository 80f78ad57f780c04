"""Decode-only iterations from graphs give the same tokens as without, on a CPU by running again."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tests.worker.checkpoints import (
    DREAM,
    GOLDEN,
    LLADA,
    dream_config,
    llada_config,
    write_checkpoint,
)
from tests.worker.cublaslt_fake import FakeCublasLt
from tests.worker.flashinfer_fake import FakeFlashInfer
from tests.worker.flashinfer_formulas import attend_blocks, rotate_and_keep
from tests.worker.graph_fake import EagerCapture, RecordedCapture, launch
from tests.worker.requests import a_decoding, a_pass, a_plan

from sangam_core.decoding import UnmaskingRule
from sangam_core.errors import ConfigurationError, EngineError
from sangam_core.geometry import PAGE_TOKENS
from sangam_worker.attention.flashinfer_backend import FlashInferAttention
from sangam_worker.engine import Engine
from sangam_worker.engine_loading import AttentionFactory, load_engine
from sangam_worker.graphs.capture import Replay
from sangam_worker.models.cublaslt import CublasLt
from sangam_worker.models.flashinfer_operators import FlashInferOperators
from sangam_worker.models.measured_products import MeasuredProducts
from sangam_worker.plan import Pass
from sangam_worker.verify import Case, first_difference, read_cases, run_cases

BLOCK = 8
TOTAL_PAGES = 40


def flashinfer(fake: FakeFlashInfer, *, has_rivals: bool = False) -> AttentionFactory:
    rivals: dict[str, Any] = {}
    if has_rivals:
        rivals = {"rivals": ("fa2", "fa3"), "attend_blocks": partial(launch, attend_blocks)}
    return lambda pool, heads: FlashInferAttention(pool, heads, fake, lambda _: "fa2", **rivals)


def a_graph_engine(
    model: Path,
    capture: EagerCapture | None,
    *,
    block_tokens: int = BLOCK,
    buckets: Sequence[int] = (1, 2, 4, 8),
    total_pages: int = TOTAL_PAGES,
    fake: FakeFlashInfer | None = None,
    quantization: str = "none",
    is_kept_fused: bool = False,
    has_rivals: bool = False,
    cublaslt: FakeCublasLt | None = None,
) -> Engine:
    """With ``capture`` its graphs are captured; with ``fake`` it computes in bfloat16."""

    def operators(*args: Any) -> FlashInferOperators:
        assert fake is not None
        keep = partial(launch, rotate_and_keep) if is_kept_fused else None
        library = None if cublaslt is None else CublasLt(cublaslt, torch.device("cpu"))
        products = None if library is None else MeasuredProducts(library)
        return FlashInferOperators(*args, fake, rotate_and_keep=keep, products=products)

    engine = load_engine(
        str(model),
        dtype="float32" if fake is None else "bfloat16",
        total_pages=total_pages,
        attention="torch" if fake is None else flashinfer(fake, has_rivals=has_rivals),
        operators="torch" if fake is None else operators,
        quantization=quantization,
        graph_buckets=buckets,
        graph_block_tokens=block_tokens,
    )
    if capture is not None:
        engine.capture_graphs(capture=capture)
    return engine


def prefilled(*engines: Engine, num_blocks: int, seed: int = 0) -> list[Pass]:
    """Prefills of ``num_blocks`` sequences on all engines, and the decodes that follow them."""
    random = Random(seed)
    prefills, decodes, free = [], [], list(range(TOTAL_PAGES))
    random.shuffle(free)
    for number in range(num_blocks):
        length = random.randint(20, 60)
        start = random.randrange(1, length - BLOCK + 1)
        block = range(start, start + BLOCK)
        ids = [random.randrange(280) for _ in range(length)]
        masked = sorted(random.sample(block, random.randint(1, BLOCK)))
        for position in masked:
            ids[position] = 280
        given: dict[str, Any] = {
            "name": str(number),
            "block": block,
            "masked": masked,
            "pages": tuple(free.pop() for _ in range(-(-length // PAGE_TOKENS))),
            "decoding": a_decoding(threshold=0.2),
        }
        prefills.append(a_pass(ids, step=0, **given))
        decodes.append(a_pass(ids, rows=block, **given))
    for engine in engines:
        engine.execute(a_plan(*prefills))
    return decodes


def committed(engine: Engine, passes: Sequence[Pass]) -> list[Any]:
    outcome = engine.launch(a_plan(*passes)).outcome()
    assert all(item.error is None for item in outcome.passes)
    return [[(c.position, c.token) for c in item.commits] for item in outcome.passes]


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("model", [LLADA, DREAM], ids=["llada", "dream"])
def test_a_captured_pass_gives_what_an_eager_one_does(model: Path, num_blocks: int) -> None:
    capture = EagerCapture()
    eager, graphs = a_graph_engine(model, None), a_graph_engine(model, capture)
    decodes = prefilled(eager, graphs, num_blocks=num_blocks)
    assert capture.num_replayed == 0, "prefills are not a graph's"
    for passes in (decodes, decodes[:1], decodes[::-1], decodes):
        wanted, got = (engine.execute(a_plan(*passes)) for engine in (eager, graphs))
        for one, other in zip(got.passes, wanted.passes, strict=True):
            assert [(c.position, c.token) for c in one.commits] == [
                (c.position, c.token) for c in other.commits
            ]
            assert [c.confidence for c in one.commits] == pytest.approx(
                [c.confidence for c in other.commits], rel=1e-4
            )
        for ours, theirs in zip(graphs.kv_pool.layers, eager.kv_pool.layers, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5), "K and V too"
    assert capture.num_replayed == 4


FUSED: dict[str, Any] = {
    "llada-64": llada_config(d_model=128, n_heads=2, n_kv_heads=2, mlp_hidden_size=192),
    "dream-64": dream_config(
        hidden_size=192, num_attention_heads=3, num_key_value_heads=1, intermediate_size=128
    ),
    "dream-tiny": DREAM,
}


def fused_at(name: str, folder: Path) -> Path:
    model = FUSED[name]
    return model if isinstance(model, Path) else write_checkpoint(folder / name, model)


@pytest.mark.parametrize("quantization", ["none", "fp8"])
@pytest.mark.parametrize("name", FUSED)
def test_the_same_with_flashinfer_in_bfloat16_and_no_code_of_ours_behind_the_capture(
    name: str, quantization: str, tmp_path: Path
) -> None:
    model, capture = fused_at(name, tmp_path), RecordedCapture()
    options: dict[str, Any] = {"fake": FakeFlashInfer(), "quantization": quantization}
    eager, graphs = (
        a_graph_engine(model, None, **options),
        a_graph_engine(model, capture, **options),
    )
    decodes = prefilled(eager, graphs, num_blocks=5)
    for passes in (decodes, decodes[:2], decodes[3:], decodes[:1], decodes):
        assert committed(graphs, passes) == committed(eager, passes)
        for ours, theirs in zip(graphs.kv_pool.layers, eager.kv_pool.layers, strict=True):
            assert torch.equal(ours, theirs)
    assert capture.num_replayed == 5


@pytest.mark.parametrize("quantization", ["none", "fp8"])
@pytest.mark.parametrize("name", FUSED)
def test_rotating_and_keeping_in_one_kernel_changes_nothing(
    name: str, quantization: str, tmp_path: Path
) -> None:
    model, fakes = fused_at(name, tmp_path), [FakeFlashInfer(), FakeFlashInfer()]
    plain, fused = (
        a_graph_engine(
            model,
            RecordedCapture(),
            fake=fake,
            quantization=quantization,
            is_kept_fused=is_kept_fused,
        )
        for fake, is_kept_fused in zip(fakes, (False, True), strict=True)
    )
    decodes = prefilled(plain, fused, num_blocks=3)
    alone = a_pass([1] * 20, name="alone", masked=[3])  # on no pages, beside one that has some
    mixed = [decodes[0], a_pass([1] * 20, name="new", pages=(38, 39), masked=[3]), alone]
    for passes in (decodes, decodes[:1], mixed, mixed[:2], mixed[2:], decodes):
        assert committed(fused, passes) == committed(plain, passes)
        for ours, theirs in zip(fused.kv_pool.layers, plain.kv_pool.layers, strict=True):
            assert torch.equal(ours, theirs)
    layers = fused.kv_pool.num_layers
    appends = [fake.called("append_paged_kv_cache") for fake in fakes]
    if name.endswith("64"):
        # Of 11 passes (8 for the captures) the last layer's, and all of the one that keeps some of
        # its rows only.
        assert appends == [11 * layers, 10 + layers]
    else:
        assert appends == [0, 0], "narrow heads"


@pytest.mark.parametrize("name", FUSED)
def test_the_fastest_kernel_of_each_size_attends_and_gives_the_same_tokens(
    name: str, tmp_path: Path
) -> None:
    model, fakes = fused_at(name, tmp_path), [FakeFlashInfer(), FakeFlashInfer()]
    eager = a_graph_engine(model, None, fake=fakes[0])
    # Of 8, 4, 2, 1 blocks: FA2 once for nothing, FA2, FA3, two tilings. None is split: a CPU has no
    # multiprocessors.
    times = [0, 1, 2, 0.5, 3, 0, 3, 2, 1, 0.9, 0, 2, 1, 3, 3, 0, 1, 2, 3, 4]
    capture = RecordedCapture(times=[*map(float, times)])
    graphs = a_graph_engine(model, None, fake=fakes[1], has_rivals=True)
    graphs.capture_graphs(capture=capture)
    assert capture.times == []
    assert graphs.graph_choices == {
        8: {"attention": "blocks 32x64/1 (0.50)"},
        4: {"attention": "blocks 64x64/1 (0.30)"},
        2: {"attention": "fa3 (0.50)"},
        1: {"attention": "fa2"},
    }
    decodes = prefilled(eager, graphs, num_blocks=5)
    for passes in (decodes, decodes[:3], decodes[:2], decodes[:1], decodes):
        assert committed(graphs, passes) == committed(eager, passes)
        for ours, theirs in zip(graphs.kv_pool.layers, eager.kv_pool.layers, strict=True):
            assert torch.equal(ours, theirs)
    assert capture.num_replayed == 20 + 5


def test_nothing_is_measured_where_that_is_not_wanted() -> None:
    cublaslt = FakeCublasLt(2, launch)
    engine = a_graph_engine(
        DREAM, None, fake=FakeFlashInfer(), has_rivals=True, cublaslt=cublaslt, buckets=(2, 1)
    )
    capture = EagerCapture(times=[1.0])
    engine.capture_graphs(capture=capture, is_measured=False)
    assert capture.times == [1.0]
    assert cublaslt.ran == []
    assert engine.graph_choices == {1: {}, 2: {}}


@pytest.mark.parametrize("name", FUSED)
def test_products_by_the_fastest_algorithm_give_the_same_logits(name: str, tmp_path: Path) -> None:
    model, cublaslt = fused_at(name, tmp_path), FakeCublasLt(2, launch)
    eager = a_graph_engine(model, None, fake=FakeFlashInfer())
    engine = a_graph_engine(model, None, fake=FakeFlashInfer(), buckets=(4, 1), cublaslt=cublaslt)

    class Timed(RecordedCapture):
        """Of 4 blocks (32 rows) the second algorithm is the fastest, of one (16 rows) torch's."""

        def seconds(self, replay: Replay) -> float:
            replay()
            algorithms = {number for number, _ in cublaslt.ran}
            rows = {num_rows for _, num_rows in cublaslt.ran}
            cublaslt.ran.clear()
            if not algorithms:
                return 2.0
            return 1.0 if (algorithms, rows) == ({1}, {32}) else 3.0

    engine.capture_graphs(capture=Timed())
    for number, algorithm in ((4, "1 (0.50)"), (1, "torch")):
        attention, *products = engine.graph_choices[number].items()
        assert attention == ("attention", "fa2")
        assert {chosen for _, chosen in products} == {algorithm}

    decodes = prefilled(eager, engine, num_blocks=4)
    cublaslt.ran.clear()
    for passes in (decodes, decodes[:3], decodes[:1]):
        got, wanted = engine.replay(a_plan(*passes)), eager.forward(a_plan(*passes))
        assert got is not None
        torch.testing.assert_close(got, wanted[: len(got)], rtol=0.05, atol=0.05)
    assert cublaslt.ran == [], "graphs hold what was issued"
    engine.forward(a_plan(*decodes))
    assert cublaslt.ran == [], "eagerly as many rows are torch's: that takes the host less"


def test_engines_agree_on_logits_of_every_committable_row() -> None:
    eager, graphs = (a_graph_engine(LLADA, each) for each in (None, EagerCapture()))
    decodes = prefilled(eager, graphs, num_blocks=3)
    wanted, got = eager.forward(a_plan(*decodes)), graphs.replay(a_plan(*decodes))
    assert got is not None
    assert len(got) == sum(len(item.masked) for item in decodes)
    assert torch.allclose(got, wanted[: len(got)], rtol=1e-4, atol=1e-5)
    assert eager.replay(a_plan(*decodes)) is None, "nothing is captured there"


def test_rows_that_are_drawn_are_drawn_alike() -> None:
    eager, graphs = (a_graph_engine(DREAM, each) for each in (None, EagerCapture()))
    decodes = prefilled(eager, graphs, num_blocks=5)
    decodings = [
        a_decoding(temperature=0.8, seed=5),
        a_decoding(UnmaskingRule.ENTROPY, steps=3),
        a_decoding(temperature=0.8, top_p=0.9, seed=6),
        a_decoding(),
        a_decoding(UnmaskingRule.TOPK_MARGIN, steps=2, temperature=0.4, seed=7),
    ]
    decodes = [
        item._replace(decoding=decoding) for item, decoding in zip(decodes, decodings, strict=True)
    ]
    assert committed(graphs, decodes) == committed(eager, decodes)


def planned_by(fake: FakeFlashInfer) -> int:
    return fake.called("BatchPrefillWithPagedKVCacheWrapper.plan")


def test_the_same_blocks_are_planned_once_and_others_again() -> None:
    fake = FakeFlashInfer()
    engine = a_graph_engine(DREAM, EagerCapture(), fake=fake)
    decodes = prefilled(engine, num_blocks=4)
    before = planned_by(fake)
    for _ in range(3):
        committed(engine, decodes)
    assert planned_by(fake) == before + 1
    committed(engine, decodes[:3])  # the same bucket
    assert planned_by(fake) == before + 2
    committed(engine, decodes[:1])  # another bucket
    committed(engine, decodes[:3])
    assert planned_by(fake) == before + 3, "every bucket has a plan of its own"


def test_new_tokens_are_seen_though_nothing_is_planned() -> None:
    eager, graphs = (a_graph_engine(LLADA, each) for each in (None, EagerCapture()))
    decodes = prefilled(eager, graphs, num_blocks=3)
    answers, masked = [], [list(item.tokens) for item in decodes]
    for token in (5, 77):
        decodes = [
            item._replace(tokens=[token if each == 280 else each for each in tokens])
            for item, tokens in zip(decodes, masked, strict=True)
        ]
        answers.append(committed(graphs, decodes))
        assert answers[-1] == committed(eager, decodes)
    assert answers[0] != answers[1]


def test_a_plan_that_failed_is_made_again() -> None:
    fake = FakeFlashInfer()
    engine = a_graph_engine(DREAM, EagerCapture(), fake=fake)
    decodes = prefilled(engine, num_blocks=2)
    wanted = committed(engine, decodes)
    broken = [decodes[0], a_pass([1] * 32, name="b", rows=range(16, 24), pages=(1, 2), sees=0)]
    with pytest.raises(AssertionError, match="queries without keys"):
        engine.execute(a_plan(*broken))
    assert committed(engine, decodes) == wanted


def test_what_no_bucket_holds_runs_eagerly() -> None:
    capture = EagerCapture()
    eager = a_graph_engine(LLADA, None)
    graphs = a_graph_engine(LLADA, capture, buckets=(2, 4))
    decodes = prefilled(eager, graphs, num_blocks=6)
    assert committed(graphs, decodes) == committed(eager, decodes)
    assert capture.num_replayed == 0
    mixed = [*decodes[:2], a_pass([1] * 20, name="new", pages=(38, 39), masked=[3])]
    assert committed(graphs, mixed) == committed(eager, mixed)
    assert capture.num_replayed == 0
    assert committed(graphs, decodes[:3]) == committed(eager, decodes[:3])
    assert capture.num_replayed == 1


def test_the_largest_bucket_is_captured_first_and_progress_is_told() -> None:
    told, sizes = [], []

    class Watching(EagerCapture):
        def __call__(self, run: Any) -> Any:
            sizes.append(run.__closure__)
            return super().__call__(run)

    engine = a_graph_engine(LLADA, None, buckets=(4, 1, 2))
    capture = Watching()
    taken = engine.capture_graphs(lambda done, total: told.append((done, total)), capture)
    assert taken == capture.taken_bytes
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]
    decodes = prefilled(engine, num_blocks=4)
    for count in (4, 2, 1):
        committed(engine, decodes[:count])
    assert capture.order == [0, 1, 2]


def test_an_engine_runs_eagerly_until_its_graphs_are_captured() -> None:
    eager, late = a_graph_engine(LLADA, None, buckets=()), a_graph_engine(LLADA, None)
    decodes = prefilled(eager, late, num_blocks=3)
    assert committed(late, decodes) == committed(eager, decodes)
    assert eager.capture_graphs() == 0, "nothing is wanted"


def test_capturing_leaves_every_page_as_it_was() -> None:
    engine = a_graph_engine(LLADA, None)
    for layer in engine.kv_pool.layers:
        layer.copy_(torch.randn(layer.shape))
    before = [layer.clone() for layer in engine.kv_pool.layers]
    engine.capture_graphs(capture=EagerCapture())
    assert all(torch.equal(*both) for both in zip(engine.kv_pool.layers, before, strict=True))


@pytest.mark.parametrize("buckets", [(), (1,)])
def test_positions_are_reserved_up_to_the_longest_sequence_with_graphs_or_without(
    buckets: tuple[int, ...],
) -> None:
    """No request waits for a table, and graphs keep the one that they were captured with."""
    reserved: list[int] = []

    def operators(*args: Any) -> Any:
        made = FlashInferOperators(*args, FakeFlashInfer())
        reserve = made.reserve
        made.reserve = lambda number: (reserved.append(number), reserve(number))  # type: ignore[method-assign]
        return made

    engine = load_engine(
        str(DREAM),
        dtype="bfloat16",
        total_pages=TOTAL_PAGES,
        attention=flashinfer(FakeFlashInfer()),
        operators=operators,
        graph_buckets=buckets,
    )
    assert reserved == [engine.model_config.max_sequence_tokens]
    engine.capture_graphs(capture=EagerCapture())
    assert len(reserved) == 1


def test_graphs_are_refused_where_there_are_none() -> None:
    with pytest.raises(ConfigurationError, match="CUDA graphs need a CUDA device"):
        a_graph_engine(LLADA, None).capture_graphs()


def test_an_outcome_is_had_once_and_a_cpu_has_no_device_time() -> None:
    engine = a_graph_engine(LLADA, EagerCapture())
    launched = engine.launch(a_plan(*prefilled(engine, num_blocks=2)))
    assert launched.outcome().iteration == 1
    assert launched.device_seconds is None
    with pytest.raises(EngineError, match="has had its outcome"):
        launched.outcome()


# Golden cases

CASES = read_cases(GOLDEN)


def golden_differences(cases: Sequence[Case], block_tokens: int) -> tuple[dict[str, str], int]:
    most_pages = max(case.geometry.num_pages for case in cases)
    capture = EagerCapture()
    engine = a_graph_engine(
        cases[0].model, capture, block_tokens=block_tokens, total_pages=6 * most_pages
    )
    found = {}
    for ran in run_cases(list(cases), engine, in_flight=6):
        difference = first_difference(ran.case, ran.output_ids, ran.forwards)
        if difference is not None:
            found[ran.case.id] = difference
    return found, capture.num_replayed


@pytest.mark.parametrize("block_tokens", [8, 32])
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_golden_cases_are_exact_from_graphs(family: str, block_tokens: int) -> None:
    cases = [
        case
        for case in CASES
        if (case.family, case.decoding.cache) == (family, "dual")
        and case.geometry.block_length == block_tokens
    ]
    differences, num_replayed = golden_differences(cases, block_tokens)
    assert differences == {}
    assert num_replayed > 20
