"""KV transfers on real GPUs: what ``tests/worker/test_nccl.py`` checks on a fake.

One GPU copies to itself, by a communicator of one rank; two do all that gloo is held to.
"""

import importlib.util
import time
from random import Random

import pytest
import torch
from tests.worker.fakes import NEVER, ToyPool
from tests.worker.transport_checks import ProcessChecks, TransportChecks, a_pool

from benchmarks.gpu.nccl_loop import NcclLoop
from sangam_core.errors import TransferError
from sangam_worker.kv_pool import KVPool
from sangam_worker.transfer.choice import nccl_transport
from sangam_worker.transfer.cuda_streams import CudaStreams
from sangam_worker.transfer.gloo import GlooTransport
from sangam_worker.transfer.memory import (
    COMMUNICATOR_BYTES,
    NUM_SLOTS,
    SLOT_BYTES,
    TRANSFERS_EACH_WAY,
)
from sangam_worker.transfer.nccl import NcclTransport
from sangam_worker.transfer.nccl_library import load_nccl
from sangam_worker.transfer.protocol import Side

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("nccl") is None, reason="needs the extra gpu"),
    pytest.mark.filterwarnings("default"),  # of NVIDIA's, not ours
]
two_gpus = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two CUDA devices"
)
CUDA = torch.device("cuda:0")


def a_real_pool(num_kv_heads: int, num_layers: int = 4, total_pages: int = 320) -> KVPool:
    """Of the models' page shapes, with something on every page."""
    pool = KVPool(
        num_layers=num_layers,
        total_pages=total_pages,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        dtype=torch.bfloat16,
        device=CUDA,
    )
    torch.manual_seed(0)
    for layer in pool.layers_and_scratch:
        layer.copy_(torch.randn(layer.shape, device=CUDA))
    return pool


def a_loop(pool: KVPool, slot_bytes: int = SLOT_BYTES) -> NcclLoop:
    return NcclLoop(pool, load_nccl(CUDA), CudaStreams(CUDA), max_ctas=4, slot_bytes=slot_bytes)


@pytest.mark.parametrize("slot_bytes", [SLOT_BYTES, 7 * 262_144])
@pytest.mark.parametrize("num_kv_heads", [32, 4])
def test_pages_of_every_layer_go_where_they_are_to_and_nowhere_else(
    num_kv_heads: int, slot_bytes: int
) -> None:
    pool = a_real_pool(num_kv_heads)
    with a_loop(pool, slot_bytes) as loop:
        for seed in range(3):
            pages = Random(seed).sample(range(pool.total_pages), 2 * 150)
            sources, targets = pages[:150], pages[150:]
            wanted = [layer.clone() for layer in pool.layers_and_scratch]
            for layer in wanted:
                layer[targets] = layer[sources]
            torch.cuda.synchronize()
            assert loop.copy(sources, targets, 20.0) == pool.bytes_per_page * 150
            for layer, expected in zip(pool.layers_and_scratch, wanted, strict=True):
                assert torch.equal(layer, expected)


def test_a_transfer_goes_on_beside_passes_and_waits_for_none_of_them() -> None:
    pool = a_real_pool(32)
    busy = torch.randn(8192, 8192, device=CUDA, dtype=torch.bfloat16)
    with a_loop(pool) as loop:
        loop.copy(range(100), range(100, 200), 20.0)
        torch.cuda.synchronize()
        for _ in range(400):  # a second's work or so
            torch.mm(busy, busy)
        ended = torch.cuda.Event()
        ended.record()
        loop.copy(range(100), range(200, 300), 20.0)
        assert not ended.query()
        torch.cuda.synchronize()
    for layer in pool.layers:
        assert torch.equal(layer[200:300], layer[:100])


def test_all_transfers_that_may_be_under_way_have_streams_of_their_own() -> None:
    streams = CudaStreams(CUDA)
    num_streams = len(Side) * TRANSFERS_EACH_WAY * len(("copies", "wire"))
    assert len({streams.new().handle for _ in range(num_streams)}) == num_streams


def test_a_peer_that_never_comes_costs_the_deadline_and_the_gpu_nothing() -> None:
    transport = nccl_transport(a_real_pool(4), max_ctas=4, pairs_each_way=8)
    staging_bytes = transport.staging_bytes
    for _ in range(3):
        began = time.monotonic()
        with pytest.raises(TransferError, match="did not connect"):
            transport.connect(Side.RECEIVER, "lonely", transport.offer(), 0.3, NEVER)
        assert time.monotonic() - began < 5
    assert transport.staging_bytes == staging_bytes
    torch.zeros(1, device=CUDA).item()


class TestGlooOfAGpu(TransportChecks):
    devices = ("cuda:0", "cuda:0")

    def a_transport(self, pool: ToyPool) -> GlooTransport:
        return GlooTransport(pool, "127.0.0.1")


@two_gpus
@pytest.mark.timeout(300)
class TestNccl(TransportChecks):
    devices = ("cuda:0", "cuda:1")
    connect_seconds = 30.0

    def a_transport(self, pool: ToyPool) -> NcclTransport:
        return nccl_transport(pool, max_ctas=4, pairs_each_way=8)

    def test_a_pair_takes_no_more_memory_than_is_provided_for(self) -> None:
        pool = a_real_pool(32, num_layers=8)
        here = nccl_transport(pool, max_ctas=4, pairs_each_way=8)
        there = self.a_transport(a_pool(device="cuda:1"))
        self.pair(*self.transports())  # libraries are loaded
        before, _ = torch.cuda.mem_get_info(CUDA)
        self.pair(here, there)
        after, _ = torch.cuda.mem_get_info(CUDA)
        assert here.staging_bytes <= NUM_SLOTS * SLOT_BYTES + 8 * pool.total_pages
        assert before - after <= NUM_SLOTS * SLOT_BYTES + COMMUNICATOR_BYTES


@two_gpus
@pytest.mark.integration
@pytest.mark.timeout(300)
class TestNcclBetweenProcesses(ProcessChecks):
    """Nothing tells of a dead peer where no network card is between: the deadline does."""

    kind = "nccl"
    device = "cuda:0"
    deadline_seconds = 3.0
    notice_seconds = 10.0

    def a_transport(self, pool: ToyPool) -> NcclTransport:
        return nccl_transport(pool, max_ctas=4, pairs_each_way=8)
