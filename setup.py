"""Compile the kernels: each file that has a type sheet beside it becomes an extension.

The sheets are `kernels.pxd` and those in a folder `kernels`.

Without a C compiler the kernels stay Python. KAFKALOG_REQUIRE_COMPILER=1 makes that an error.
KAFKALOG_KERNELS=checked compiles bounds checks in, KAFKALOG_KERNELS=sanitized the address and
undefined-behaviour sanitizers as well.
"""

import os
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildKernels(build_ext):
    """Leaves a kernel as Python where it cannot be compiled.

    setuptools' own `optional` does not catch a missing compiler.
    """

    def build_extension(self, extension: Extension) -> None:
        """Compile one extension."""
        try:
            super().build_extension(extension)
        except Exception as error:  # setuptools renames its errors from release to release
            if os.environ.get("KAFKALOG_REQUIRE_COMPILER"):
                raise
            self.warn(f"{extension.name} stays Python, much slower: {error}")


kind = os.environ.get("KAFKALOG_KERNELS", "")
if kind not in ("", "checked", "sanitized"):
    raise SystemExit(f"KAFKALOG_KERNELS: expected checked or sanitized, found {kind}")
if kind == "sanitized":
    compile_flags = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    link_flags = ["-fsanitize=address,undefined"]
else:
    # What the bounds checks find does not depend on how fast it is found.
    compile_flags = ["-O1" if kind else "-O3", "-g0"]
    link_flags = [] if sys.platform == "darwin" else ["-s"]  # Apple's linker knows no such flag
extensions = [
    Extension(
        ".".join(sheet.with_suffix("").parts),
        [str(sheet.with_suffix(".py"))],
        define_macros=[
            ("Py_LIMITED_API", "0x030b0000"),  # one build for every Python from 3.11 on
            ("CYTHON_INLINE", "inline __attribute__((always_inline))"),  # else decoding is slower
        ],
        # Sums wrap as in Java: -fwrapv.
        extra_compile_args=["-fwrapv", *compile_flags],
        extra_link_args=link_flags,
        py_limited_api=True,
        optional=True,
    )
    for sheet in sorted(Path("kafkalog").rglob("*.pxd"))
    if "kernels" in (sheet.stem, sheet.parent.name)
]
setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=cythonize(
        extensions,
        build_dir=f"build/c-{kind or 'fast'}",
        compiler_directives={
            "language_level": 3,
            "annotation_typing": False,  # the types stand in the sheets
            "infer_types": True,
            "boundscheck": bool(kind),
            "wraparound": False,
            "cdivision": True,
            "initializedcheck": False,
            "show_performance_hints": False,
        },
    ),
    options={
        "bdist_wheel": {"py_limited_api": "cp311"},
        "build_ext": {"parallel": True},  # one gcc for each processor
    },
)
