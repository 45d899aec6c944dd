"""timm, once for all tests of the stack: it may need a stand-in for torchvision."""

import warnings

from benchmarks.zoo import import_timm

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import_timm()
