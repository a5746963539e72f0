"""The scheduler: which partition is cleaned next, when, by which thread, and how fast."""
