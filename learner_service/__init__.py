"""The learner of a Decoupled DiLoCo run: trains on its own data and never waits for anybody."""

import time

STARTED_AT = time.monotonic()
"""When this process began, as far as it can tell: before the imports, which belong to its start-up."""
