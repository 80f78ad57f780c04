"""Reads a model's tensors: from safetensors, or drawn at random for benchmarks.

Decides which tensors must be there and where they go, and complains about each one that is
missing, left over or of another shape. Every tensor goes to the device as soon as it is read, and
random ones are drawn there: the host holds one shard at most, as pages of the file that the
system may drop, and one tensor. Called by ``engine_loading``.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sangam_core.errors import ConfigurationError
from sangam_core.rules import Family
from sangam_worker.models import dream, llada
from sangam_worker.models.description import ModelConfig
from sangam_worker.models.fp8 import Fp8Rows
from sangam_worker.models.tensor_names import Slot, TensorNames, slots_of
from sangam_worker.progress import SILENT, Reports

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_NAMES: Mapping[Family, TensorNames] = {"llada": llada.TENSOR_NAMES, "dream": dream.TENSOR_NAMES}
_BUFFERS = ("rotary_emb.inv_freq",)
"""Ends of names that old exports contain and that are no weights."""


class Weights:
    """The engine's parameters: outside the layers, and one mapping per layer.

    ``qkv`` holds the rows of q, k and v in this order, so that one product gives all three.

    Args:
        is_fp8: keep the layers' matrices as ``Fp8Rows``, each rounded as it arrives.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_fp8: bool = False,
    ) -> None:
        self.outer: dict[str, Tensor] = {}
        self.layers: list[dict[str, Any]] = [{} for _ in range(config.num_layers)]
        self.slots = slots_of(config, _NAMES[config.family])
        num_rows: dict[tuple[int | None, str], int] = {}
        for slot in self.slots.values():
            key = (slot.layer, slot.parameter)
            num_rows[key] = max(num_rows.get(key, 0), slot.first_row + slot.shape[0])
        for slot in self.slots.values():
            shape = (num_rows[slot.layer, slot.parameter], *slot.shape[1:])
            group = self._group(slot)
            if slot.parameter in group:
                continue
            if is_fp8 and slot.layer is not None and len(shape) == 2:
                group[slot.parameter] = Fp8Rows.empty(shape, device)
            else:
                group[slot.parameter] = torch.empty(shape, dtype=dtype, device=device)

    def place(self, slot: Slot, tensor: Tensor) -> None:
        """Copy a checkpoint's tensor to its place, cast to the model's dtype or rounded."""
        parameter = self._group(slot)[slot.parameter]
        parameter[slot.first_row : slot.first_row + slot.shape[0]].copy_(tensor)

    def _group(self, slot: Slot) -> dict[str, Any]:
        return self.outer if slot.layer is None else self.layers[slot.layer]


def read_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    reports: Reports = SILENT,
    *,
    is_fp8: bool = False,
) -> Weights:
    """Read a checkpoint's safetensors, sharded or not, in the order of the files.

    Args:
        reports: is told of every tensor that has arrived.
        is_fp8: as for ``Weights``.

    Raises:
        ConfigurationError: naming the file or tensor that is absent, unreadable, of another
            shape, no floating-point tensor, or left over.
    """
    files = _tensor_files(folder)
    weights = Weights(config, dtype, device, is_fp8=is_fp8)
    missing = dict(weights.slots)
    total_bytes = sum(file.stat().st_size for file in files)
    with reports.task("weights read", total_bytes / 1e9, "GB") as advance:
        for file in files:
            for name, read in _tensors(file):
                if name.endswith(_BUFFERS):
                    continue
                slot = weights.slots.get(name)
                if slot is None:
                    raise ConfigurationError(
                        f"{file}: tensor {name} is not part of this {config.family} configuration"
                    )
                if missing.pop(name, None) is None:
                    raise ConfigurationError(f"{file}: tensor {name} is in another file as well")
                tensor = _checked(read(), slot, file)
                weights.place(slot, tensor)
                advance(tensor.nbytes / 1e9)
    if missing:
        first = next(iter(missing))
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ConfigurationError(f"{folder}: tensor {first} is missing{more}")
    return weights


def _tensor_files(folder: Path) -> list[Path]:
    """The shards by the index, else the single file."""
    index = folder / INDEX_FILE
    if not index.exists():
        if not (folder / SINGLE_FILE).exists():
            raise ConfigurationError(f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")
        return [folder / SINGLE_FILE]
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [folder / shard for shard in shards]
        if any(Path(shard).name != shard for shard in shards):
            raise ValueError("a shard lies outside the folder")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigurationError(f"{index}: cannot be read: {error!r}") from None
    for file in files:
        if not file.exists():
            raise ConfigurationError(f"{file}: named by {INDEX_FILE}, but there is no such file")
    return files


def _tensors(file: Path) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Names in a file, each with a function that reads the tensor, from front to back."""
    try:
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.offset_keys():
                yield name, partial(opened.get_tensor, name)
    except (SafetensorError, OSError) as error:
        raise ConfigurationError(f"{file}: cannot be read: {error}") from None


def _checked(tensor: Tensor, slot: Slot, file: Path) -> Tensor:
    if tuple(tensor.shape) != slot.shape:
        raise ConfigurationError(
            f"{file}: tensor {slot.name} has shape {tuple(tensor.shape)}, "
            f"but the configuration asks for {slot.shape}"
        )
    if not tensor.is_floating_point():
        raise ConfigurationError(
            f"{file}: tensor {slot.name} has dtype {tensor.dtype}; quantised weights are not "
            "supported"
        )
    return tensor


def random_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    reports: Reports = SILENT,
    *,
    is_fp8: bool = False,
) -> Weights:
    """Draw weights, each tensor from its own seed: every worker gets the same ones.

    Normal with the variance that keeps activations near 1; norms are ones, biases zeros.
    """
    weights = Weights(config, dtype, device, is_fp8=is_fp8)
    with reports.task(
        "weights drawn", config.num_parameters / 1e9, "billion parameters"
    ) as advance:
        for slot in weights.slots.values():
            weights.place(slot, _drawn(slot, dtype, device, _seed_of(slot.name, seed)))
            advance(math.prod(slot.shape) / 1e9)
    return weights


def _drawn(slot: Slot, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    if len(slot.shape) == 1:
        value = 0.0 if slot.parameter.endswith("bias") else 1.0
        return torch.full(slot.shape, value, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    scale = 1.0 if slot.parameter == "embedding" else 1.0 / math.sqrt(slot.shape[1])
    return torch.randn(slot.shape, generator=generator, device=device, dtype=dtype).mul_(scale)


def _seed_of(name: str, seed: int) -> int:
    digest = blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")
