"""Every test starts from the same seed, on one thread; hypothesis draws the same examples on every machine."""

import warnings

import pytest
import torch
from hypothesis import settings

from benchmarks.zoo import import_timm

settings.register_profile("structlin", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("structlin")
torch.set_num_threads(1)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import_timm()  # here, for it may need a stand-in for torchvision


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
