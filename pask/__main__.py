"""`python -m pask`, the same as the `pask` command."""

import sys

from pask.cli import main

sys.exit(main())
