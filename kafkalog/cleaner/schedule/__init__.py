"""The scheduler: which partition is cleaned next, when, on which thread, and how fast."""
