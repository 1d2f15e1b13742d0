"""What the delays of `delayed_root` take on a GPU, a hundred of each one after the other in a CUDA graph.

    python tests/calibration/delays.py FILE      writes microseconds a call by microseconds asked for, as JSON

    KERNELMARK_PATH=tests/calibration/delayed_root kernelmark worth gpt2-124m --base torch_graph --batch 1
      --sequence 128 --part norm --implementation planted --null

plants them in a model's step, called as often as the step has norms, and says what they cost it: as much as these
calls take, or worth is wrong.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import torch

SPIN = Path(__file__).parent / "delayed_root" / "baselines" / "_spin.py"
CALLS = 100


def main(out: Path) -> None:
    """Writes the file."""
    spec = importlib.util.spec_from_file_location("delayed_spin", SPIN)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    found = {}
    for us in (50, 200, 1000):
        module.spin(us)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                module.spin(us)
        graph.replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found[us] = start.elapsed_time(end) * 1e3 / CALLS
    out.write_text(json.dumps(found))
    print(found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
