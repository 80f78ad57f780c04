"""What a worker sets of its interpreter."""

import gc
import sys
from collections.abc import Iterator

import pytest

from sangam_worker.interpreter import SWITCH_SECONDS, favour_gpu_thread


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    interval = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval)
    gc.unfreeze()


def test_the_collector_leaves_alone_what_was_loaded_and_threads_change_quickly() -> None:
    loaded: list[object] = [[] for _ in range(1000)]
    favour_gpu_thread()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    assert gc.get_freeze_count() >= len(loaded)
    known = {id(each) for each in gc.get_objects()}
    assert not known & {id(each) for each in loaded}
