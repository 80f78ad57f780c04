"""Dream (``DreamModel``, Qwen2-style): which keys count, and what its tensors are called.

Facts: ``dllm-semantics`` section a. Called by ``config`` and ``weights``. No torch.
"""

from sangam_core.model_config import ConfigFields, ModelTokens
from sangam_worker.models.description import ModelConfig
from sangam_worker.models.tensor_names import TensorNames

_LAYER = "model.layers.{layer}."
TENSOR_NAMES = TensorNames(
    embedding="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    head="lm_head.weight",
    attention_norm=_LAYER + "input_layernorm.weight",
    mlp_norm=_LAYER + "post_attention_layernorm.weight",
    q=_LAYER + "self_attn.q_proj",
    k=_LAYER + "self_attn.k_proj",
    v=_LAYER + "self_attn.v_proj",
    attention_out=_LAYER + "self_attn.o_proj.weight",
    gate=_LAYER + "mlp.gate_proj.weight",
    up=_LAYER + "mlp.up_proj.weight",
    down=_LAYER + "mlp.down_proj.weight",
)


def read_config(fields: ConfigFields, tokens: ModelTokens, name: str) -> ModelConfig:
    """Read Dream's keys.

    Raises:
        ConfigurationError: a key is missing or asks for something unsupported.
    """
    fields.require("hidden_act", "silu", "silu")
    fields.refuse("use_sliding_window", "use_mrope")
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise fields.error(
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}"
        )
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(
            f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads "
            f"{num_kv_heads}"
        )
    return ModelConfig(
        family=tokens.family,
        name=name,
        mask_id=tokens.mask_id,
        eos_ids=tokens.eos_ids,
        vocab_size=tokens.vocab_size,
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.integer("head_dim", hidden_size // num_heads),
        hidden_size=hidden_size,
        mlp_size=fields.integer("intermediate_size"),
        max_sequence_tokens=tokens.max_sequence_tokens,
        rope_theta=fields.rope_theta(10000.0),
        norm_eps=fields.positive("rms_norm_eps", 1e-6),
        is_rope_in_float32=False,
        ties_head=fields.flag("tie_word_embeddings", False),
        has_qkv_bias=True,
    )
