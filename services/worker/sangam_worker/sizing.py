"""How many KV pages a worker gets: as set, or as many as fit the bytes that are set."""

from sangam_core.errors import ConfigurationError
from sangam_core.geometry import PAGE_TOKENS
from sangam_worker.models.config import read_model_config, resolve_model
from sangam_worker.models.description import ModelConfig
from sangam_worker.models.random_models import RANDOM_PREFIX, random_config
from sangam_worker.settings import DEFAULT_TOTAL_PAGES, WorkerSettings

_NUMBER_BYTES = {"float32": 4, "bfloat16": 2}


def pages_of(settings: WorkerSettings) -> int:
    """Pages of the pool.

    Raises:
        ConfigurationError: the bytes do not hold one page, or the model cannot be read.
    """
    if settings.pool_bytes is None:
        return settings.total_pages or DEFAULT_TOTAL_PAGES
    page_bytes = bytes_per_page(_config_of(settings.model), settings.number_format)
    if settings.pool_bytes < page_bytes:
        raise ConfigurationError(
            f"SANGAM_POOL_BYTES: {settings.pool_bytes} bytes do not hold one page of {page_bytes}"
        )
    return settings.pool_bytes // page_bytes


def bytes_per_page(config: ModelConfig, dtype: str) -> int:
    """Bytes of one page across all layers: K and V of 16 tokens."""
    numbers = 2 * PAGE_TOKENS * config.num_kv_heads * config.head_dim
    return config.num_layers * numbers * _NUMBER_BYTES[dtype]


def _config_of(model: str) -> ModelConfig:
    if model.startswith(RANDOM_PREFIX):
        return random_config(model)
    return read_model_config(resolve_model(model), name=model)
