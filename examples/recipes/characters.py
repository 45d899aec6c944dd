"""What the recipes learn: the standard library's documentation, in characters of ASCII."""

import pydoc_data.topics
import sys
from importlib.util import find_spec

import torch
from torch import Tensor

VOCABULARY = 128


def windows(count: int, length: int, seed: int = 0) -> Tensor:  # (count, length)
    """Windows of the text at random places, as long integers below `VOCABULARY`."""
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = torch.frombuffer(bytearray(text.encode("ascii", "ignore")), dtype=torch.uint8).long()
    random = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(ids) - length, (count,), generator=random)
    return ids[starts[:, None] + torch.arange(length)]


def require(*packages: str) -> None:
    """Ends the program with one line if a package is missing: a failure, but a success with
    --smoke, which tries only the recipes whose packages are installed."""
    missing = [package for package in packages if not find_spec(package)]
    if missing:
        print(f"{sys.argv[0]} needs {' and '.join(missing)}: pip install {' '.join(missing)}")
        is_smoke = "--smoke" in sys.argv
        raise SystemExit(0 if is_smoke else 1)
