"""`python -m penstock_scheduler.cli` is `penstock`."""

import sys

from penstock_scheduler.cli import main

if __name__ == "__main__":
    sys.exit(main())
