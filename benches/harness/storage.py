"""Storage that isn't in the page cache, and storage that is limited to a rate."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.turns import CannotError

GROUPS = Path("/sys/fs/cgroup")


def read_bytes() -> int:
    """Returns the number of bytes that this process has read from storage."""
    text = Path("/proc/self/io").read_text()
    return int(text.split("\nread_bytes:")[1].split()[0])


def empty_cache(path: Path) -> None:
    """Removes a file from the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def device(path: Path) -> str:
    """Returns the numbers of the disk that stores a file, as `major:minor`."""
    number = path.stat().st_dev
    folder = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not folder.exists():
        raise CannotError(f"{path} isn't on a disk")
    # Only a whole disk can be limited, not a partition.
    folder = folder.resolve()
    return ((folder.parent if (folder / "partition").exists() else folder) / "dev").read_text().strip()


@contextmanager
def limited(path: Path, megabytes: float) -> Iterator[None]:
    """Limits how fast this process and the children that it starts read from the disk of `path`.

    Args:
        path: Existing file on the disk.
        megabytes: MB per second.

    Raises:
        CannotError: If the process may not create control groups that limit storage.
    """
    disk, most = device(path), int(megabytes * 1e6)
    first = (GROUPS / "blkio").is_dir()
    root = GROUPS / "blkio" if first else GROUPS
    name = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if first <= (":blkio:" in line))
    home, group = root / name.rpartition(":")[2].lstrip("/"), root / f"fastpipe-bench-{os.getpid()}"
    try:
        if not first:
            (root / "cgroup.subtree_control").write_text("+io")
        group.mkdir()
        if first:
            (group / "blkio.throttle.read_bps_device").write_text(f"{disk} {most}")
        else:
            (group / "io.max").write_text(f"{disk} rbps={most}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        raise CannotError(f"storage can't be limited: {error}. It needs root and the controller for I/O") from None
    try:
        yield
    finally:
        (home / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()
