"""A picture of a log: `kafkalog ui` serves it, and `kafkalog status --html` writes it.

It is one page, `page.html`, with its style, script and figures (JSON) inside. The figures are those
of `status --json` and `explain --json`, and each partition's segments, to scale.
"""

from __future__ import annotations
