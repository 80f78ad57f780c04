"""What the chart's tests share: one helm, whose renderings are kept."""

from pathlib import Path

import pytest
from tests.chart.helm import EVERYTHING, Helm, Rendered, find_helm


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    found = find_helm()
    if not isinstance(found, Path):
        pytest.skip(found)
    return Helm(found, tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def default(helm: Helm) -> Rendered:
    """The chart without any values."""
    return helm.render()


@pytest.fixture(scope="session")
def everything(helm: Helm) -> Rendered:
    """The chart with all that is off by default."""
    return helm.render(EVERYTHING)
