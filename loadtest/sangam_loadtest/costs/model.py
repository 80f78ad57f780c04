"""The cost model of one (GPU, model, system): what a pass, a transfer and a request take.

Decides which rows each operator runs on and what the host adds; the operators' terms are in
``operators``, the constants in a table. Called by the simulator, a million times a run.
"""

from dataclasses import dataclass
from pathlib import Path

from sangam_core.errors import ConfigurationError
from sangam_loadtest.costs.batch import PassBatch
from sangam_loadtest.costs.constants import LinkConstants, SystemConstants
from sangam_loadtest.costs.operators import (
    BF16,
    BLOCK_ROWS,
    FP8,
    Attention,
    head_product,
    layer_products,
    sampling_kernel,
    small_kernels,
)
from sangam_loadtest.costs.shapes import ModelShape, shape_of
from sangam_loadtest.costs.table import Table, read_table


@dataclass(frozen=True, slots=True)
class PassCost:
    """Seconds of one iteration by operator.

    Attributes:
        host: what the host adds to the device's time: launches that its work does not hide, and
            work between passes.
    """

    products: float
    attention: float
    small: float
    head: float
    sampling: float
    host: float

    @property
    def total_seconds(self) -> float:
        """From the start of the iteration to the next one's."""
        return self.products + self.attention + self.small + self.head + self.sampling + self.host


@dataclass(frozen=True, slots=True)
class TransferCost:
    """Seconds of one KV transfer.

    Attributes:
        latency_seconds: from its start until the receiver can decode.
        busy_seconds: what it takes from passes on either side.
        is_blocking: whether it runs instead of passes, not beside them.
    """

    latency_seconds: float
    busy_seconds: float
    is_blocking: bool


class CostModel:
    """Costs of one system's passes with one model on one GPU.

    Args:
        gpu, system, quantization, link, attention: names in the table; the last two are the
            system's and the model's by default.

    Attributes:
        shape: the model. system: the system's constants.
        launch_seconds: host time to issue a pass kernel by kernel, hidden or not.
        host_seconds_per_request: router, HTTP and tokenising, in front of each block's prefill.
    """

    def __init__(
        self,
        table: Table,
        gpu: str,
        shape: ModelShape,
        system: str,
        quantization: str = BF16,
        link: str | None = None,
        attention: str | None = None,
    ) -> None:
        device = table.gpus[gpu]
        constants = table.systems[system]
        self.shape = shape
        self.system: SystemConstants = constants
        self.host_seconds_per_request = constants.request_seconds
        self._link: LinkConstants = table.links[link or constants.link]
        head_layers = 1 if constants.last_layer == "head_rows" else 0
        self._products = layer_products(shape, device, table.products[quantization], quantization)
        backend = table.attention[attention or table.backend_of(shape)]
        self._attention = Attention(shape, device, backend, head_layers)
        self._small = small_kernels(
            shape, device, table.small[quantization], constants.small_factor
        )
        self._head = head_product(shape, device, table.head[BF16])
        self._sampling = sampling_kernel(shape, device, table.sampling[constants.sampling])
        launch = table.launch[quantization]
        self.launch_seconds = launch.layer_seconds * shape.num_layers * constants.launch_factor
        self._attention_share = launch.attention_share
        self._decodes_are_eager = constants.decode_launch == "eager"
        self._prefills_are_eager = constants.prefill_launch == "eager"
        self._late_share = _late_share(shape) * head_layers

    def cost(self, batch: PassBatch) -> PassCost:
        """Seconds of an iteration by operator."""
        head_rows = self._head_rows(batch)
        products, small = self._of_rows(batch.decode_rows + batch.prefill_rows, head_rows)
        attention = self._attention.seconds(batch, head_rows)
        head = self._head.seconds(head_rows)
        sampling = self._sampling.seconds(head_rows) if head_rows else 0.0
        device = products + attention + small + head + sampling
        host = self._host(batch, device)
        return PassCost(products, attention, small, head, sampling, host)

    def seconds(self, batch: PassBatch) -> float:
        """The total of ``cost``, without the object."""
        head_rows = self._head_rows(batch)
        products, small = self._of_rows(batch.decode_rows + batch.prefill_rows, head_rows)
        device = products + small + self._head.seconds(head_rows)
        device += self._attention.seconds(batch, head_rows)
        if head_rows:
            device += self._sampling.seconds(head_rows)
        return device + self._host(batch, device)

    def seconds_without_attention(self, batch: PassBatch) -> float:
        """The same pass with the attention's call left out, as benchmarks measure it."""
        cost = self.cost(batch)
        device = cost.products + cost.small + cost.head + cost.sampling
        return device + self._host(batch, device, 1 - self._attention_share)

    def transfer(self, num_tokens: int) -> TransferCost:
        """Seconds of the KV of ``num_tokens`` tokens from one worker to another."""
        link, system = self._link, self.system
        rate = min(link.bytes_per_second * link.efficiency, system.transfer_bytes_per_second)
        latency = system.transfer_fixed_seconds
        latency += num_tokens * self.shape.kv_bytes_per_token / rate
        is_blocking = system.transfers == "blocking"
        busy = latency if is_blocking else system.transfer_busy_seconds
        return TransferCost(latency, busy, is_blocking)

    def _head_rows(self, batch: PassBatch) -> int:
        choice = self.system.head_rows
        if choice == "whole_blocks":
            return whole_block_rows(batch)
        return batch.head_rows if choice == "committable" else batch.rows

    def _of_rows(self, rows: int, head_rows: int) -> tuple[float, float]:
        """Seconds of products and small kernels; part of the last layer runs on head rows."""
        products, small = self._products.seconds(rows), self._small.seconds(rows)
        late = self._late_share
        if late and head_rows < rows:
            products += late * (self._products.seconds(head_rows) - products)
            small += late * (self._small.seconds(head_rows) - small)
        return products, small

    def _host(self, batch: PassBatch, device: float, launch_share: float = 1.0) -> float:
        system = self.system
        is_eager = self._prefills_are_eager if batch.num_prefills else self._decodes_are_eager
        waits = system.pass_seconds + system.sequence_seconds * batch.num_sequences
        waits += system.row_seconds * batch.rows
        if is_eager and self.launch_seconds * launch_share > device:
            waits += self.launch_seconds * launch_share - device
        return waits


def whole_block_rows(batch: PassBatch) -> int:
    """Head rows where the head runs on all rows of the current blocks, 32 for each sequence."""
    return min(batch.rows, BLOCK_ROWS * batch.num_sequences)


def _late_share(shape: ModelShape) -> float:
    """Share of all layers' products that come after the last layer's K and V."""
    keys_values = shape.hidden_size * shape.key_value_size
    return (1 - keys_values / shape.layer_weights) / shape.num_layers


def cost_model(
    gpu: str,
    model: str,
    system: str = "sangam",
    quantization: str = BF16,
    constants: Path | None = None,
    *,
    link: str | None = None,
) -> CostModel:
    """The cost model of a system that serves ``model`` on ``gpu``.

    Args:
        gpu: ``h100``, ``h200``, or another one in the table. model: ``llada-8b``, ``dream-7b``,
            ``small``, a folder or a hub id. quantization: of the products, ``bf16`` or ``fp8``.
        constants: a table that ``sangam loadtest fit`` wrote; the shipped one by default.
        link: between workers, by its name in the table; the system's by default.

    Raises:
        ConfigurationError: a name is not in the table, or the table is malformed.
    """
    if quantization not in (BF16, FP8):
        raise ConfigurationError(f"quantization must be {BF16} or {FP8}, not {quantization!r}")
    return CostModel(read_table(constants), gpu, shape_of(model), system, quantization, link)
