"""What `import structlin` costs, and what it can do without."""

import ast
import importlib
import json
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import structlin

PACKAGE = Path(structlin.__file__).parent

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
from structlin import BTT, optim
model = structlin.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), BTT())
optimizers = optim.AdamW(model, lr=0.1), optim.Muon(model, lr=0.1)
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


@pytest.mark.slow
def test_python_m_structlin_is_the_command_and_ends_with_its_code():
    command = [sys.executable, "-m", "structlin"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert structlin.__version__ in done.stdout
    refused = subprocess.run([*command, "plan", "no-such-folder"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stderr.startswith("structlin: error: ")


# ---- the private names of torch ------------------------------------------------------------------

NOT_IN_ONE_FILE_YET = {  # take a file out once its names are in structlin/_torch.py
    "_compress/replay.py",
    "_engine/operators.py",
    "_engine/product.py",
    "_model/experts.py",
    "_model/parameters.py",
    "optim/_block.py",
    "optim/_normed.py",
    "optim/_roster.py",
    "optim/_stacks.py",
    "parallel.py",  # torch.distributed is loaded where it is used
}


def is_private(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "torch" and any(part[:1] == "_" and part[:2] != "__" for part in parts)


def find_private_names(path: Path) -> set[str]:
    """The dotted names below torch that have a private part, in imports and in expressions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    return {name for name in names if is_private(name) and re.fullmatch(r"[\w.]+", name)}


def look_up(name: str) -> None:
    """Raises: AttributeError: torch has no such name."""
    value, at = torch, "torch"
    for part in name.split(".")[1:]:
        at = f"{at}.{part}"
        if not hasattr(value, part):
            with suppress(ModuleNotFoundError):
                importlib.import_module(at)
        value = getattr(value, part)


PRIVATE = {path: find_private_names(path) for path in sorted(PACKAGE.rglob("*.py"))}


@pytest.mark.parametrize("name", sorted(set().union(*PRIVATE.values())))
def test_every_private_name_of_torch_that_the_package_uses_is_there(name):
    look_up(name)


def test_a_private_name_that_is_not_there_is_seen():
    for name in ("torch._C._no_such_name", "torch._no_such_module.f", "torch.utils._pytree.no"):
        with pytest.raises(AttributeError):
            look_up(name)


def test_private_names_of_torch_are_in_one_file_but_for_those_that_are_known():
    files = {path.relative_to(PACKAGE).as_posix() for path, names in PRIVATE.items() if names}
    assert "_torch.py" in files
    assert files - {"_torch.py"} <= NOT_IN_ONE_FILE_YET
