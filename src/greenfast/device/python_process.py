"""Start Python processes that import nothing from the current folder.

``python -c`` puts the current folder first in ``sys.path``, so a file such as ``multiprocessing.py`` in a solution's
folder would run in the judge's own workers. Python's ``multiprocessing`` starts its processes that way, and also its
resource tracker. Every process here starts isolated (``-I``: no current folder, no ``PYTHON*`` variable, no user site)
in an empty folder, and gets the folders of its modules as arguments.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

#: The folder of the package; it may be the current folder.
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
_CHILD = (
    "import sys; fd, folder, *sys.path[:] = sys.argv[1:]; "
    "from greenfast.device.python_process import main; main(int(fd), folder)"
)
#: Environment variables with folders; relative ones have another meaning in a process with another folder.
_FOLDERS = ("GREENFAST_CACHE_DIR", "XDG_CACHE_HOME", "CUDA_PATH", "CUDA_HOME")


def module_path(*, current_last: bool = False, needed: Sequence[object] = ()) -> list[str]:
    """Return the absolute folders in which this process finds modules, for a process that it starts.

    The current folder is left out, or comes last with ``current_last``: there it cannot replace any module of Python or
    of an installed package. needed: functions and objects; the folders of their modules come last.
    """
    here = os.path.realpath(os.getcwd())
    entries = list(dict.fromkeys(os.path.abspath(entry) for entry in sys.path))
    path = [entry for entry in entries if os.path.realpath(entry) != here]
    last = [_ROOT, *(folder for item in needed for folder in _module_folders(item))]
    last += [here] if current_last and len(path) < len(entries) else []
    resolved = {os.path.realpath(entry) for entry in path}
    return [*path, *dict.fromkeys(folder for folder in last if folder not in resolved)]


def _module_folders(item: object) -> list[str]:
    """Return the folder of the top-level package or module that defines an object, a class or a function."""
    if isinstance(item, functools.partial):
        return [folder for part in (item.func, *item.args) for folder in _module_folders(part)]
    name = getattr(item, "__module__", None) or ""
    file = getattr(sys.modules.get(name), "__file__", None)
    if not file or name == "__main__":
        return []
    parts = name.count(".") + 1 + (os.path.basename(file) == "__init__.py")
    folder = os.path.realpath(file)
    for _ in range(parts):
        folder = os.path.dirname(folder)
    return [folder]


def isolated(code: str, *arguments: str) -> list[str]:
    """Return the command that runs Python code isolated; the code reads ``sys.argv``."""
    return [sys.executable or "python3", "-I", "-c", code, *arguments]


def environment() -> dict[str, str]:
    """Return this process's environment for an isolated one: without ``PYTHON*``, with absolute folders."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return kept | {name: os.path.abspath(os.path.expanduser(kept[name])) for name in _FOLDERS if kept.get(name)}


def empty_folder() -> str:
    """Return an empty folder that no other user can write: one per user; it is not removed."""
    folder = os.path.join(tempfile.gettempdir(), f"greenfast-empty-{os.getuid()}")
    with contextlib.suppress(OSError):
        os.mkdir(folder, 0o500)
    try:
        status = os.lstat(folder)
        own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o277
        if own and not os.listdir(folder):
            return folder
    except OSError:
        pass
    return tempfile.mkdtemp(prefix="greenfast-empty-")  # somebody else's has that name


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block SIGINT for the start of a process: one that is still importing would print a traceback on an interrupt."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class PythonProcess:
    """A process that calls ``function(connection, *arguments)``; both are pickled.

    It ignores interrupts, and ends when this process ends or closes its end of ``connection``.
    connection: raises EOFError or OSError once the process has ended.
    """

    def __init__(
        self,
        function: Any,
        *arguments: Any,
        in_current_folder: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start it.

        in_current_folder: it runs in the current folder and may import from there, after all others. variables: its
        environment, by default this process's.
        """
        self.connection, theirs = Pipe()
        path = module_path(current_last=in_current_folder, needed=(function, *arguments))
        folder = os.getcwd() if in_current_folder else empty_folder()
        try:
            with interrupts_blocked():
                self._process = subprocess.Popen(
                    isolated(_CHILD, str(theirs.fileno()), folder, *path),
                    stdin=subprocess.DEVNULL,
                    cwd=empty_folder(),
                    env=environment() if variables is None else variables,
                    pass_fds=(theirs.fileno(),),
                )
        finally:
            theirs.close()
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _end, self._owner, self._process, self.connection)
        with contextlib.suppress(OSError):  # it has ended already; the first answer shows this
            self.connection.send((function, arguments))

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def is_running(self) -> bool:
        """Return whether it runs, and was not inherited through a fork: its connection then belongs to the parent."""
        return self._owner == os.getpid() and self._process.poll() is None

    def exit_code(self, seconds: float | None) -> int | None:
        """Wait for the process to end; return its exit code, a negative signal number, or None if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._finalizer()


def _end(owner: int, process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    if owner == os.getpid():
        process.kill()
        process.wait()


def describe_exit(code: int | None) -> str:
    """Return the name of the signal that ended a process, else its exit code in words."""
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def main(fd: int, folder: str) -> None:
    """Run in the new process: call the function that the other end of the connection sends."""
    connection = Connection(fd)
    threading.Thread(target=_end_with_parent, args=(fd,), daemon=True).start()
    os.chdir(folder)
    function, arguments = connection.recv()
    function(connection, *arguments)


def _end_with_parent(fd: int) -> None:
    """End this process when the other end of the connection is closed, also while it computes."""
    poller = select.poll()
    poller.register(fd, 0)  # only a hang-up is reported
    poller.poll()
    os._exit(1)
