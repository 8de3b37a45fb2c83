"""`python -m composer_replication.cli`, for where the console script isn't on the path."""

from __future__ import annotations

import sys

from composer_replication.cli import main

sys.exit(main())
