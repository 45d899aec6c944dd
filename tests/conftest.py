"""Every test starts from the same seed, on one thread; hypothesis draws the same examples on every machine."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("structlin", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("structlin")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
