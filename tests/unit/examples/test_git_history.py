"""The history as changes: applied one after the other they give git's own last tree, always."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.git_history import Change, Entry, GitError, changes, commit_count, head_tree
from tests.unit.examples.repository import AUTHOR_TIME, ODD_NAMES, Repository


class Replayed(Repository):
    """A repository whose history is compared with git's own last tree."""

    def changes(self) -> list[list[Change]]:
        return list(changes(self.path))

    def check(self) -> list[list[Change]]:
        """Apply the changes one after the other; return them by commit."""
        commits = self.changes()
        table: dict[bytes, Entry] = {}
        for change in (change for commit in commits for change in commit):
            if change.entry is None:
                del table[change.path]  # git deletes nothing twice
            else:
                table[change.path] = change.entry
        assert table == head_tree(self.path)
        assert len(commits) == commit_count(self.path)
        return commits


@pytest.fixture
def repository(tmp_path: Path) -> Replayed:
    return Replayed(tmp_path / "repository")


def test_a_root_commit_adds_its_whole_tree(repository: Replayed) -> None:
    repository.write("a")
    repository.write("deep/er/b", "y")
    name = repository.commit()
    (root,) = repository.check()
    assert {(change.path, change.commit, change.time) for change in root} == {
        (b"a", name, AUTHOR_TIME),
        (b"deep/er/b", name, AUTHOR_TIME),
    }


def test_names_are_bytes_of_any_kind(repository: Replayed) -> None:
    names = ODD_NAMES
    for name in names:
        repository.write(name)
    repository.commit()
    repository.write(names[0], "changed")
    repository.remove(names[1])
    repository.commit()
    added, changed = repository.check()
    assert {change.path for change in added} == set(names)
    assert {change.path for change in changed} == set(names[:2])


def test_a_mode_change_is_an_upsert(repository: Replayed) -> None:
    repository.write("tool")
    repository.commit()
    (repository.path / "tool").chmod(0o755)
    repository.commit()
    _, (change,) = repository.check()
    assert change.entry is not None
    assert change.entry.mode == "100755"


def test_a_path_may_be_file_link_submodule_and_directory_in_turn(
    repository: Replayed, tmp_path: Path
) -> None:
    other = Replayed(tmp_path / "other")
    other.write("inside")
    other.commit()
    repository.write("p", "a file")
    repository.commit()
    (repository.path / "p").unlink()
    (repository.path / "p").symlink_to("nowhere")
    repository.commit()
    (repository.path / "p").unlink()
    repository.git("rm", "-q", "--cached", "p")
    repository.git("submodule", "--quiet", "add", str(other.path), "p")
    repository.commit()
    repository.git("rm", "-q", "-f", "p")
    repository.write("p/q", "below")
    repository.commit()
    entries = [
        [change.entry and change.entry.mode for change in commit if change.path == b"p"]
        for commit in repository.check()
    ]
    assert entries == [["100644"], ["120000"], ["160000"], [None]]


def test_a_rename_is_a_delete_and_an_upsert(repository: Replayed) -> None:
    repository.write("before", "the same content, well worth a rename\n" * 20)
    repository.commit()
    repository.git("config", "diff.renames", "copies")
    repository.git("mv", "before", "after")
    repository.commit()
    _, renamed = repository.check()
    assert {change.path: change.entry is None for change in renamed} == {
        b"before": True,
        b"after": False,
    }


def test_an_empty_commit_changes_nothing(repository: Replayed) -> None:
    for _ in range(3):
        repository.commit()
    repository.write("a")
    repository.commit()
    repository.commit()
    assert [len(commit) for commit in repository.check()] == [0, 0, 0, 1, 0]


def test_a_merge_brings_what_its_first_parent_lacks(repository: Replayed) -> None:
    repository.write("a", "1")
    repository.write("gone")
    repository.commit()
    repository.git("checkout", "-q", "-b", "side")
    repository.write("b", "2")
    repository.write("a", "from the side")
    (repository.path / "gone").unlink()
    repository.commit()
    repository.commit()
    repository.git("checkout", "-q", "main")
    repository.write("c", "3")
    repository.commit()
    repository.git("merge", "-q", "--no-ff", "-m", "merged", "side")
    commits = repository.check()
    assert [{change.path for change in commit} for commit in commits] == [
        {b"a", b"gone"},
        {b"c"},
        {b"a", b"b", b"gone"},
    ]


def test_a_merge_that_takes_nothing_changes_nothing(repository: Replayed) -> None:
    repository.write("a")
    repository.commit()
    repository.git("checkout", "-q", "-b", "side")
    repository.write("a", "refused")
    repository.commit()
    repository.git("checkout", "-q", "main")
    repository.commit()
    repository.git("merge", "-q", "--no-ff", "-s", "ours", "-m", "merged", "side")
    assert [len(commit) for commit in repository.check()] == [1, 0, 0]


def test_an_octopus_merge_is_compared_with_its_first_parent(repository: Replayed) -> None:
    repository.write("a")
    repository.commit()
    for branch in ("left", "right"):
        repository.git("checkout", "-q", "-b", branch, "main")
        repository.write(branch)
        repository.commit()
    repository.git("checkout", "-q", "main")
    repository.git("merge", "-q", "--no-ff", "-m", "octopus", "left", "right")
    assert [{change.path for change in commit} for commit in repository.check()] == [
        {b"a"},
        {b"left", b"right"},
    ]


def test_an_unrelated_history_is_merged_in_whole(repository: Replayed) -> None:
    repository.write("a")
    repository.commit()
    repository.git("checkout", "-q", "--orphan", "other")
    repository.git("rm", "-q", "-rf", ".")
    repository.write("b")
    repository.commit()
    repository.git("checkout", "-q", "main")
    repository.git("merge", "-q", "--allow-unrelated-histories", "-m", "merged", "other")
    assert [{change.path for change in commit} for commit in repository.check()] == [{b"a"}, {b"b"}]


def test_commits_follow_their_parents_not_their_clocks(repository: Replayed) -> None:
    names = []
    for number in range(5):
        repository.write("a", str(number))
        repository.git("add", "-A")
        repository.git("commit", "-q", "-m", "m", f"--date={2_000_000_000 - number} +0000")
        names.append(repository.git("rev-parse", "HEAD"))
    assert [commit[0].commit for commit in repository.check()] == names


def test_a_shallow_clone_begins_with_its_roots_whole_tree(
    repository: Replayed, tmp_path: Path
) -> None:
    for name in "abcd":
        repository.write(name)
        repository.commit()
    clone = tmp_path / "clone"
    repository.git("clone", "-q", "--depth", "2", f"file://{repository.path}", str(clone))
    shallow = Replayed(clone)
    assert [len(commit) for commit in shallow.check()] == [3, 1]


def test_a_bare_git_directory_serves_as_well(repository: Replayed) -> None:
    repository.write("a")
    repository.commit()
    assert list(changes(repository.path / ".git")) == repository.changes()


def test_a_subdirectory_stands_for_its_repository(repository: Replayed) -> None:
    repository.write("a")
    repository.write("b/c")
    repository.commit()
    repository.git("config", "diff.relative", "true")
    assert {change.path for change in next(changes(repository.path / "b"))} == {b"a", b"b/c"}
    assert set(head_tree(repository.path / "b")) == {b"a", b"b/c"}


def test_the_users_configuration_changes_nothing(repository: Replayed) -> None:
    repository.write("a", "1\n" * 50)
    repository.write("sub/b")
    repository.commit()
    repository.git("mv", "a", "z")
    repository.commit()
    expected = repository.check()
    for setting in (
        *("log.showRoot=false", "log.showSignature=true", "log.decorate=full"),
        *("log.diffMerges=off", "diff.external=false", "diff.noprefix=true", "color.ui=always"),
        *("core.quotePath=true", "core.abbrev=7", "i18n.logOutputEncoding=UTF-16"),
        *("format.pretty=fuller", "log.date=relative", "log.mailmap=true", "diff.renames=true"),
        *("notes.displayRef=*", "diff.wordRegex=.", "log.abbrevCommit=true", "log.follow=true"),
    ):
        repository.git("config", *setting.split("=", 1))
    repository.git("notes", "add", "-m", "a note")
    assert repository.check() == expected


def test_variables_of_a_calling_git_are_ignored(
    repository: Replayed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Replayed(tmp_path / "other")
    other.write("elsewhere")
    other.commit()
    repository.write("here")
    repository.commit()
    expected = repository.changes()
    monkeypatch.setenv("GIT_DIR", str(other.path / ".git"))
    assert list(changes(repository.path)) == expected


def test_odd_modes_of_old_repositories_are_read_as_git_reads_them(repository: Replayed) -> None:
    blob = repository.git("hash-object", "-w", "--stdin", given=b"x")
    tree = repository.git(
        *("hash-object", "-w", "-t", "tree", "--literally", "--stdin"),
        given=b"100664 old\0" + bytes.fromhex(blob),
    )
    repository.git("reset", "-q", "--soft", repository.git("commit-tree", "-m", "m", tree))
    repository.check()


@pytest.mark.parametrize("object_format", ["sha1", "sha256"])
def test_a_history_reads_both_of_gits_object_formats(tmp_path: Path, object_format: str) -> None:
    path = tmp_path / object_format
    subprocess.run(["git", "init", "-q", f"--object-format={object_format}", str(path)], check=True)
    repository = Replayed(path)
    repository.write("a")
    name = repository.commit()
    ((change,),) = repository.check()
    assert change.commit == name


def test_a_name_longer_than_what_is_read_at_once(repository: Replayed) -> None:
    parts = ["d" * 200] * 15  # paths of 3 kB, a thousand of them cross many reads
    for number in range(60):
        repository.write("/".join([*parts, str(number)]))
    repository.commit()
    (root,) = repository.check()
    assert len(root) == 60


def make_nothing(path: Path) -> None:
    path.mkdir()


def make_file(path: Path) -> None:
    path.write_text("")


def make_unborn(path: Path) -> None:
    Replayed(path)


def make_missing(path: Path) -> None:
    assert not path.exists()


def make_damaged(path: Path) -> None:
    repository = Replayed(path)
    for number in range(3):
        repository.write("a", str(number))
        repository.commit()
    name = repository.git("rev-parse", "HEAD~2^{tree}")
    lost = path / ".git" / "objects" / name[:2] / name[2:]
    lost.unlink()


@pytest.mark.parametrize("make", [make_nothing, make_file, make_unborn, make_missing, make_damaged])
def test_no_history_is_an_error_of_one_line(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "given"
    make(path)
    with pytest.raises(GitError) as error:
        list(changes(path))
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_an_abandoned_reading_ends_git(repository: Replayed) -> None:
    for number in range(50):
        repository.write("a", str(number))
        repository.commit()
    reading = changes(repository.path)
    next(reading)
    reading.close()


def test_a_repository_without_commits_says_so(repository: Replayed) -> None:
    for ask in (head_tree, commit_count, lambda path: list(changes(path))):
        with pytest.raises(GitError, match=r": no commits yet$"):
            ask(repository.path)
