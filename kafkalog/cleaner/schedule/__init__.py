"""The scheduler: which partition is cleaned next, when, by whom, and how fast."""
