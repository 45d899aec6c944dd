"""Every test starts from the same seed, on one thread; hypothesis draws the same examples on every
machine."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("structlin", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("structlin")
torch.set_num_threads(1)
torch.manual_seed(0)  # of a GPU too, once it is used


# torch.testing._internal, which they import, changes the process
collect_ignore = [f"conformance/{name}.py" for name in ("modules", "operators", "optimizers")]
collect_ignore.append("parallel/torchtitan_on_a_cpu.py")  # it imports torchtitan
SLOW = {"benchmarks", "examples", "faults", "modular", "projection", "stack"}  # folders


def pytest_collection_modifyitems(items):
    for item in items:
        if SLOW.intersection(item.path.parts):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _seed():
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats tracebacks, for a GPU
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture
def set_threads():
    """torch.set_num_threads, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
