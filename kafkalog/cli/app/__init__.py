"""The command line itself: arguments, examples, completion."""
