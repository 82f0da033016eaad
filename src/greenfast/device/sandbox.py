"""What a process gives up before it runs or compiles what others wrote. Standard library only, to start fast.

Linux offers several mechanisms, and each may be missing or forbidden where the judge runs (a container, an old kernel):
``confine``, of a solution's process, and ``confine_compiler`` apply what they can. docs/judging.md says what none of
them protects from.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import platform
import resource
import signal
import struct
from collections.abc import Sequence

_LIBC = ctypes.CDLL(None, use_errno=True)

# <linux/prctl.h>
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWNET = 0x08000000, 0x10000000, 0x40000000

# <linux/landlock.h>; the system calls have these numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _RULE_PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_TRUNCATE, _CONTROL_DEVICE = 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _CONTROL_DEVICE  # of a file, not a folder
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # by version, how many rights on files there are; 16 from version 5 on
_NETWORK_SINCE, _SCOPES_SINCE = 4, 6

#: Seconds of processor time, bytes and processes that a solution's code may use.
CPU_S = 1200
DATA_BYTES = 16 << 30
FILE_BYTES = 1 << 30
PROCESSES = 4096
_LIMITS = {
    resource.RLIMIT_CPU: CPU_S,
    resource.RLIMIT_DATA: DATA_BYTES,
    resource.RLIMIT_FSIZE: FILE_BYTES,
    resource.RLIMIT_NPROC: PROCESSES,
    resource.RLIMIT_CORE: 0,
}

#: What code and its libraries read in an ordinary installation. Of /proc not the folders of other processes: Landlock
#: lets a process read the environment of others of its user, which may hold secrets.
_OF_PROC = ("cpuinfo", "devices", "driver", "filesystems", "loadavg", "meminfo", "modules", "stat", "sys", "version")
_SYSTEM = (
    *("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/opt", "/sys/devices/system", "/proc/self"),
    *(f"/proc/{name}" for name in _OF_PROC),
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")

# By machine: the audit architecture, and the numbers of ptrace, process_vm_readv, process_vm_writev, setsid, socket,
# bpf, perf_event_open, add_key, keyctl, mount, pidfd_getfd, io_uring_setup.
_FORBIDDEN = {
    "x86_64": (0xC000003E, (101, 310, 311, 112, 41, 321, 298, 248, 250, 165, 438, 425)),
    "aarch64": (0xC00000B7, (117, 270, 271, 157, 198, 280, 241, 217, 219, 40, 438, 425)),
}

_SOCKET = {"x86_64": 41, "aarch64": 198}
# Processes stay in the group that the judge ends and halts. Ninja, which builds extensions of PyTorch, starts each in a
# new group and stops where that fails, so the call says that it succeeded and does nothing.
_SETPGID = {"x86_64": 109, "aarch64": 154}


def confine(readable: Sequence[str], writable: str, gpu: bool = False) -> list[str]:
    """Give up what can be given up, for this process and all that it starts; returns what held.

    readable: folders that the code needs, besides the system's. writable: the one folder where it may write.
    gpu: whether it may use the GPUs that its environment shows it.
    Call it while the process has one thread. The process also ends with the judge, which may be killed while it stops
    this one between questions.
    """
    held = [
        name
        for name, step in (
            ("resource limits", _limit),
            ("no new privileges", lambda: _prctl(_PR_SET_NO_NEW_PRIVS, 1)),
            ("no network", _leave_network),
            ("files by Landlock", lambda: _landlock((*_SYSTEM, *readable), writable, _gpu_devices() if gpu else ())),
            ("system calls by seccomp", lambda: _forbid_calls(gpu)),
        )
        if _tried(step)
    ]
    _tried(lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL))  # last: a new user namespace clears it
    return held


def confine_compiler(readable: Sequence[str]) -> None:
    """Give up all files but these folders, which a source's includes could name, as its text ends up in messages.

    Also what ``confine`` says but the network's namespace, as there are no sockets. The process ends with its parent.
    """
    _tried(_limit)
    _tried(lambda: _prctl(_PR_SET_NO_NEW_PRIVS, 1))
    _tried(lambda: _landlock(readable, "", ()))
    _tried(lambda: _forbid_calls(False))
    _tried(lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL))


def _tried(step: object) -> bool:
    try:
        step()  # type: ignore[operator]
    except (OSError, ValueError):
        return False
    return True


def _limit() -> None:
    for kind, most in _LIMITS.items():
        _, hard = resource.getrlimit(kind)
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (limit, limit))


def _prctl(option: int, *values: int) -> None:
    arguments = (*values, 0, 0, 0, 0)[:4]
    _checked(_LIBC.prctl(option, *map(ctypes.c_ulong, arguments)))


def _leave_network() -> None:
    """A network namespace without interfaces; where that needs it, in a user namespace with the same user."""
    user, group = os.getuid(), os.getgid()
    if _LIBC.unshare(_CLONE_NEWNET | _CLONE_NEWIPC) == 0:
        return
    _checked(_LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC))
    with contextlib.suppress(OSError):  # without the maps the user is nobody, which does no harm
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _landlock(readable: Sequence[str], writable: str, devices: Sequence[str]) -> None:
    """Files can be read in some folders and written in one, if any; other processes cannot be traced or signalled."""
    version = _checked(_LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG))
    rights = (1 << _RIGHTS.get(version, 16)) - 1
    fields = [rights]
    if version >= _NETWORK_SINCE:
        fields.append(3)  # TCP: bind, connect
    if version >= _SCOPES_SINCE:
        fields.append(3)  # abstract Unix sockets, signals
    attributes = struct.pack(f"{len(fields)}Q", *fields)
    rules = _checked(_LIBC.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0))
    try:
        for path in dict.fromkeys(readable):
            _allow(rules, path, _READ & rights)
        for path in _DEVICES:
            _allow(rules, path, (_READ_FILE | _WRITE_FILE) & rights)
        for path in devices:
            _allow(rules, path, (_READ_FILE | _WRITE_FILE | _CONTROL_DEVICE) & rights)
        if devices:  # the driver names its threads in files
            _allow(rules, "/proc/self", (_READ | _WRITE_FILE | _TRUNCATE) & rights)
        _allow(rules, writable, rights)
        _checked(_LIBC.syscall(_RESTRICT_SELF, rules, 0))
    finally:
        os.close(rules)


def _gpu_devices() -> list[str]:
    """The driver's device files, and where it keeps what processes share."""
    return [*glob.glob("/dev/nvidia*"), *glob.glob("/dev/nvidia-caps/*"), "/dev/shm"]


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # not on this machine
        return
    try:
        if not os.path.isdir(path):
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights, parent)
        _checked(_LIBC.syscall(_ADD_RULE, rules, _RULE_PATH_BENEATH, rule, 0))
    finally:
        os.close(parent)


def _forbid_calls(gpu: bool) -> None:
    """Refuse, by a filter that cannot be taken off, calls that reach other processes, the network or the kernel.

    gpu: allow sockets, without which the driver does not start; outside of its network namespace they reach nothing.
    """
    if platform.machine() not in _FORBIDDEN or struct.calcsize("P") != 8:
        raise OSError("no table of system calls for this machine")
    architecture, numbers = _FORBIDDEN[platform.machine()]
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    # SECCOMP_RET_*; 1: EPERM, 0: success
    kill, refuse, pretend, allow = 0x80000000, 0x00050000 | 1, 0x00050000, 0x7FFF0000
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (answer, 0, 0, kill), (load, 0, 0, 0)]
    # Numbers from 2**30 are x86's second set of the same calls.
    program += [(at_least, 0, 1, 0x40000000), (answer, 0, 0, refuse)]
    for number in numbers:
        if gpu and number == _SOCKET[platform.machine()]:
            continue
        program += [(equal, 0, 1, number), (answer, 0, 0, refuse)]
    program += [(equal, 0, 1, _SETPGID[platform.machine()]), (answer, 0, 0, pretend)]
    program.append((answer, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))

    class _Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

    table = _Filter(len(program), ctypes.addressof(code))
    _checked(_LIBC.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.byref(table), ctypes.c_ulong(0), ctypes.c_ulong(0)))


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
