"""`python -m jaxmix` is the command `jaxmix`."""

import sys

from jaxmix.cli import main

if __name__ == "__main__":
    sys.exit(main())
