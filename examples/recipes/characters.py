"""What the recipes learn: the standard library's documentation, in characters of ASCII."""

import pydoc_data.topics
import sys
from importlib.util import find_spec

import torch
from torch import Tensor

VOCABULARY = 128


def windows(count: int, length: int, seed: int = 0) -> Tensor:  # (count, length)
    """Windows of the text at random places, as long integers below `VOCABULARY`."""
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    ids = torch.frombuffer(bytearray(text.encode("ascii", "ignore")), dtype=torch.uint8).long()
    random = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(ids) - length, (count,), generator=random)
    return ids[starts[:, None] + torch.arange(length)]


def require(*packages: str) -> None:
    """Ends the program with one line where a package is missing: as a failure, or by --smoke, which
    runs with what is there, as a success."""
    missing = [package for package in packages if not find_spec(package)]
    if missing:
        print(f"{sys.argv[0]} needs {' and '.join(missing)}: pip install {' '.join(missing)}")
        raise SystemExit(0 if "--smoke" in sys.argv else 1)
