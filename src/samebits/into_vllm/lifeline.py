"""A worker ends with the engine that started it, even while it waits in native code for a peer that is gone."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


def end_with_parent() -> None:
    """From now on the kernel kills this process when its parent ends. Elsewhere than on Linux, nothing changes.

    vLLM watches its parent from a Python thread, which never runs while the worker spins in a shared-memory collective.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():
        os._exit(1)  # it ended before we could ask
