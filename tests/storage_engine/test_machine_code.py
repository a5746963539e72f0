"""Compiled kernels without numba: images of them, and what happens where there is none."""

from __future__ import annotations

import errno
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kafkalog.storage_engine import kernel_cache, machine_code

ROOT = Path(__file__).parents[2]
KERNELS = "kafkalog.storage_engine.partitioner.kernels"
FINGERPRINT = machine_code.fingerprint_of(KERNELS)
KEYS = np.frombuffer(b"some-key", dtype=np.uint8)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place with the image of the smallest module."""
    if os.environ.get("NUMBA_DISABLE_JIT"):
        pytest.skip("nothing is compiled")
    importlib.import_module(KERNELS)
    place = tmp_path_factory.mktemp("images")
    machine_code.save_image(KERNELS, place, FINGERPRINT)
    return place


def found_in(directory: Path) -> machine_code.Image:
    image = machine_code.find_image(KERNELS, [directory])
    assert image is not None
    return image


def arguments() -> list[Any]:
    zero, size = np.zeros(1, dtype=np.int64), np.full(1, len(KEYS))
    return [KEYS, zero, size, 1000, np.zeros(1, dtype=np.int32)]


def test_a_linked_kernel_does_what_the_compiled_one_does(directory: Path) -> None:
    from kafkalog.storage_engine.partitioner import kernels

    linked, compiled = arguments(), arguments()
    assert found_in(directory).murmur2_partitions(*linked) is True
    assert kernels.murmur2_partitions(*compiled)
    assert linked[-1] == compiled[-1] > 0
    linked[2] += 1  # one byte beyond the keys
    assert found_in(directory).murmur2_partitions(*linked) is False


def test_a_kernel_outlives_the_image_it_is_of(directory: Path) -> None:
    kernel = found_in(directory).murmur2_partitions
    for _ in range(50):
        assert kernel(*arguments())


def strided() -> Any:
    return np.zeros(4, dtype=np.int64)[::2]


def unaligned() -> Any:
    return np.frombuffer(bytes(9), dtype=np.int64, count=1, offset=1)


def read_only() -> Any:
    array = np.zeros(1, dtype=np.int32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, np.zeros(8, dtype=np.int8)),
        (1, np.zeros((1, 1), dtype=np.int64)),
        (1, strided()),
        (1, unaligned()),
        (3, 1.5),
        (3, 2**63 + 5),
        (4, read_only()),
        (4, [0]),
    ],
    ids=["type", "dimensions", "strides", "alignment", "number", "size", "read-only", "no array"],
)
def test_what_the_kernel_is_not_compiled_for_is_refused(
    directory: Path, place: int, value: Any
) -> None:
    given = arguments()
    given[place] = value
    with pytest.raises(TypeError):
        found_in(directory).murmur2_partitions(*given)
    with pytest.raises(TypeError, match="takes 5"):
        found_in(directory).murmur2_partitions()


@pytest.mark.parametrize("how", ["cut", "changed", "another's", "no header", "no object", "empty"])
def test_an_image_that_is_not_whole_or_of_another_making_does_not_count(
    directory: Path, tmp_path: Path, how: str
) -> None:
    data = (directory / machine_code.image_name(KERNELS, FINGERPRINT)).read_bytes()
    first, _, code = data.partition(b"\n")
    if how == "cut":
        data = data[:-1]
    elif how == "changed":
        data = data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]
    elif how == "another's":
        header = {**json.loads(first), "fingerprint": "0" * 64}
        data = json.dumps(header).encode() + b"\n" + code
    else:
        data = {"empty": b"", "no object": b"[]\n", "no header": b"\xff\n" + code}[how]
    (tmp_path / machine_code.image_name(KERNELS, FINGERPRINT)).write_bytes(data)
    assert machine_code.find_image(KERNELS, [tmp_path]) is None
    assert machine_code.find_image(KERNELS, [tmp_path, directory]) is not None


def test_an_image_that_others_can_write_does_not_count(directory: Path, tmp_path: Path) -> None:
    name = machine_code.image_name(KERNELS, FINGERPRINT)
    copy = Path(shutil.copy(directory / name, tmp_path))
    assert machine_code.find_image(KERNELS, [tmp_path]) is not None
    copy.chmod(0o666)
    assert machine_code.find_image(KERNELS, [tmp_path]) is None


def test_what_an_image_lacks_is_the_modules(directory: Path) -> None:
    from kafkalog.storage_engine.partitioner import kernels

    image = found_in(directory)
    assert image.RELEASE is kernels.RELEASE
    with pytest.raises(AttributeError):
        _ = image.nothing_of_this_name


def test_a_directory_that_cannot_be_written_has_no_image(directory: Path, tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_bytes(b"")
    machine_code.save_image(KERNELS, place, FINGERPRINT)
    assert machine_code.find_image(KERNELS, [place]) is None


def test_sources_that_changed_while_they_were_compiled_have_no_image(tmp_path: Path) -> None:
    machine_code.save_image(KERNELS, tmp_path, "0" * 64)
    assert list(tmp_path.iterdir()) == []


def test_an_image_that_cannot_be_put_in_place_leaves_nothing(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: str, target: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        machine_code.save_image(KERNELS, tmp_path, FINGERPRINT)
    assert list(tmp_path.iterdir()) == []


PROGRAM = """
import sys
from pathlib import Path
import pyarrow as pa
import kafkalog
pairs = pa.table({"key": pa.array([b"a", b"b", b"a"]), "value": pa.array([b"1", b"2", b"3"])})
with kafkalog.open(Path(sys.argv[1])) as log:
    log.create_topic("t", 2, {"compression.type": "lz4"})
    log.append("t", pairs, now_ms=1_700_000_000_000)
    batches = [batch for number in (0, 1) for batch in log.read("t", number)]
    values = [value for batch in batches for value in batch["value"].to_pylist()]
    newest = [value for batch in log.latest("t") for value in batch["value"].to_pylist()]
assert sorted(values) == [b"1", b"2", b"3"], values
assert sorted(newest) == [b"2", b"3"], newest
print("numba" in sys.modules)
"""


def run(log: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(log)],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.slow
def test_a_second_process_writes_and_reads_without_numba(tmp_path: Path) -> None:
    if any(name.startswith("NUMBA_") for name in os.environ.keys() - {kernel_cache.VARIABLE}):
        pytest.skip("numba is told to compile otherwise, so images are not looked at")
    run(tmp_path / "first")  # compiles what was not compiled here yet
    assert run(tmp_path / "second") == "False"


@pytest.mark.slow
def test_numbas_settings_are_heeded(tmp_path: Path) -> None:
    run(tmp_path / "first")
    assert run(tmp_path / "second", NUMBA_CAPTURED_ERRORS="new_style") == "True"


@pytest.mark.slow
def test_images_do_what_the_kernels_tests_say() -> None:
    if os.environ.get("NUMBA_DISABLE_JIT") or os.environ.get("NUMBA_BOUNDSCHECK"):
        pytest.skip("images are made of what is compiled in the ordinary way")
    files = sorted(str(path) for path in (ROOT / "tests").glob("*/test_*kernels.py"))
    assert len(files) >= 4
    plugin = ["-p", "tests.storage_engine.as_images", "-p", "no:cacheprovider", "-q", "-x"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
