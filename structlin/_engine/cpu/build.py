"""`python -m structlin._engine.cpu.build` builds the CPU engine ahead of its first use, and says
where it lies."""

from .library import build

if __name__ == "__main__":
    print(build())
