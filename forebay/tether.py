"""Runs a command that dies with the process that started it, however that one ends. Linux only.

``python -I -S tether.py PARENT COMMAND ...``: run as a file, by ``children``; it imports nothing of ours, so
that it costs a few milliseconds. A wrapper and not a ``preexec_fn``, which may deadlock in a process that has
threads. The kernel's signal is tied to the *thread* that started this process, see ``children``.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel to kill us with the parent, make sure that it still lives, and become the command."""
    parent, *command = sys.argv[1:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # The parent may have ended before the request was made; then nothing would ever tell us.
    if os.getppid() != int(parent):
        sys.exit(1)
    os.execvp(command[0], command)  # noqa: S606 - the command comes from our own `children`


if __name__ == "__main__":
    main()
