"""The tensors of a checkpoint: their names in each family, their shapes from the configuration.

Both families have the same tensors under different names, so that one loader and one
transformer serve both. Called by ``weights``. No torch.
"""

from dataclasses import dataclass

from sangam_worker.models.description import ModelConfig


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names in a state dict; ``{layer}`` stands for the layer's number.

    ``q``, ``k`` and ``v`` come without their suffix: they may have a bias.
    """

    embedding: str
    final_norm: str
    head: str
    attention_norm: str
    mlp_norm: str
    q: str
    k: str
    v: str
    attention_out: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a checkpoint's tensor goes.

    Attributes:
        name: in the checkpoint. shape: as it must be there.
        layer: number, or ``None`` outside the layers. parameter: the engine's name of it.
        first_row: within the engine's parameter (q, k and v share one).
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None
    parameter: str
    first_row: int = 0


def slots_of(config: ModelConfig, names: TensorNames) -> dict[str, Slot]:
    """Every tensor that a checkpoint of this configuration must hold, by name."""
    width, vocab = config.hidden_size, config.vocab_size
    slots = [
        Slot(names.embedding, (vocab, width), None, "embedding"),
        Slot(names.final_norm, (width,), None, "final_norm"),
    ]
    if not config.ties_head:
        slots.append(Slot(names.head, (vocab, width), None, "head"))
    for layer in range(config.num_layers):
        slots += _layer_slots(config, names, layer)
    return {slot.name: slot for slot in slots}


def _layer_slots(config: ModelConfig, names: TensorNames, layer: int) -> list[Slot]:
    width, mlp = config.hidden_size, config.mlp_size
    q_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim
    projections = (
        (names.q, q_rows, 0),
        (names.k, kv_rows, q_rows),
        (names.v, kv_rows, q_rows + kv_rows),
    )
    found: list[tuple[str, tuple[int, ...], str, int]] = []
    for name, rows, first_row in projections:
        found.append((name + ".weight", (rows, width), "qkv", first_row))
        if config.has_qkv_bias:
            found.append((name + ".bias", (rows,), "qkv_bias", first_row))
    found += [
        (names.attention_norm, (width,), "attention_norm", 0),
        (names.mlp_norm, (width,), "mlp_norm", 0),
        (names.attention_out, (width, q_rows), "attention_out", 0),
        (names.gate, (mlp, width), "gate", 0),
        (names.up, (mlp, width), "up", 0),
        (names.down, (width, mlp), "down", 0),
    ]
    return [
        Slot(name.format(layer=layer), shape, layer, parameter, first_row)
        for name, shape, parameter, first_row in found
    ]
