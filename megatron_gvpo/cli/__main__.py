"""`python -m megatron_gvpo.cli`, for where no console script is on the path."""

import sys

from megatron_gvpo.cli import main

sys.exit(main())
