"""What a real notebook shows: progress while it measures, rows as a table. Run by `make test-notebook`."""

from __future__ import annotations

import os

import pytest

pytestmark = pytest.mark.notebook

MEASURE = """
from kernelmark.suite.api import MemoryProfiler, Runner
from kernelmark.suite.measure import limits
from kernelmark.suite.measure.stopping import Sampling
few = Sampling(min_samples=6, max_samples=6, min_seconds=0, max_seconds=5, warmup_s=0)
limits.COPY_BYTES, limits.MATMUL_SIZE, limits.SAMPLING = {"cpu": [1 << 14, 1 << 16]}, {"cpu": 16}, few
runner = Runner("double", "cpu", only=("plain", "wrong"), sampling=few)
with MemoryProfiler() as memory:
    records = runner.run({"N": 32}, "fp32", cache="hot", replicates=2)
"""


def test_progress_rows_and_memory(root):
    import nbclient
    import nbformat

    cells = [nbformat.v4.new_code_cell(x) for x in (MEASURE, "runner.rows()", "print(memory)")]
    sent = []

    class Client(nbclient.NotebookClient):
        def process_message(self, message, cell, index):
            if message["msg_type"] in ("display_data", "update_display_data"):
                sent.append(message["content"]["data"]["text/plain"])
            return super().process_message(message, cell, index)

    notebook = nbformat.v4.new_notebook(cells=cells)
    Client(notebook, timeout=120).execute(env=os.environ | {"KERNELMARK_PATH": str(root)})
    assert sent[0].startswith("0 of 4: ")
    assert len(sent) > 2
    measured, rows, memory = (x.outputs for x in cells)
    assert [x.output_type for x in measured] == ["display_data"]  # and nothing on the error output
    assert measured[0].data["text/plain"].startswith("4 of 4 measured in ")
    assert rows[0].data["text/html"].startswith("<table>")
    assert "not measured: torch sees no CUDA device" in memory[0].text
