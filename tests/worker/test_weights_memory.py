"""How much of the host's memory reading a sharded checkpoint takes, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.checkpoints import llada_config, llada_shapes, write_shards

NUM_SHARDS = 8
CONFIG = llada_config(d_model=256, n_heads=4, n_kv_heads=4, n_layers=16, mlp_hidden_size=1536)

_READ = """
import json, sys
from pathlib import Path
import torch
from sangam_worker.models.config import read_model_config
from sangam_worker.weights import read_weights

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

torch.set_num_threads(1)
folder, device = Path(sys.argv[1]), torch.device(sys.argv[2])
config = read_model_config(folder)
torch.zeros(4, dtype=torch.float32).to(torch.bfloat16).to(device)
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = status("VmRSS:")
weights = read_weights(folder, config, torch.bfloat16, device)
groups = [weights.outer, *weights.layers]
model = sum(tensor.nbytes for group in groups for tensor in group.values())
print(json.dumps({"peak": status("VmHWM:") - before, "model": model}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_reading_takes_less_than_two_shards_of_the_host_s_memory_beside_the_model(
    tmp_path: Path,
) -> None:
    largest = written(tmp_path)
    measured = read_apart(tmp_path, "cpu")
    total = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert measured["model"] == pytest.approx(total / 2, rel=0.01)  # float32 becomes bfloat16
    beside = measured["peak"] - measured["model"]
    assert 0 < beside < 2 * largest, f"{beside / largest:.2f} shards"


def read_apart(folder: Path, device: str) -> dict[str, int]:
    """Read in a process of its own: the host's memory at its peak, and the model's bytes."""
    done = subprocess.run(
        [sys.executable, "-c", _READ, str(folder), device],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    measured: dict[str, int] = json.loads(done.stdout)
    return measured


def written(folder: Path) -> int:
    """A checkpoint of equal shards, some 100 MB; the largest one's bytes."""
    shapes = llada_shapes(CONFIG)
    state: dict[str, Any] = {name: torch.ones(shape) for name, shape in shapes.items()}
    per_shard = -(-len(state) // NUM_SHARDS)
    write_shards(folder, CONFIG, state, lambda number: number // per_shard)
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    assert len(sizes) == NUM_SHARDS
    return max(sizes)
