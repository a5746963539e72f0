"""The Java that Spark starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from kafkalog.cli.environment.check import Check
from kafkalog.cli.environment.program import printed_by

_JAVA_MIN: Final = 17
_ADVICE: Final = (
    f"Install Java {_JAVA_MIN} or later (Debian: apt-get install openjdk-17-jre-headless), and let "
    "JAVA_HOME name its directory or PATH its program."
)


def check_java(environment: Mapping[str, str]) -> Check:
    """Check the Java of JAVA_HOME, else that of PATH: Spark chooses in this order."""
    home = environment.get("JAVA_HOME")
    program = f"{home}/bin/java" if home else "java"
    text, fault = printed_by([program, "-version"])
    version = re.search(r'version "(?:1\.)?(\d+)([^"]*)', text)
    if version is None:
        return Check("java", f"{program}: {fault or text.strip() or 'no version'}", _ADVICE)
    found = f"{version[1]}{version[2]}, {program}"
    return Check("java", found, None if int(version[1]) >= _JAVA_MIN else _ADVICE)
