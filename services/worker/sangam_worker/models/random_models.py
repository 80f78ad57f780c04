"""Shapes of models with random weights, for benchmarks: ``random:<name>``.

Called by ``config``, and by the load test's cost model for the published dimensions; the weights
are drawn in ``weights``. No torch.
"""

from sangam_core.errors import ConfigurationError
from sangam_core.rules import Family
from sangam_worker.models.description import ModelConfig

RANDOM_PREFIX = "random:"


def _shape(
    name: str,
    *,
    family: Family,
    vocab_size: int,
    mask_id: int,
    eos_id: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    mlp_size: int,
    max_sequence_tokens: int,
    rope_theta: float,
) -> ModelConfig:
    is_llada = family == "llada"
    return ModelConfig(
        family=family,
        name=RANDOM_PREFIX + name,
        mask_id=mask_id,
        eos_ids=(eos_id,),
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=num_heads * head_dim,
        mlp_size=mlp_size,
        max_sequence_tokens=max_sequence_tokens,
        rope_theta=rope_theta,
        norm_eps=1e-5 if is_llada else 1e-6,
        is_rope_in_float32=is_llada,
        ties_head=False,
        has_qkv_bias=not is_llada,
    )


_LLADA_8B = _shape(
    "llada-8b",
    family="llada",
    vocab_size=126464,
    mask_id=126336,
    eos_id=126081,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    mlp_size=12288,
    max_sequence_tokens=4096,
    rope_theta=5e5,
)
_DREAM_7B = _shape(
    "dream-7b",
    family="dream",
    vocab_size=152064,
    mask_id=151666,
    eos_id=151643,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    mlp_size=18944,
    max_sequence_tokens=131072,
    rope_theta=1e6,
)
_LLADA_100M = _shape(
    "llada-100m",
    family="llada",
    vocab_size=8192,
    mask_id=8191,
    eos_id=8190,
    num_layers=12,
    num_heads=12,
    num_kv_heads=12,
    head_dim=64,
    mlp_size=2048,
    max_sequence_tokens=4096,
    rope_theta=5e5,
)
_DREAM_100M = _shape(
    "dream-100m",
    family="dream",
    vocab_size=8192,
    mask_id=8191,
    eos_id=8190,
    num_layers=12,
    num_heads=12,
    num_kv_heads=4,
    head_dim=64,
    mlp_size=2304,
    max_sequence_tokens=4096,
    rope_theta=1e6,
)
_SHAPES = {config.name: config for config in (_LLADA_100M, _DREAM_100M, _LLADA_8B, _DREAM_7B)}


def random_config(model: str) -> ModelConfig:
    """The shape of a ``random:<name>`` model. ``ConfigurationError`` when there is none."""
    try:
        return _SHAPES[model]
    except KeyError:
        raise ConfigurationError(
            f"model {model}: unknown; use one of {', '.join(sorted(_SHAPES))}"
        ) from None
