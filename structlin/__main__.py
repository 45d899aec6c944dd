"""`python -m structlin` is the command `structlin`, for where it is not on the PATH."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
