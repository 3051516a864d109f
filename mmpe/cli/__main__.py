"""`python -m mmpe.cli` is the `mmpe` script."""

import sys

from mmpe.cli import main

if __name__ == "__main__":
    sys.exit(main())
