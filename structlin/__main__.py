"""`python -m structlin`: the command `structlin`."""

import sys

from ._commands.main import main

if __name__ == "__main__":
    sys.exit(main())
