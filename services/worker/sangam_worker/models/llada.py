"""LLaDA (``LLaDAModelLM``): which keys of ``config.json`` count, and what its tensors are called.

Facts: ``dllm-semantics`` section a. Refuses what the published code can do but no published
LLaDA uses. Called by ``config`` and ``weights``. No torch.
"""

from sangam_core.model_config import ConfigFields, ModelTokens
from sangam_worker.models.description import ModelConfig
from sangam_worker.models.tensor_names import TensorNames

_LAYER = "model.transformer.blocks.{layer}."
TENSOR_NAMES = TensorNames(
    embedding="model.transformer.wte.weight",
    final_norm="model.transformer.ln_f.weight",
    head="model.transformer.ff_out.weight",
    attention_norm=_LAYER + "attn_norm.weight",
    mlp_norm=_LAYER + "ff_norm.weight",
    q=_LAYER + "q_proj",
    k=_LAYER + "k_proj",
    v=_LAYER + "v_proj",
    attention_out=_LAYER + "attn_out.weight",
    # ff_proj is the gate (it gets the SiLU); ff_out names the head and each down projection.
    gate=_LAYER + "ff_proj.weight",
    up=_LAYER + "up_proj.weight",
    down=_LAYER + "ff_out.weight",
)


def read_config(fields: ConfigFields, tokens: ModelTokens, name: str) -> ModelConfig:
    """Read LLaDA's keys.

    Raises:
        ConfigurationError: a key is missing or asks for something unsupported.
    """
    _refuse_unsupported(fields)
    hidden_size = fields.integer("d_model")
    num_heads = fields.integer("n_heads")
    if hidden_size % num_heads:
        raise fields.error(f"d_model {hidden_size} is not a multiple of n_heads {num_heads}")
    is_multi_query = fields.flag("multi_query_attention", False)
    num_kv_heads = fields.integer("n_kv_heads", 1 if is_multi_query else num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(f"n_heads {num_heads} is not a multiple of n_kv_heads {num_kv_heads}")
    return ModelConfig(
        family=tokens.family,
        name=name,
        mask_id=tokens.mask_id,
        eos_ids=tokens.eos_ids,
        vocab_size=tokens.vocab_size,
        num_layers=fields.integer("n_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        hidden_size=hidden_size,
        mlp_size=fields.integer("mlp_hidden_size", hidden_size * fields.integer("mlp_ratio", 4)),
        max_sequence_tokens=tokens.max_sequence_tokens,
        rope_theta=fields.rope_theta(10000.0),
        norm_eps=fields.positive("rms_norm_eps", 1e-5),
        is_rope_in_float32=fields.flag("rope_full_precision", True),
        ties_head=fields.flag("weight_tying", True),
        has_qkv_bias=fields.flag("include_qkv_bias", False),
    )


def _refuse_unsupported(fields: ConfigFields) -> None:
    fields.require("block_type", "llama", "sequential")
    fields.require("layer_norm_type", "rms", "default")
    fields.require("activation_type", "silu", "swiglu")
    fields.require("block_group_size", 1, 1)
    fields.require("layer_norm_with_affine", True, True)
    fields.require("rope", True, False)
    fields.refuse(
        "alibi",
        "include_bias",
        "attention_layer_norm",
        "clip_qkv",
        "scale_logits",
        "input_emb_norm",
        "bias_for_layer_norm",
    )
