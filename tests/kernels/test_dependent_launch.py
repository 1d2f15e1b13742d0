"""Kernels that begin while the ones before end, compiled for Hopper: what they do before they may read."""

import json
import re

CODE = """
import json
from kernelmark.kernels import _dependent_launch
from tests.kernels import compiled
_dependent_launch.DEPENDENT = True
_dependent_launch.capability = lambda device: (9, 0)
said = []
def keep(kernel):
    said.append((kernel.metadata.name, kernel.metadata.launch_pdl, kernel.asm["ptx"]))
    return {}
compiled.cases = lambda operator, *_: [operator.case(axes[operator.name], "bf16", "forward")]
axes = {
    "matmul": {"M": 2, "N": 1024, "K": 512},
    "attention_decode": {"B": 2, "Sq": 1, "H": 8, "Hkv": 2, "S": 4096, "D": 128},
}
rows = compiled.compiled(compiled.target_named("9.0"), list(axes), [], keep)
print(json.dumps([[x["error"] for x in rows], said]))
"""


def test_nothing_is_read_before_the_kernels_before_are_done(apart):
    errors, kernels = json.loads(apart("-c", CODE))
    assert set(errors) == {None}
    assert len(kernels) >= 9
    for name, launched, ptx in kernels:
        before, waits, after = ptx.partition("griddepcontrol.wait")
        assert launched, name
        assert waits, name
        assert not re.search(r"\b(ld|st|cp\.async|atom|red)\.\S*global", before), name
        assert ("prefetch.global.L2" in before) == (name == "_kernel")
        assert "griddepcontrol.launch_dependents" in after
