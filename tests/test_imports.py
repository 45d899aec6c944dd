"""What `import structlin` costs, and what it can do without."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import structlin

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


LAZY = """
import sys, structlin
assert "torch.distributed.tensor" not in sys.modules and "structlin.parallel" not in sys.modules
assert structlin.parallel.RowwiseParallel and "torch.distributed.tensor" in sys.modules
"""


@pytest.mark.slow
def test_importing_structlin_does_not_import_what_tensor_parallelism_needs():
    subprocess.run([sys.executable, "-c", LAZY], check=True)


ALONE = """
import importlib.metadata, sys, torch, einops, torch._dynamo  # with all that torch itself imports
known = {name.split(".")[0] for name in sys.modules} | {"structlin"}
refused = importlib.metadata.packages_distributions().keys() - known
assert {"matplotlib", "rich", "safetensors"} <= refused, refused

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in refused:
            raise ModuleNotFoundError(f"no {name}", name=name)

sys.meta_path.insert(0, Nothing())
import structlin
from structlin import BTT, optim, param_groups
model = structlin.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), BTT())
optimizers = torch.optim.AdamW(param_groups(model, lr=0.1)), optim.Muon(model, lr=0.1)
model(torch.randn(2, 64)).square().mean().backward()
for optimizer in optimizers:
    optimizer.step()
model.load_state_dict(model.state_dict())
assert model[0].to_dense().isfinite().all()
"""


@pytest.mark.slow
def test_a_model_is_converted_and_trained_where_only_torch_and_einops_are_installed():
    subprocess.run([sys.executable, "-c", ALONE], check=True)


def test_every_package_that_structlin_depends_on_is_imported_by_it_and_has_a_version():
    root = Path(structlin.__file__).parents[1]
    project, versions = (
        (root / name).read_text() for name in ("pyproject.toml", "constraints.txt")
    )
    (named,) = re.findall(r"^dependencies = \[(.*)\]$", project, re.MULTILINE)
    needed = set(re.findall(r'"([\w-]+)>=', named))
    files = [path.read_text() for path in (root / "structlin").rglob("*.py")]
    for name in needed:
        assert any(re.search(rf"^ *(from|import) {name}\b", text, re.MULTILINE) for text in files)
        assert re.search(rf"^{name}==", versions, re.MULTILINE)
