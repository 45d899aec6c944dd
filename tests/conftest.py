"""Every test starts from the same seed, on one thread; hypothesis draws the same examples on every machine."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("structlin", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("structlin")
torch.set_num_threads(1)


SLOW = {"benchmarks", "examples", "faults", "modular", "projection", "stack"}  # folders


def pytest_collection_modifyitems(items):
    for item in items:
        if SLOW.intersection(item.path.parts):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
