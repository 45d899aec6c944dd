"""What `import structlin` costs."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
import torch, einops, torch.utils.flop_counter  # which loads triton where there is one
before = {name.split(".")[0] for name in sys.modules}
import structlin
after = {name.split(".")[0] for name in sys.modules}
print(json.dumps(sorted(after - before - set(sys.stdlib_module_names))))
"""


@pytest.mark.slow
def test_importing_structlin_loads_torch_einops_and_nothing_else():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == ["structlin"]
