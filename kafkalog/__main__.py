"""`python -m kafkalog`, for where the command is not on the path."""

from kafkalog.cli import main

main()
