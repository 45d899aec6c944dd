"""`python -m structlin._kernels.build` builds the CPU engine ahead of its first use, and says where
it lies."""

from .engine import build

if __name__ == "__main__":
    print(build())
