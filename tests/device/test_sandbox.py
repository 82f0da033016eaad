"""Each promise of the sandbox against an attack that succeeds without the measure, as root and as an ordinary user."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from greenfast.device import sandbox

NOBODY = 65534
SECCOMP, LANDLOCK, NETWORK, CAPABILITIES = "_filter_calls", "_landlock", "_leave_network", "_drop_capabilities"
CGROUP, LIMITS, PRIVILEGES = "_join_cgroup", "_limit", "_no_new_privileges"

#: Name -> code, and the measures that stop it; each measure alone need not be the only one that does.
ATTACKS: dict[str, tuple[str, list[str]]] = {
    "another's affinity": ("os.sched_setaffinity(victim, {0})", [SECCOMP, CAPABILITIES]),
    "another's priority": ("os.setpriority(os.PRIO_PROCESS, victim, 19)", [SECCOMP, CAPABILITIES]),
    "another's class": ("os.sched_setscheduler(victim, os.SCHED_IDLE, os.sched_param(0))", [SECCOMP, CAPABILITIES]),
    "another's class by attributes": (
        "data = struct.pack('IIQiI3Q', 48, os.SCHED_IDLE, 0, 0, 0, 0, 0, 0)\n"
        "call({'x86_64': 314, 'aarch64': 274}[os.uname().machine], victim, data, 0)",
        [SECCOMP, CAPABILITIES],
    ),
    "another's limits": ("resource.prlimit(victim, resource.RLIMIT_NOFILE, (64, 64))", [SECCOMP]),
    "another's disk priority": (
        "call({'x86_64': 251, 'aarch64': 30}[os.uname().machine], 1, victim, 3 << 13)",
        [SECCOMP, CAPABILITIES],
    ),
    "a signal": ("os.kill(victim, 0)", [SECCOMP, LANDLOCK]),
    "a signal of a file": (
        "a, b = os.pipe(); fcntl.fcntl(a, fcntl.F_SETOWN, victim)",
        [SECCOMP],
    ),
    "another's memory": (
        "data = ctypes.create_string_buffer(8); v = (ctypes.c_void_p * 2)(ctypes.addressof(data), 8)\n"
        "call({'x86_64': 310, 'aarch64': 270}[os.uname().machine], victim, v, 0, v, 0, 0)",
        [SECCOMP, LANDLOCK],
    ),
    "modes": ("os.chmod(outside, 0o666)", [SECCOMP]),
    "modes of an open file": ("os.fchmod(os.open(readable[0] + '/kept', os.O_RDONLY), 0o666)", [SECCOMP]),
    "times": ("os.utime(outside, (0, 0))", [SECCOMP]),
    "owner": ("os.chown(outside, -1, -1)", [SECCOMP]),
    "attributes": ("os.setxattr(outside, 'user.greenfast', b'x')", [SECCOMP]),
    "flags of a file": (
        "fcntl.ioctl(os.open(readable[0] + '/kept', os.O_RDONLY), 0x40086602, struct.pack('Q', flags | 0x40))",
        [SECCOMP],
    ),
    "length": ("os.truncate(outside, 1)", [SECCOMP, LANDLOCK]),
    "reading": ("open(outside).read()", [LANDLOCK]),
    "writing": ("open(outside, 'a').write('x')", [LANDLOCK]),
    "removing": ("os.unlink(spare); open(spare, 'w')", [LANDLOCK]),
    "the environment": ("open(f'/proc/{victim}/environ').read()", [LANDLOCK, NETWORK, CAPABILITIES]),
    "shared memory of files": ("open('/dev/shm/' + shared, 'r+').write('x')", [LANDLOCK]),
    "shared memory of System V": (
        "call({'x86_64': 29, 'aarch64': 194}[os.uname().machine], 0, 4096, 0o1600)",
        [SECCOMP],
    ),
    "a network": ("socket.create_connection(('127.0.0.1', port), 5)", [SECCOMP, NETWORK, LANDLOCK]),
    "a named socket": ("s = socket.socket(socket.AF_UNIX); s.connect(named)", [SECCOMP]),
    "a named socket by datagrams": (
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.sendto(b'x', datagrams)",
        [SECCOMP],
    ),
    "a namespace": ("call({'x86_64': 272, 'aarch64': 97}[os.uname().machine], 0x10000000)", [SECCOMP, NETWORK]),
    "a key": (
        "call({'x86_64': 248, 'aarch64': 217}[os.uname().machine], b'user', b'k', b'v', 1, -2)",
        [SECCOMP],
    ),
    "a ring": ("call(425, 1, ctypes.create_string_buffer(256))", [SECCOMP]),
    "watching files": ("call({'x86_64': 294, 'aarch64': 26}[os.uname().machine], 0)", [SECCOMP]),
    "memory without a file": ("os.memfd_create('x')", [SECCOMP]),
    "outliving the judge": ("call({'x86_64': 157, 'aarch64': 167}[os.uname().machine], 1, 0, 0, 0, 0)", [SECCOMP]),
    "a session": ("subprocess.run(['true'], start_new_session=True)", [SECCOMP]),
    "a child of the judge": (
        "call({'x86_64': 56, 'aarch64': 220}[os.uname().machine], 0x8000 | 17, 0, 0, 0, 0) or os._exit(0)",
        [SECCOMP],
    ),
}  # fmt: skip
X86_ATTACKS = {"32-bit calls": ("int_80(20)", [SECCOMP]), "a device node or pipe": ("os.mkfifo('pipe')", [SECCOMP])}
AS_ROOT = {"real time": ("os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))", [CAPABILITIES, SECCOMP])}
SETUID = (
    "if subprocess.run([setuid, '-u'], capture_output=True, text=True).stdout != '0\\n': raise OSError(1, 'no root')"
)


@dataclass
class Place:
    """What attacks aim at."""

    work: dict[str, Any]

    def run(self, attacks: dict[str, tuple[str, list[str]]], **more: Any) -> dict[str, list[str]]:
        """The outcomes of attacks with their measures and without, by name."""
        work = json.dumps({**self.work, **more, "attacks": list(attacks.values())})
        command = [sys.executable, "-c", "import sys; from tests.device.attacks import main; main()"]
        done = subprocess.run(command, input=work, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return dict(zip(attacks, json.loads(done.stdout), strict=True))


@pytest.fixture(params=["root", "user"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A victim, files and sockets of the user that attacks."""
    root = os.getuid() == 0
    if request.param == "root" and not root:
        pytest.skip("not root")
    user = NOBODY if root and request.param == "user" else 0
    folder = Path(tempfile.mkdtemp(prefix="greenfast-test-"))
    folder.chmod(0o755)
    scratch, readable = folder / "scratch", folder / "readable"
    scratch.mkdir()
    readable.mkdir()
    for file in (folder / "outside", folder / "spare", readable / "kept"):
        file.write_text("secret")
    shared = Path("/dev/shm") / folder.name
    shared.write_text("")
    victim = subprocess.Popen(
        ["sleep", "600"], user=user or None, group=user or None, extra_groups=[] if user else None
    )
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
    ):
        named.bind(str(folder / "named"))
        named.listen()
        datagrams.bind(str(folder / "datagrams"))
        for path in (folder, *folder.rglob("*"), shared):
            if user:
                os.chown(path, user, user)
        yield Place({
            "user": user, "scratch": str(scratch), "readable": [str(readable), sys.prefix, sys.base_prefix],
            "outside": str(folder / "outside"), "spare": str(folder / "spare"), "shared": shared.name,
            "victim": victim.pid, "port": server.getsockname()[1], "named": str(folder / "named"),
            "datagrams": str(folder / "datagrams"), "flags": read_flags(readable / "kept"),
        })  # fmt: skip
    victim.kill()
    victim.wait()
    shared.unlink()
    shutil.rmtree(folder)


def read_flags(path: Path) -> int:
    """Return a file's flags. A change of one must keep the others: ext4 refuses it for data not yet on the disk."""
    data = bytearray(8)
    with path.open() as file, contextlib.suppress(OSError):  # a file system without flags
        fcntl.ioctl(file, 0x80086601, data)
    return int.from_bytes(data, "little")


def test_each_measure_stops_what_succeeds_without_it(place: Place) -> None:
    asked = {**ATTACKS, **(X86_ATTACKS if platform.machine() == "x86_64" else {})}
    asked |= {} if place.work["user"] else AS_ROOT if os.getuid() == 0 else {}
    check(place.run(asked))


def test_capabilities_are_gone_also_of_programs_that_it_starts(place: Place) -> None:
    if place.work["user"] or os.getuid() != 0:
        pytest.skip("an ordinary user has none")
    attack = (
        "s = subprocess.run(['chroot', '/', 'true'], capture_output=True).returncode\nif s: raise OSError(1, 'none')"
    )
    found = place.run({"with": (attack, [SECCOMP]), "without": (attack, [SECCOMP, CAPABILITIES])})
    assert (found["with"][1], found["without"][1]) == ("PermissionError: [Errno 1] none", "reached")


def test_a_setuid_program_gives_it_nothing(place: Place) -> None:
    if os.getuid() != 0 or not place.work["user"]:
        pytest.skip("only root can make a setuid program, for an ordinary user")
    program = Path(place.work["readable"][0]) / "id"
    shutil.copy("/usr/bin/id", program)
    program.chmod(0o4755)
    off = [PRIVILEGES, NETWORK, LANDLOCK, SECCOMP]
    check(place.run({"setuid": (SETUID, off), "only it": (SETUID, off[1:])}, setuid=str(program)), but={"only it"})


def test_what_the_driver_of_a_gpu_needs_and_no_more(place: Place) -> None:
    allowed = {
        "listening": "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.bind('\\0cuda'); s.listen()",
        "memory without a file": "os.ftruncate(os.memfd_create('x'), 4096)",
        "its own class": "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)); os.sched_setaffinity(0, {0})",
        "sockets that do not block": "a, b = socket.socketpair(); a.setblocking(False); os.set_blocking(0, False)",
        "a thread": "import threading; threading.Thread(target=print).start()",
        "a driver's requests": REQUESTS,
    }
    refused = {
        "a network": "socket.socket(socket.AF_INET)",
        "a datagram": "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)",
        "a named socket": "s = socket.socket(socket.AF_UNIX); s.connect(named)",
        "flags of a file": ATTACKS["flags of a file"][0],
        "shared memory of files": "open('/dev/shm/' + shared, 'r+').write('x')",
    }
    attacks: dict[str, tuple[str, list[str]]] = {name: (code, []) for name, code in (allowed | refused).items()}
    found = {name: held for name, (held, _) in place.run(attacks, gpu=True).items()}
    assert {name for name in allowed if found[name] != "reached"} == set(), found
    assert {name for name in refused if found[name] == "reached"} == set()
    assert "No such file" in found["a named socket"]  # as where no service runs


#: Of the driver's device files: numbers as 0xC020462A, and plain ones; here a file that has none.
REQUESTS = """
file = os.open('device', os.O_RDWR | os.O_CREAT)
for request in (0xC020462A, 0x30000001, 0x21, 0xC0384643):
    try:
        fcntl.ioctl(file, request, bytes(64))
    except OSError as e:
        if e.errno != errno.ENOTTY:
            raise
"""


def test_limits_of_a_process(place: Place) -> None:
    most = {resource.RLIMIT_DATA: 256 << 20, resource.RLIMIT_FSIZE: 1 << 20, resource.RLIMIT_CPU: 1}
    attacks = {
        "memory": ("bytearray(512 << 20)", [LIMITS]),
        "file": ("with open('large', 'wb') as f: f.write(bytes(2 << 20))", [LIMITS]),
    }
    if not place.work["user"] or os.getuid() != 0:
        attacks["time"] = ("end = time.process_time() + 1.2\nwhile time.process_time() < end: pass", [LIMITS])
    if place.work["user"]:  # Linux limits no processes of root's, but in a control group
        most[resource.RLIMIT_NPROC] = 20
        attacks["processes"] = (FORKS, [LIMITS])
    found = place.run(attacks, limits=most)
    assert found["memory"] == ["MemoryError", "reached"]
    assert found["file"] == ["OSError: [Errno 27] File too large", "reached"]
    assert found.get("time", ENDED) == ENDED
    assert found.get("processes", BUSY) == BUSY


FORKS = """
for n in range(60):
    if os.fork() == 0:
        time.sleep(0.5)
        os._exit(0)
"""
ENDED = ["ended by -9", "reached"]
BUSY = ["BlockingIOError: [Errno 11] Resource temporarily unavailable", "reached"]


def test_limits_of_all_of_its_processes(place: Place) -> None:
    """What no limit of a process counts: shared memory, and processes of root."""
    try:
        sandbox._join_cgroup(1 << 30, 100)
    except OSError:
        pytest.skip("no control group that this user may divide")
    finally:
        leave_cgroup()
    attacks = {
        "shared memory": ("m = mmap.mmap(-1, 300 << 20)\nfor n in range(0, len(m), 4096): m[n] = 1", [CGROUP]),
        "processes": (FORKS, [CGROUP]),
    }
    found = place.run(attacks, constants={"DATA_BYTES": 64 << 20, "PROCESSES": 20}, user=0)
    assert found == {"shared memory": ENDED, "processes": BUSY}
    folders = {parent for parents in sandbox._cgroup_parents() for parent in parents}
    left = {name.removeprefix("greenfast-") for folder in folders for name in os.listdir(folder)}
    assert not [name for name in left if name.isdigit() and not Path(f"/proc/{name}").exists()]


BOTH = {"memory.max": "memory", "pids.max": "processes"}
SERVICE = "/user.slice/user-1000.slice/user@1000.service/app.slice"
#: Groups and mounts of a process, and where a group may be made.
HIERARCHIES: dict[str, tuple[str, str, list[dict[str, dict[str, str]]]]] = {
    "a user's service": (
        f"0::{SERVICE}/run-1.scope",
        "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate",
        [{f"/sys/fs/cgroup{SERVICE}/run-1.scope": BOTH}, {f"/sys/fs/cgroup{SERVICE}": BOTH}],
    ),
    "a container": ("0::/", "30 23 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup ro", [{"/sys/fs/cgroup": BOTH}]),
    "a container without its own namespace": (
        "0::/docker/abc/job",
        "30 23 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup ro",
        [{"/sys/fs/cgroup/job": BOTH}, {"/sys/fs/cgroup": BOTH}],
    ),
    "version 1": (
        "9:name=systemd:/x\n4:memory:/a/b\n3:pids:/a",
        "33 32 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "34 32 0:30 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids",
        [
            {
                "/sys/fs/cgroup/memory/a/b": {"memory.limit_in_bytes": "memory"},
                "/sys/fs/cgroup/pids/a": {"pids.max": "processes"},
            }
        ],
    ),
    "none": ("", "33 32 0:29 / /tmp rw - tmpfs tmpfs rw", []),
}


HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}


@pytest.mark.parametrize("machine", HEADERS)
def test_the_numbers_are_the_kernels(machine: str) -> None:
    header = Path(HEADERS[machine])
    if not header.is_file():
        pytest.skip(f"no {header}")
    known = dict(re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text(), re.MULTILINE))
    known |= {"newfstatat": "79", "fstat": "80"} if machine == "aarch64" else {}
    column = sandbox._MACHINES[machine][1]
    rows = [row.split() for row in ", ".join((sandbox._CALLS, sandbox._GPU_CALLS, sandbox._FILTERED)).split(", ")]
    assert len(rows) == len({row[0] for row in rows}) > 200
    wrong = {row[0]: (row[column], known[row[0]]) for row in rows if row[0] in known and row[column] != known[row[0]]}
    assert wrong == {}
    assert not {row[0] for row in rows if row[column] == "-"} & known.keys()


@pytest.mark.parametrize("kind", HIERARCHIES)
def test_where_a_control_group_may_be_made(tmp_path: Path, kind: str) -> None:
    groups, mounts, parents = HIERARCHIES[kind]
    (tmp_path / "cgroup").write_text(groups)
    (tmp_path / "mountinfo").write_text(mounts)
    assert sandbox._cgroup_parents(str(tmp_path)) == parents


def test_a_folder_that_is_no_control_group_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_cgroup_parents", lambda: [{str(tmp_path): BOTH}])
    with pytest.raises(OSError, match="no control group"):
        sandbox._join_cgroup(1 << 30, 100)
    assert list(tmp_path.iterdir()) == []


def leave_cgroup() -> None:
    """Put this process back, and remove its group."""
    for parents in sandbox._cgroup_parents():
        for folder in parents:
            name = Path(folder)
            if name.name == f"greenfast-{os.getpid()}":
                sandbox._write(str(name.parent / "cgroup.procs"), "0")
    sandbox.remove_cgroup(os.getpid())


def check(found: dict[str, list[str]], but: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """Every attack is refused with the measures, and succeeds without them; ``but`` does not."""
    assert {name: held for name, (held, _) in found.items() if held == "reached"} == {}
    assert {name for name, (_, without) in found.items() if without != "reached"} == set(but)
