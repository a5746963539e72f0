"""Compiled kernels for processes that do not compile: run without numba.

numba takes most of a second and of 100 MiB to be imported and to bring back what it has compiled,
and Spark starts Python workers often. So the machine code of a `kernels` module is kept in a file
of its own, an *image*, when a process has gone the long way; the next ones link it (LLVM does) and
call it by numba's calling convention, which is looked at when an image is made: a kernel that is
not called in just this way, or calls for anything but itself, is left out.

An image counts if it was made of the same sources by the same LLVM for the same processor, and if
its checksum says that it is whole. Whatever an image lacks, the module itself is imported for.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from kafkalog.storage_engine import layout

__all__ = ["Image", "find_image", "fingerprint_of", "image_name", "save_image"]

_FORMAT: Final = 1
_LIBRARY: Final = {"memcpy", "memmove", "memset"}
"""What a kernel may call: every process has it."""
_READABLE: Final = 0o644
_STATUS_OK: Final = (0, -2)
"""What numba's functions return when they have not raised: a value, or None."""

_ENTRY: Final = "enter"
_READ: Final = 0x101  # NPY_ARRAY_C_CONTIGUOUS, NPY_ARRAY_ALIGNED
_WRITTEN: Final = _READ | 0x400  # NPY_ARRAY_WRITEABLE
_DATA: Final = object.__basicsize__
"""Where an array has its data's address: PyArrayObject is of NumPy's binary interface.

`__array_interface__` and `ctypes` tell it in ten times the time, for each argument of each call.
"""
_read_address = ctypes.c_uint64.from_address

_Argument = tuple[str, int, bool]
"""An argument's type, dimensions and whether it is only read; an integer has no dimensions."""


class Image:
    """A `kernels` module whose functions are linked at their first use."""

    def __init__(self, module: str, header: dict[str, Any], code: bytes) -> None:
        self.__dict__.update(header["constants"])
        self.names = list(header["kernels"])
        """The functions that it has."""
        self._module = module
        self._kernels = header["kernels"]
        self._code = code

    def __getattr__(self, name: str) -> Any:
        """Link a function; what the image lacks is the module's, which is imported for it."""
        if name.startswith("_"):
            raise AttributeError(name)
        told = self._kernels.get(name)
        if told is None:
            return getattr(importlib.import_module(self._module), name)
        engine = _link(self._code[told["start"] : told["start"] + told["size"]])
        kernel = _Kernel(name, engine, told["arguments"], told["returns"])
        return self.__dict__.setdefault(name, kernel)  # another thread may have linked it, too


class _Kernel:
    """A function of numba's, called without it."""

    __slots__ = ("_arguments", "_engine", "_function", "_name", "_pack", "_results", "_returns")

    def __init__(
        self, name: str, engine: Any, arguments: Sequence[_Argument], returns: int
    ) -> None:
        """`returns` is how many integers: 0 for None, -1 for a bool, else a tuple or one of them.

        One integer is told by 1, a tuple of n by n + 1.
        """
        self._name = name
        self._engine = engine  # it owns the code
        self._arguments = [
            (np.dtype(kind), dimensions, _READ if is_read_only else _WRITTEN)
            for kind, dimensions, is_read_only in arguments
        ]
        self._returns = returns
        letters = ["q" if kind == "int64" and not n else "Q" + "q" * n for kind, n, _ in arguments]
        self._pack = struct.Struct("".join(letters)).pack
        self._results = ctypes.c_int64 * max(returns - 1, 1)
        # A foreign function lets go of the interpreter, as the kernels do.
        prototype = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_char_p, ctypes.c_void_p)
        self._function = prototype(engine.get_function_address(_ENTRY))

    def __call__(self, *given: Any) -> Any:
        """Call it. Raises TypeError for arguments that it is not compiled for."""
        if len(given) != len(self._arguments):
            raise TypeError(f"{self._name} takes {len(self._arguments)} arguments")
        words: list[int] = []
        for value, (dtype, dimensions, flags) in zip(given, self._arguments, strict=True):
            if not dimensions:
                words.append(value)
                continue
            if not isinstance(value, np.ndarray) or value.dtype != dtype:
                raise TypeError(f"{self._name}: expected an array of {dtype}")
            if value.ndim != dimensions or value.flags.num & flags != flags:
                raise TypeError(
                    f"{self._name}: an array is not {dimensions}-dimensional, contiguous, "
                    "aligned or writable"
                )
            words += (_read_address(id(value) + _DATA).value, *value.shape)
        try:
            packed = self._pack(*words)
        except struct.error as error:
            raise TypeError(f"{self._name}: expected integers of 64 bits: {error}") from error
        results = self._results()
        status = self._function(packed, results)
        if status not in _STATUS_OK:
            raise ArithmeticError(f"{self._name} has failed with status {status}")
        match self._returns:
            case 0:
                return None
            case -1:
                return bool(results[0] & 0xFF)
            case 1:
                return results[0]
        return tuple(results)


def _link(code: bytes) -> Any:
    """Put an object file into memory; returns what owns it and knows its functions."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), jit=True, codemodel="jitdefault"
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


# --- files ---------------------------------------------------------------------------------------
def image_name(module: str, fingerprint: str) -> str:
    """Return the name of an image's file: installations that share a directory have their own."""
    return f"{module}.{fingerprint[:16]}.image"


def find_image(module: str, directories: Sequence[Path]) -> Image | None:
    """Return the image of a module that counts, from the first directory that has it."""
    with suppress(OSError):
        fingerprint = fingerprint_of(module)
        for directory in directories:
            with suppress(OSError, ValueError, KeyError, TypeError):
                path = directory / image_name(module, fingerprint)
                if not _is_trusted(path, module):
                    continue
                first, _, code = path.read_bytes().partition(b"\n")
                header = json.loads(first)
                is_same = header["fingerprint"] == fingerprint
                if is_same and header["checksum"] == _checksum(header, code):
                    return Image(module, header, code)
    return None


def save_image(module: str, directory: Path, fingerprint: str) -> None:
    """Keep the machine code of an imported `kernels` module; does nothing where it cannot.

    `fingerprint` is that from before the import: sources that have changed since are not those that
    were compiled, and then there is no image.
    """
    with suppress(Exception):  # numba's inner parts may be others one day, and a disk full
        if fingerprint_of(module) != fingerprint:
            return
        header: dict[str, Any] = {"fingerprint": fingerprint}
        loaded = vars(sys.modules[module])
        header["constants"] = {
            name: value for name, value in loaded.items() if name.isupper() and type(value) is int
        }
        header["kernels"] = {}
        code = b""
        for made in _compiled(loaded):
            told = {"arguments": made.arguments, "returns": made.returns}
            header["kernels"][made.name] = {**told, "start": len(code), "size": len(made.code)}
            code += made.code
        header["checksum"] = _checksum(header, code)
        directory.mkdir(parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(prefix=layout.TEMPORARY, dir=directory)
        try:
            with os.fdopen(fd, "wb") as file:
                os.fchmod(fd, _READABLE)  # who may run the program may link what it has compiled
                file.write(json.dumps(header).encode() + b"\n" + code)
            # Not synced: a torn one has a wrong checksum, and is made again.
            os.replace(temporary, directory / image_name(module, fingerprint))
        except BaseException:
            os.unlink(temporary)
            raise


def fingerprint_of(module: str) -> str:
    """Return what an image has to be made of: sources, LLVM, processor.

    Raises OSError where the sources are no files, as in an archive.
    """
    import llvmlite.binding as llvm

    told = hashlib.sha256(f"{_FORMAT} {llvm.llvm_version_info} {sys.byteorder}".encode())
    told.update(f"{llvm.get_process_triple()} {llvm.get_host_cpu_name()}".encode())
    told.update(llvm.get_host_cpu_features().flatten().encode())
    for source in (_origin(module), layout.__file__, __file__):
        told.update(Path(source).read_bytes())
    return told.hexdigest()


def _is_trusted(path: Path, module: str) -> bool:
    """Tell whether a file may be run: nobody wrote it, or can, who could not change what runs."""
    found, sources = path.stat(), Path(_origin(module)).stat()
    others = stat.S_IWGRP | stat.S_IWOTH
    return found.st_uid in (0, os.getuid(), sources.st_uid) and not found.st_mode & others


def _origin(module: str) -> str:
    found = importlib.util.find_spec(module)
    assert found is not None and found.origin is not None
    return found.origin


def _checksum(header: dict[str, Any], code: bytes) -> str:
    told = {name: value for name, value in header.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(told).encode() + code).hexdigest()


# --- numba's side --------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Compiled:
    name: str
    arguments: list[_Argument]
    returns: int
    code: bytes


def _compiled(loaded: dict[str, Any]) -> Iterator[_Compiled]:
    """Yield the kernels of a module that an image can have."""
    for name, dispatcher in loaded.items():
        overloads = getattr(dispatcher, "overloads", None)
        if not overloads or dispatcher.targetoptions.get("forceinline"):
            continue
        with suppress(ValueError):
            (result,) = overloads.values()
            arguments = [_argument(each) for each in result.signature.args]
            returns = _returned(result.signature.return_type)
            machine = dispatcher.targetctx.codegen()._tm
            symbol = result.fndesc.llvm_func_name
            code = _object_file(machine, result.library, symbol, arguments)
            yield _Compiled(name, arguments, returns, code)


def _argument(kind: Any) -> _Argument:
    if str(kind) in ("int64", "uint64"):
        return str(kind), 0, True
    if getattr(kind, "layout", None) != "C" or not kind.aligned:
        raise ValueError(f"{kind}: not known how it is passed")
    return np.dtype(str(kind.dtype)).name, kind.ndim, not kind.mutable


def _returned(kind: Any) -> int:
    told = {"none": 0, "bool": -1, "int64": 1}.get(str(kind))
    if told is not None:
        return told
    if str(getattr(kind, "dtype", "")) != "int64" or not hasattr(kind, "count"):
        raise ValueError(f"{kind}: not known how it is returned")
    return int(kind.count) + 1


def _object_file(machine: Any, library: Any, symbol: str, arguments: list[_Argument]) -> bytes:
    """Compile one function of a library, without numba's wrappers, to an object file.

    Raises ValueError if it does not take the arguments as told, or needs another function.
    """
    import llvmlite.binding as llvm

    module = library._get_module_for_linking().clone()
    entry, types = _entry(symbol, arguments)
    taken = [str(argument.type) for argument in module.get_function(symbol).arguments]
    if taken != types:
        raise ValueError(f"{symbol}: takes {taken}")
    module.link_in(llvm.parse_assembly(entry))
    for one in (*module.functions, *module.global_variables):
        if not one.is_declaration:
            one.linkage = "external" if one.name == _ENTRY else "internal"
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    for one in (*module.functions, *module.global_variables):
        if one.is_declaration and one.name not in _LIBRARY and not one.name.startswith("llvm."):
            raise ValueError(f"{symbol}: needs {one.name}")
    code: bytes = machine.emit_object(module)
    return code


def _entry(symbol: str, arguments: list[_Argument]) -> tuple[str, list[str]]:
    """Return a function that calls a kernel with the words of `_Kernel.__call__`, and its types.

    numba wants five words and two for each dimension of an array. They follow from its address and
    its shape, and to hand over each from Python costs more than many a kernel's work.
    """
    lines: list[str] = []

    def new(operation: str) -> str:
        lines.append(f"%v{len(lines)} = {operation}")
        return lines[-1].split()[0]

    given = ["ptr %results", f"ptr {new('alloca ptr')}"]  # the second one is for what is raised
    place = 0
    for kind, dimensions, _ in arguments:
        words = []
        for _ in range(1 + dimensions):
            words.append(new(f"load i64, ptr {new(f'getelementptr i64, ptr %words, i64 {place}')}"))
            place += 1
        if not dimensions:
            given.append(f"i64 {words[0]}")
            continue
        item, counts = np.dtype(kind).itemsize, ["1"]
        for length in reversed(words[1:]):
            counts.insert(0, new(f"mul i64 {length}, {counts[0]}"))
        strides = [new(f"mul i64 {count}, {item}") for count in counts[1:]]
        data = new(f"inttoptr i64 {words[0]} to ptr")
        given += ["ptr null", "ptr null", f"i64 {counts[0]}", f"i64 {item}", f"ptr {data}"]
        given += [f"i64 {word}" for word in (*words[1:], *strides)]
    types = [each.split()[0] for each in given]
    status = new(f'call i32 @"{symbol}"({", ".join(given)})')
    declared = f'declare i32 @"{symbol}"({", ".join(types)})'
    head = f"define i32 @{_ENTRY}(ptr %words, ptr %results) {{"
    return "\n".join([declared, head, *lines, f"ret i32 {status}", "}"]), types
