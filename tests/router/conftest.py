"""What the router's tests share."""

from pathlib import Path

import pytest
from tests.router.builders import write_model_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))
