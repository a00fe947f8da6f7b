"""SIGTERM and Ctrl-C ask the loop to stop; the loop saves and leaves.

The first signal sets a flag that the loop reads between micro-batches.  A second Ctrl-C interrupts at once, without
saving.  Exit status, as shells have it: 130 after Ctrl-C, 143 after SIGTERM.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class StopFlag:
    """signum: of the first signal, 0 until one came."""

    def __init__(self) -> None:
        self.signum = 0

    def __bool__(self) -> bool:
        return self.signum != 0

    @property
    def exit_code(self) -> int:
        """128 + signal number, 0 where none came."""
        return 128 + self.signum if self.signum else 0


@contextmanager
def stop_signals() -> Iterator[StopFlag]:
    """Catch SIGTERM and SIGINT in the main thread for the time of the block."""
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        if flag.signum and signum == signal.SIGINT:
            raise KeyboardInterrupt
        if not flag.signum:
            # os.write: a handler runs between any two bytecodes, also inside the printing that `say` would enter again
            line = f"{signal.Signals(signum).name} received: saving after this micro-batch"
            os.write(2, f"\n{line} (Ctrl-C again leaves at once)\n".encode())
        flag.signum = signum

    previous: dict[int, Any] = {}
    for signum in (signal.SIGTERM, signal.SIGINT):
        previous[signum] = signal.signal(signum, handle)
    try:
        yield flag
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
