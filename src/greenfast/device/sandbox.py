"""Restrict a process before it runs or compiles third-party code. Standard library only, to start fast.

Linux has several mechanisms, and each may be missing or forbidden (in a container, with an old kernel). ``confine``,
for a solution's process, and ``confine_compiler`` apply the available ones. docs/judging.md lists the remaining risks.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import json
import os
import platform
import resource
import signal
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)

# <linux/prctl.h>
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_CAP_DAC_READ_SEARCH = 2
_CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWNET = 0x08000000, 0x10000000, 0x40000000

# <linux/landlock.h>; the system calls have these numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _RULE_PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_TRUNCATE, _CONTROL_DEVICE = 1 << 14, 1 << 15
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _CONTROL_DEVICE  # the others are for folders
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # by version, how many rights on files there are; 16 from version 5 on
_NETWORK_SINCE, _SCOPES_SINCE = 4, 6

#: Seconds of processor time, bytes and processes that a solution's code may use.
CPU_S = 1200
DATA_BYTES = 16 << 30
#: Addresses beyond that, for libraries and files that are mapped, and shared memory.
ADDRESS_BYTES = 32 << 30
#: The same for a tool without libraries.
TOOL_ADDRESS_BYTES = 2 << 30
#: Bytes that a compiler of a solution's source may use.
COMPILER_BYTES = 4 << 30
FILE_BYTES = 1 << 30
PROCESSES = 4096
_LIMITS = {
    resource.RLIMIT_CPU: CPU_S,
    resource.RLIMIT_DATA: DATA_BYTES,
    resource.RLIMIT_FSIZE: FILE_BYTES,
    resource.RLIMIT_NPROC: PROCESSES,
    resource.RLIMIT_CORE: 0,
}

#: Files that code and its libraries read in an ordinary installation. The folders of other processes in /proc are
#: excluded: Landlock does not protect their environments, and these may contain secrets.
_PROC_NAMES = ("cpuinfo", "devices", "driver", "filesystems", "loadavg", "meminfo", "modules", "stat", "sys", "version")
_SYSTEM = (
    *("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/opt", "/sys/devices/system", "/proc/self"),
    *(f"/proc/{name}" for name in _PROC_NAMES),
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")

#: The system calls that Python, PyTorch, compilers and build tools need, with their numbers on x86_64 and aarch64
#: ("-": the machine has no such call). All others are refused, such as those that
#: - reach other processes: ptrace, process_vm_readv, kcmp, pidfd_getfd, process_madvise, migrate_pages;
#: - change modes, owners, times or attributes of files, or a length by name (Landlock does not cover them);
#: - share memory by System V or POSIX queues;
#: - are large interfaces: io_uring, userfaultfd, bpf, perf_event_open, keyctl, mount, unshare, setns, inotify, seccomp.
_CALLS = (
    # files
    "read 0 63, write 1 64, open 2 -, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -, lseek 8 62, "
    "pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66, preadv 295 69, pwritev 296 70, preadv2 327 286, "
    "pwritev2 328 287, access 21 -, pipe 22 -, pipe2 293 59, select 23 -, pselect6 270 72, ppoll 271 73, dup 32 23, "
    "dup2 33 -, dup3 292 24, sendfile 40 71, flock 73 32, fsync 74 82, fdatasync 75 83, ftruncate 77 46, "
    "fallocate 285 47, getdents 78 -, getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50, rename 82 -, "
    "renameat 264 38, renameat2 316 276, mkdir 83 -, mkdirat 258 34, rmdir 84 -, creat 85 -, link 86 -, "
    "linkat 265 37, unlink 87 -, unlinkat 263 35, symlink 88 -, symlinkat 266 36, readlink 89 -, readlinkat 267 78, "
    "umask 95 166, statfs 137 43, fstatfs 138 44, openat 257 56, openat2 437 437, newfstatat 262 79, statx 332 291, "
    "faccessat 269 48, faccessat2 439 439, fadvise64 221 223, readahead 187 213, sync_file_range 277 84, "
    "splice 275 76, tee 276 77, copy_file_range 326 285, close_range 436 436, getxattr 191 8, lgetxattr 192 9, "
    "fgetxattr 193 10, listxattr 194 11, llistxattr 195 12, flistxattr 196 13, epoll_create 213 -, "
    "epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441, "
    "eventfd 284 -, eventfd2 290 19, signalfd 282 -, signalfd4 289 74, timerfd_create 283 85, "
    "timerfd_settime 286 86, timerfd_gettime 287 87, "
    # memory
    "mmap 9 222, mprotect 10 226, munmap 11 215, brk 12 214, mremap 25 216, msync 26 227, mincore 27 232, "
    "madvise 28 233, mlock 149 228, mlock2 325 284, munlock 150 229, mlockall 151 230, munlockall 152 231, "
    "mbind 237 235, set_mempolicy 238 237, get_mempolicy 239 236, membarrier 324 283, pkey_alloc 330 289, "
    "pkey_free 331 290, pkey_mprotect 329 288, map_shadow_stack 453 453, mseal 462 462, "
    # processes
    "fork 57 -, vfork 58 -, execve 59 221, exit 60 93, exit_group 231 94, wait4 61 260, waitid 247 95, "
    "getpid 39 172, getppid 110 173, gettid 186 178, getuid 102 174, geteuid 107 175, getgid 104 176, "
    "getegid 108 177, getgroups 115 158, getresuid 118 148, getresgid 120 150, getpgrp 111 -, getpgid 121 155, "
    "getsid 124 156, pidfd_open 434 434, set_tid_address 218 96, set_robust_list 273 99, futex 202 98, "
    "futex_waitv 449 449, futex_wake 454 454, futex_wait 455 455, futex_requeue 456 456, rseq 334 293, "
    "arch_prctl 158 -, sched_yield 24 124, sched_getaffinity 204 123, sched_getparam 143 121, "
    "sched_getscheduler 145 120, sched_getattr 315 275, sched_get_priority_max 146 125, "
    "sched_get_priority_min 147 126, sched_rr_get_interval 148 127, getpriority 140 141, getrlimit 97 163, "
    "setrlimit 160 164, getrusage 98 165, times 100 153, capget 125 90, getcpu 309 168, restart_syscall 219 128, "
    # signals and time
    "rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, "
    "rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132, pause 34 -, nanosleep 35 101, "
    "clock_nanosleep 230 115, alarm 37 -, getitimer 36 102, setitimer 38 103, timer_create 222 107, "
    "timer_settime 223 110, timer_gettime 224 108, timer_getoverrun 225 109, timer_delete 226 111, "
    "gettimeofday 96 169, time 201 -, clock_gettime 228 113, clock_getres 229 114, uname 63 160, sysinfo 99 179, "
    "getrandom 318 278, "
    # connected pairs of sockets
    "sendto 44 206, recvfrom 45 207, sendmsg 46 211, recvmsg 47 212, sendmmsg 307 269, recvmmsg 299 243, "
    "shutdown 48 210, getsockname 51 204, getpeername 52 205, setsockopt 54 208, getsockopt 55 209"
)
#: And those that only the driver of a GPU needs.
_GPU_CALLS = "bind 49 200, listen 50 201, accept 43 202, accept4 288 242, memfd_create 319 279"
#: And those that depend on their arguments (``_filtered_calls``), or that are refused in a way of their own.
_FILTERED = (
    "clone 56 220, clone3 435 435, fcntl 72 25, ioctl 16 29, kill 62 129, tkill 200 130, tgkill 234 131, "
    "rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, pidfd_send_signal 424 424, sched_setaffinity 203 122, "
    "sched_setscheduler 144 119, sched_setparam 142 118, sched_setattr 314 274, setpriority 141 140, "
    "prlimit64 302 261, move_pages 279 239, personality 135 92, prctl 157 167, socket 41 198, socketpair 53 199, "
    "connect 42 203, setpgid 109 154"
)
#: Machine -> the audit architecture, and the column of the call numbers.
_MACHINES = {"x86_64": (0xC000003E, 1), "aarch64": (0xC00000B7, 2)}
_NEWEST = 462  # the newest call that is known here; libraries fall back from a newer one that does not exist
_EPERM, _ENOENT, _ENOSYS = 1, 2, 38
# Flags of new namespaces, and CLONE_PARENT: it would make a child of the judge.
_NAMESPACES = 0x7E020000 | 0x8000
#: prctl: names, capabilities that are held, memory; not the signal on the parent's end, nor who may trace it.
_PRCTL = (2, 3, 7, 15, 16, 21, 23, 27, 29, 30, 38, 39, 40, 41, 42, 50, 51, 55, 56, 0x53564D41)
#: fcntl: descriptors, flags, locks, pipes, seals; not the process that gets SIGIO, leases or notifications.
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 9, 36, 37, 38, 1030, 1031, 1032, 1033, 1034)
#: ioctl: the kind of a terminal, bytes to read, blocking, close on exec, a copy of a file's blocks.
_IOCTL = (0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x40049409)
#: For the driver: all ioctls except of terminals, files' flags, block devices, btrfs and sockets.
_IOCTL_KINDS = tuple(kind << 8 for kind in range(256) if kind not in (0x12, 0x54, 0x58, 0x66, 0x76, 0x89, 0x94))
_STREAM, _SEQPACKET, _TYPE = 1, 5, 0xF
_CGROUP = "greenfast-"

#: An argument's number, a mask of its bits, and the allowed values under the mask.
Check = tuple[int, int, Sequence[int]]
_ALL = 0xFFFFFFFF


#: The name of the limit of all processes together in the result of ``confine``.
BY_CGROUP = "memory and processes by cgroup"


def confine(readable: Sequence[str], writable: str, gpu: bool = False) -> list[str]:
    """Apply all available restrictions to this process and its children; return the applied ones.

    readable: folders that the code needs, besides the system's. writable: the only writable folder. gpu: whether it may
    use the GPUs that are visible in its environment.
    Call it while the process has one thread. The process also ends with the judge: the judge may be killed while this
    process is paused between requests.
    """
    signals = _scopes_signals()
    applied = [
        name
        for name, step in (
            ("resource limits", lambda: _limit(gpu)),
            (BY_CGROUP, lambda: _join_cgroup(2 * DATA_BYTES if gpu else DATA_BYTES, PROCESSES)),
            ("no new privileges", _no_new_privileges),
            ("no network", _leave_network),
            ("files by Landlock", lambda: _landlock((*_SYSTEM, *readable), writable, _gpu_devices() if gpu else ())),
            ("no capabilities", _drop_capabilities),
            ("system calls by seccomp", lambda: _end_with_judge_and_filter(gpu, signals)),
        )
        if _attempt(step)
    ]
    return applied


def confine_compiler(readable: Sequence[str]) -> None:
    """Restrict reading to these folders: a source could include other files, and messages quote them.

    Applies the restrictions of ``confine`` too, except the network namespace: sockets are forbidden. The process ends
    with its parent.
    """
    signals = _scopes_signals()
    _attempt(lambda: _limit(False, COMPILER_BYTES))
    _attempt(_no_new_privileges)
    _attempt(lambda: _landlock(readable, "", ()))
    _attempt(_drop_capabilities)
    _attempt(lambda: _end_with_judge_and_filter(False, signals))


def _attempt(step: object) -> bool:
    try:
        step()  # type: ignore[operator]
    except (OSError, ValueError):
        return False
    return True


def _limit(gpu: bool, data_bytes: int | None = None) -> None:
    limits = dict(_LIMITS)
    if data_bytes is not None:
        limits[resource.RLIMIT_DATA] = data_bytes
    if not gpu:  # the driver reserves addresses of all memory that there is
        limits[resource.RLIMIT_AS] = limits[resource.RLIMIT_DATA] + ADDRESS_BYTES
    _apply(limits)


def _apply(limits: dict[int, int]) -> None:
    for kind, most in limits.items():
        _, hard = resource.getrlimit(kind)
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (limit, limit))


def _no_new_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _prctl(option: int, *values: int) -> None:
    arguments = (*values, 0, 0, 0, 0)[:4]
    _checked(_LIBC.prctl(option, *map(ctypes.c_ulong, arguments)))


def _leave_network() -> None:
    """Enter a network namespace without interfaces, in a user namespace with the same user if necessary."""
    user, group = os.getuid(), os.getgid()
    if _LIBC.unshare(_CLONE_NEWNET | _CLONE_NEWIPC) == 0:
        return
    _checked(_LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC))
    with contextlib.suppress(OSError):  # without the maps the user is nobody; this does no harm
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _landlock(readable: Sequence[str], writable: str, devices: Sequence[str]) -> None:
    """Allow reading in some folders and writing in one. Forbid tracing and signalling other processes."""
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
    """Return the driver's device files. /dev/shm is not included: other programs of the user share data there."""
    return [*glob.glob("/dev/nvidia*"), *glob.glob("/dev/nvidia-caps/*")]


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # not on this machine
        return
    try:
        if not os.path.isdir(path):
            rights &= _FILE_RIGHTS
        rule = struct.pack("=Qi", rights, parent)
        _checked(_LIBC.syscall(_ADD_RULE, rules, _RULE_PATH_BENEATH, rule, 0))
    finally:
        os.close(parent)


def _drop_capabilities() -> None:
    """Drop root's capabilities, except reading files of other users (within Landlock's rules)."""
    header = struct.pack("Ii", 0x20080522, 0)  # version 3, this thread
    data = ctypes.create_string_buffer(24)
    _checked(_LIBC.syscall(_number("capget", "capget 125 90"), header, data))
    low, high = struct.unpack_from("I", data, 4)[0] & 1 << _CAP_DAC_READ_SEARCH, 0
    data.raw = struct.pack("6I", low, low, 0, high, high, 0)
    _checked(_LIBC.syscall(_number("capset", "capset 126 91"), header, data))


def _scopes_signals() -> bool:
    """Return whether Landlock keeps signals within the processes of a sandbox (Linux 6.12)."""
    return int(_LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG)) >= _SCOPES_SINCE


def _end_with_judge_and_filter(gpu: bool, signals_scoped: bool) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a new user namespace clears it; the filter does not allow it
    _filter_calls(_filter_program(gpu, os.getpid(), signals_scoped))


def _numbers(calls: str) -> dict[str, int]:
    """Return the numbers of calls on this machine by name. Raises OSError for a machine without a table."""
    if platform.machine() not in _MACHINES or struct.calcsize("P") != 8:
        raise OSError("no table of system calls for this machine")
    column = _MACHINES[platform.machine()][1]
    rows = [entry.split() for entry in calls.split(", ")]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def _number(name: str, calls: str) -> int:
    return _numbers(calls)[name]


def _filtered_calls(gpu: bool, own: int, signals_scoped: bool) -> dict[str, tuple[int, Sequence[Sequence[Check]]]]:
    """Return by name the error of a refused call, and alternatives that allow it: all checks of one must hold.

    own: the process id in the filter. Children inherit the filter, and it treats their ids as other processes, so they
    can refer to themselves only by 0. signals_scoped: whether Landlock already blocks signals to other processes.
    """
    always: Sequence[Sequence[Check]] = ((),)
    never: Sequence[Sequence[Check]] = ()
    itself: Check = (0, _ALL, (0, own))
    connected: Check = (1, _TYPE, (_STREAM, _SEQPACKET))
    signal_to = always if signals_scoped else ((itself,),)
    small_ioctl: Sequence[Check] = ((1, _ALL, _IOCTL),)
    return {
        "clone": (_EPERM, [[(0, _NAMESPACES, (0,))]]),
        "clone3": (_ENOSYS, never),  # a filter cannot read its flags in memory; libraries fall back to clone
        "fcntl": (_EPERM, [[(1, _ALL, _FCNTL)]]),
        "ioctl": (_EPERM, [small_ioctl, [(1, 0xFF00, _IOCTL_KINDS)]] if gpu else [small_ioctl]),
        "kill": (_EPERM, signal_to),
        "tkill": (_EPERM, always if signals_scoped else never),
        "tgkill": (_EPERM, signal_to),
        "rt_sigqueueinfo": (_EPERM, signal_to),
        "rt_tgsigqueueinfo": (_EPERM, signal_to),
        "pidfd_send_signal": (_EPERM, always if signals_scoped else never),
        "sched_setaffinity": (_EPERM, [[itself]]),
        "sched_setscheduler": (_EPERM, [[itself, (1, 0x3FFFFFFF, (0, 3, 5))]]),  # no real-time policy
        "sched_setparam": (_EPERM, [[itself]]),
        "sched_setattr": (_EPERM, [[itself]]),
        "setpriority": (_EPERM, [[(0, _ALL, (0,)), (1, _ALL, (0, own))]]),
        "prlimit64": (_EPERM, [[itself]]),
        "move_pages": (_EPERM, [[itself]]),
        "personality": (_EPERM, [[(0, _ALL, (0, _ALL))]]),
        "prctl": (_EPERM, [[(0, _ALL, _PRCTL)]]),
        # The driver listens on a socket in its own namespace, without which it does not start; it connects to a service
        # that may not be there. Datagrams could reach any socket that has a name among files.
        "socket": (_EPERM, [[(0, _ALL, (1,)), connected]] if gpu else never),
        "socketpair": (_EPERM, [[connected]]),
        "connect": (_ENOENT if gpu else _EPERM, never),
        # Processes stay in the group that the judge ends and halts. Ninja builds extensions of PyTorch. It starts
        # each in a new group and stops if that fails, so the call reports success and does nothing.
        "setpgid": (0, never),
    }


_Instruction = tuple[int, int, int, int]
# The filter's language: load a word, compare, jump, mask, answer. Answers: SECCOMP_RET_ERRNO with the error in the
# lowest bits, and SECCOMP_RET_ALLOW.
_LOAD, _EQUAL, _AT_LEAST, _JUMP, _AND, _ANSWER = 0x20, 0x15, 0x35, 0x05, 0x54, 0x06
_REFUSE, _ALLOW = 0x00050000, 0x7FFF0000


def _filter_program(gpu: bool, own: int, signals_scoped: bool) -> bytes:
    """Return the instructions of a filter that allows the listed calls and refuses all others."""
    architecture, _ = _MACHINES.get(platform.machine(), (0, 0))
    plain = _numbers(_CALLS + (f", {_GPU_CALLS}" if gpu else ""))
    filtered = _numbers(_FILTERED)
    program: list[_Instruction] = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_ANSWER, 0, 0, _REFUSE | _EPERM)]
    # Numbers from 2**30 on are x86's second set of the same calls.
    program += [(_LOAD, 0, 0, 0), (_AT_LEAST, 0, 1, 0x40000000), (_ANSWER, 0, 0, _REFUSE | _EPERM)]
    for number in plain.values():
        program += [(_EQUAL, 0, 1, number), (_ANSWER, 0, 0, _ALLOW)]
    for name, (error, alternatives) in _filtered_calls(gpu, own, signals_scoped).items():
        if name in filtered:
            body = [step for checks in alternatives for step in _allow_if(checks)]
            body.append((_ANSWER, 0, 0, _REFUSE | error))
            program += [(_EQUAL, 1, 0, filtered[name]), (_JUMP, 0, 0, len(body)), *body]
    program += [(_AT_LEAST, 0, 1, _NEWEST + 1), (_ANSWER, 0, 0, _REFUSE | _ENOSYS), (_ANSWER, 0, 0, _REFUSE | _EPERM)]
    return b"".join(struct.pack("=HBBI", *step) for step in program)


def _allow_if(checks: Sequence[Check]) -> list[_Instruction]:
    """Return instructions that allow a call if all checks hold, and otherwise continue after them."""
    code: list[_Instruction] = [(_ANSWER, 0, 0, _ALLOW)]
    for argument, mask, values in reversed(checks):
        check: list[_Instruction] = [(_LOAD, 0, 0, 16 + 8 * argument), (_AND, 0, 0, mask)]  # the argument's low half
        check += [(_EQUAL, len(values) - n, 0, value) for n, value in enumerate(values)]
        code = [*check, (_JUMP, 0, 0, len(code)), *code]
    return code


def _filter_calls(program: bytes) -> None:
    """Refuse, by a filter that cannot be taken off, all calls that the program does not allow."""
    code = ctypes.create_string_buffer(program)

    class _Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

    table = _Filter(len(program) // 8, ctypes.addressof(code))
    _checked(_LIBC.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.byref(table), ctypes.c_ulong(0), ctypes.c_ulong(0)))


def _join_cgroup(memory_bytes: int, processes: int) -> None:
    """Move this process into a new control group with these limits. Raises OSError if it cannot make one."""
    name = f"{_CGROUP}{os.getpid()}"
    for parents in _cgroup_parents():
        made: list[str] = []
        try:
            for parent, limits in parents.items():
                _remove_old_cgroups(parent)
                folder = os.path.join(parent, name)
                os.mkdir(folder)
                made.append(folder)
                for file, value in limits.items():
                    _write(os.path.join(folder, file), str({"memory": memory_bytes, "processes": processes}[value]))
                for file, text in (("memory.swap.max", "0"), ("memory.oom.group", "1")):
                    with contextlib.suppress(OSError):
                        _write(os.path.join(folder, file), text)
            for folder in made:
                _write(os.path.join(folder, "cgroup.procs"), "0")
            return
        except OSError:
            for folder in made:
                with contextlib.suppress(OSError):
                    _write(os.path.join(os.path.dirname(folder), "cgroup.procs"), "0")
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
    raise OSError("no control group that this process may divide")


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _cgroup_parents(proc: str = "/proc/self") -> list[dict[str, dict[str, str]]]:
    """Return the possible locations of a control group: sets of folders with their limits.

    A group of version 2 with processes cannot have limited subgroups, so its parent is tried too: the service manager
    may have delegated it to the user. With version 1, memory and processes are two hierarchies.
    """
    own = {}
    for line in _read(f"{proc}/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        own[controllers] = path
    mounts: dict[str, str] = {}
    for line in _read(f"{proc}/mountinfo").splitlines():
        fields, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, point = fields.split()[3:5]
        for controllers, path in own.items():
            names = set(controllers.split(","))
            fits = kind == "cgroup2" if not controllers else kind == "cgroup" and names <= set(options.split(","))
            if fits and path.startswith(root.rstrip("/")):
                mounts[controllers] = os.path.join(point, path[len(root.rstrip("/")) :].lstrip("/")).rstrip("/")
    locations: list[dict[str, dict[str, str]]] = []
    if "" in mounts:
        both = {"memory.max": "memory", "pids.max": "processes"}
        locations.append({mounts[""]: both})
        locations += [{os.path.dirname(mounts[""]): both}] if own[""] != "/" else []
    memory = next((path for names, path in mounts.items() if "memory" in names.split(",")), None)
    pids = next((path for names, path in mounts.items() if "pids" in names.split(",")), None)
    if memory and pids:
        locations.append({memory: {"memory.limit_in_bytes": "memory"}, pids: {"pids.max": "processes"}})
    return locations


def remove_cgroup(process: int) -> None:
    """Remove the control groups of an ended process, and end the remaining processes in them."""
    for parents in _cgroup_parents():
        for parent in parents:
            folder = os.path.join(parent, f"{_CGROUP}{process}")
            for _ in range(50):
                try:
                    os.rmdir(folder)
                except FileNotFoundError:
                    break
                except OSError:
                    _end_all_in(folder)
                    time.sleep(0.01)
                else:
                    break


def _end_all_in(cgroup: str) -> None:
    with contextlib.suppress(OSError, ValueError), open(os.path.join(cgroup, "cgroup.procs")) as file:
        for process in file.read().split():
            os.kill(int(process), signal.SIGKILL)


def _remove_old_cgroups(parent: str) -> None:
    """Remove the groups left by a killed judge. A group with running processes cannot be removed."""
    for name in os.listdir(parent):
        process = name.removeprefix(_CGROUP)
        ended = process == str(os.getpid()) or not os.path.exists(f"/proc/{process}")
        if name.startswith(_CGROUP) and process.isdigit() and ended:
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(parent, name))


def _write(path: str, text: str) -> None:
    """Write to an existing file. The files of a control group always exist."""
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _run_tool(job: dict[str, Any]) -> None:
    """Replace this process by a tool that reads some folders and writes one (``tool_process``)."""
    signals = _scopes_signals()
    limits = {
        resource.RLIMIT_CPU: job["seconds"],
        resource.RLIMIT_DATA: job["memory"],
        resource.RLIMIT_AS: job["memory"] + TOOL_ADDRESS_BYTES,
        resource.RLIMIT_FSIZE: job["output"],
        resource.RLIMIT_CORE: 0,
    }
    _attempt(lambda: _apply(limits))
    _attempt(_no_new_privileges)
    _attempt(lambda: _landlock((*_SYSTEM, *job["readable"]), job["folder"], ()))
    _attempt(_drop_capabilities)
    _attempt(lambda: _end_with_judge_and_filter(False, signals))
    # Python ignores it, and a tool would inherit that.
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    os.execv(job["tool"], job["arguments"])


if __name__ == "__main__":
    _run_tool(json.loads(sys.argv[1]))
