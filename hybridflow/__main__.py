"""`python -m hybridflow` is the command `hybridflow`."""

import sys

from .cli import main

sys.exit(main())
