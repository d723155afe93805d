"""Killed and damaged saves: out of the way of a run, without a copy where a move is one."""

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from levanter_diloco.checkpoint import recovery
from levanter_diloco.checkpoint.recovery import make_room, set_unfinished_aside


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryFileSystem]:
    """An object store in memory, in which nothing may be copied."""
    fs = fsspec.filesystem("memory")

    def copy(*args: object, **options: object) -> None:
        raise AssertionError(f"copied {args}")

    monkeypatch.setattr(MemoryFileSystem, "cp_file", copy)
    fs.pipe({"/run/step-3/d/part": b"arrays", "/run/step-3/manifest.ocdbt": b"index"})
    fs.pipe({"/run/step-2/d/part": b"arrays", "/run/step-2/metadata.json": b"{}"})
    yield fs
    fs.rm("/run", recursive=True)


def test_killed_save_is_moved_on_a_file_system(tmp_path: Path) -> None:
    for name, finished in (("step-3", False), ("step-2", True)):
        (tmp_path / name / "d").mkdir(parents=True)
        (tmp_path / name / "d" / "part").write_text("arrays")
        if finished:
            (tmp_path / name / "metadata.json").write_text("{}")
    set_unfinished_aside([str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "step-2"]
    assert (tmp_path / "damaged" / "step-3" / "d" / "part").read_text() == "arrays"
    make_room(str(tmp_path / "step-3"))
    assert (tmp_path / "damaged" / "step-3").exists()


def test_killed_save_stays_in_an_object_store_until_its_name_is_needed(store: MemoryFileSystem) -> None:
    set_unfinished_aside(["memory://run"])
    assert store.exists("/run/step-3/d/part") and not store.exists("/run/damaged")
    make_room("memory://run/step-4")
    make_room("memory://run/step-2")  # finished: the host decides
    assert store.exists("/run/step-3/d/part") and store.exists("/run/step-2/metadata.json")
    make_room("memory://run/step-3")
    assert not store.exists("/run/step-3")


def test_damaged_checkpoint_of_an_object_store_is_marked(store: MemoryFileSystem) -> None:
    recovery._set_aside(["memory://run/step-2", "memory://elsewhere/step-2"], ["memory://run"])
    assert not store.exists("/run/step-2/metadata.json")
    assert store.cat("/run/step-2/metadata.damaged.json") == b"{}" and store.exists("/run/step-2/d/part")
    make_room("memory://run/step-2")
    assert not store.exists("/run/step-2")
