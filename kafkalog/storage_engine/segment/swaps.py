"""Replace segments step by step: the names that a swap gives, and what a dead one has left.

`segments` says which files are live at each step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.segment.segments import resolve, scan


def finish_swaps(directory: Path) -> None:
    """Apply the result of `list_segments` to the disk: finish or undo a dead process's swap.

    The caller holds the cleaner lock and, exclusively, the segments lock; or it holds the root's
    lock alone. The process may die at any step; the next call continues. `.deleted` files stay for
    readers with a recent listing (`sweep_deleted`). Raises CorruptLogError if the batches of a
    `.log.swap` do not follow each other as listed.
    """
    found = resolve(directory, is_strict=True)
    if not (found.swaps or found.dead_swaps or found.cleaned):
        return
    # Make the names that the dead process gave durable before building on them.
    files.sync_directory(directory)
    # Remove dead .swap files first: they are dead only while the .cleaned file exists.
    _remove(directory, found.dead_swaps, layout.SWAP)
    _remove(directory, found.cleaned, layout.CLEANED)
    # The replaced files are known only while the last .log.swap exists.
    retire(directory, found.replaced)
    swap_in(directory, found.swaps)
    files.sync_directory(directory)


def swap_in(directory: Path, found: Mapping[int, Collection[str]]) -> None:
    """Give `.swap` files, by base offset and suffix, their final names; the caller syncs these.

    Logs come first, durably. Next to a `.log.swap` every file of that base counts as replaced. If a
    power cut lost only the log's new name, that would include new files, such as the list of
    aborted transactions.
    """
    logs = {base for base in found if layout.LOG in found[base]}
    for base in sorted(logs):
        _swap_in(directory, base, layout.LOG)
    if logs:
        files.sync_directory(directory)
    for base in sorted(found):
        for suffix in layout.SEGMENT_SUFFIXES:
            if suffix in found[base] and suffix != layout.LOG:
                _swap_in(directory, base, suffix)


def _swap_in(directory: Path, base: int, suffix: str) -> None:
    path = directory / layout.segment_file(base, suffix, layout.SWAP)
    if path.exists():
        files.rename(path, directory / layout.segment_file(base, suffix))


def _remove(directory: Path, found: dict[int, set[str]], stage: str) -> None:
    for base, suffixes in sorted(found.items()):
        for suffix in sorted(suffixes):
            files.remove(directory / layout.segment_file(base, suffix, stage))
    if found:
        files.sync_directory(directory)


def retire(
    directory: Path,
    base_offsets: Iterable[int],
    *,
    suffixes: Iterable[str] = layout.SEGMENT_SUFFIXES,
) -> None:
    """Rename the files of segments to `.deleted`, durably.

    Skips missing files. With its `.log`, also removes a segment's key index at once. Keeps producer
    snapshots, because segments alone do not show which are needed; see
    `producer_snapshot.sweep_snapshots`. The caller holds the segments lock exclusively.
    """
    base_offsets, suffixes = sorted(base_offsets), tuple(suffixes)
    wanted = [(base, suffix) for base in base_offsets for suffix in suffixes]
    changed = layout.LOG in suffixes and remove_key_indexes(directory, base_offsets)
    for base, suffix in wanted:
        path = directory / layout.segment_file(base, suffix)
        if path.exists():
            files.rename(path, directory / layout.segment_file(base, suffix, layout.DELETED))
            changed = True
    if changed:
        files.sync_directory(directory)


def remove_key_indexes(directory: Path, base_offsets: Iterable[int]) -> bool:
    """Remove the key indexes of segments; return whether there were any.

    `sync_directory` makes it durable. A key index may exist only while its segment is live. A
    process that replaces or removes a segment calls this first.
    """
    found = False
    for base in base_offsets:
        path = directory / layout.key_index_file(base)
        if path.exists():
            files.remove(path)
            found = True
    return found


def sweep_deleted(directory: Path, *, older_than_ms: int, now_ms: int) -> int:
    """Remove `.deleted` segment files that got that name at least `older_than_ms` ago.

    Returns their number. Needs no lock: no reader opens such a file, and open ones stay readable.
    The canary is not a segment file. Kafka: file.delete.delay.ms.
    """
    count = 0
    retired = [name for name, _, _, stage in scan(directory) if stage == layout.DELETED]
    for path in (directory / name for name in sorted(retired)):
        try:
            # Renaming a file changes its ctime, and nothing changes that of a retired file.
            changed_ms = path.lstat().st_ctime_ns // 1_000_000
        except FileNotFoundError:
            continue  # another sweep
        if changed_ms <= now_ms - older_than_ms:
            files.remove(path)
            count += 1
    return count
