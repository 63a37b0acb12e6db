"""A folder for what is on its way, weights or sockets. One that a killed process left is removed by the next job."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX, LOCK = "samebits-", "lock"
_SHORT = "/tmp"
_RANDOM = 9  # what is added to the prefix, and a slash


@contextmanager
def scratch_folder(longest: int | None = None) -> Iterator[Path]:
    """A new folder in the system's temporary one, removed at the end, with all that dead jobs of this user left there.

    A living job holds a lock on a file of its folder, which the kernel lets go of however the process ends. Where the
    path would have more than `longest` bytes, the folder lies in /tmp.
    """
    remove_left_behind()
    parent = tempfile.gettempdir()
    if longest is not None and len(os.fsencode(parent)) + len(PREFIX) + _RANDOM > longest:
        parent = _SHORT
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent) as name:
        # Named when it is locked: no other job ever sees it free.
        unnamed = Path(name) / f"{LOCK}.new"
        with unnamed.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            unnamed.rename(Path(name) / LOCK)
            yield Path(name)


def remove_left_behind() -> None:
    """Removes the scratch folders of this user whose job is gone. What is not surely one of these stays."""
    parents = {Path(tempfile.gettempdir()), Path(_SHORT)}
    for folder in [folder for parent in parents for folder in parent.glob(f"{PREFIX}*")]:
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # in use, without a lock, or gone meanwhile
            continue
