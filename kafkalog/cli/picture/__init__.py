"""A picture of a log: what `kafkalog ui` serves and `kafkalog status --html` writes.

One page, `page.html`, which asks nobody for anything: its style and its script are in it, and the
figures too, as JSON. They are those of `status --json` and `explain --json`, and of each partition
the segments, to scale.
"""

from __future__ import annotations
