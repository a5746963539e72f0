"""How many files this process may have open."""

from __future__ import annotations

import resource


def descriptor_limit() -> float:
    """Return how many files this process may have open as it is."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return float("inf") if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit() -> bool:
    """Raise the soft limit of open files to the hard one; tells whether there are more now.

    It is the whole process's, and its child processes inherit it. This is the last resort, for a
    caller that needs files at once and can close none of ours.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # a system whose hard limit is unlimited only in name
        return False
    return True
