"""The tests of kafkalog."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The checkout."""

if "KAFKALOG_OLD_BUG" in os.environ:  # in this process, and in those that it starts
    from tests.old_bugs import bring_back

    bring_back(os.environ["KAFKALOG_OLD_BUG"])
