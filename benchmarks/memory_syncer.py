"""The syncer's program with a store in memory, for benchmarks in which the disk is not the question.

`python -m benchmarks.memory_syncer` takes the flags of `python -m syncer_service`; all else is the same.
"""

from __future__ import annotations

import sys

from syncer_service import app
from syncer_service.__main__ import main
from syncer_service.store.memory import MemoryStore

if __name__ == "__main__":
    setattr(app, "_open_store", lambda config, settings: MemoryStore())  # noqa: B010 (not an assignment for mypy)
    sys.exit(main())
