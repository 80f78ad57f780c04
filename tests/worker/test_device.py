"""What is said where the GPU of the settings is not there."""

import pytest
import torch
from tests.worker.harness import a_settings

from sangam_core.errors import ConfigurationError
from sangam_worker.device import TorchBuild, require_cuda
from sangam_worker.transfer.choice import prepare_transport


@pytest.mark.parametrize(
    ("device", "build", "words"),
    [
        (
            "cuda:0",
            TorchBuild("2.13.0+cpu", None, 0),
            "SANGAM_DEVICE 'cuda:0': torch 2.13.0.cpu has no CUDA in it; install a CUDA build of "
            "torch, or set SANGAM_DEVICE to cpu",
        ),
        ("cuda", TorchBuild("2.13.0", "13.0", 0), r"torch 2.13.0 \(CUDA 13.0\) sees no GPU; "),
        ("cuda:2", TorchBuild("2.13.0", "13.0", 2), r"'cuda:2': torch sees 2 GPUs, counted"),
    ],
)
def test_a_gpu_that_is_not_there_is_told_with_the_fix(
    device: str, build: TorchBuild, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        require_cuda(device, build)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:1"])
def test_a_gpu_that_is_there_is_taken(device: str) -> None:
    require_cuda(device, TorchBuild("2.13.0", "13.0", 2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("kv_transport", ["auto", "nccl", "gloo"])
def test_a_missing_gpu_is_told_before_what_moves_kv(kv_transport: str) -> None:
    with pytest.raises(ConfigurationError, match="SANGAM_DEVICE 'cuda:0': torch "):
        prepare_transport(a_settings(device="cuda:0", kv_transport=kv_transport))
