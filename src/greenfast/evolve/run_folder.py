"""A run's folder: create it, resume it, and write the files that are derived from its log."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from greenfast import __version__
from greenfast.evolve.event_log import has_ended, read_events
from greenfast.evolve.loop import Search, SearchListener, State
from greenfast.evolve.manifest import Manifest, SearchBudget, read_manifest, write_manifest
from greenfast.evolve.proposal import Evaluation, Insight, Proposer, describe
from greenfast.evolve.sources import Sources
from greenfast.evolve.space import check
from greenfast.evolve.stages import Stages, keep_winner, make_search_request
from greenfast.evolve.workers import describe_gpus, make_gpu_workers, make_workers
from greenfast.judge.check_plan import fits_dims
from greenfast.judge.implementation import build_implementation
from greenfast.judge.request import EMULATOR, choose_devices, git_state, now, package_versions
from greenfast.judge.store import check_writable, make_stamped, to_json, write_whole
from greenfast.judge.subject import find_baseline
from greenfast.judge.task import load
from greenfast.spec.errors import MachineError, UsageError

INDEX, INSIGHTS, NEGATIVES = "index.sqlite", "insights.jsonl", "negatives.md"
_UNTIMED = (
    "candidates run on the PTX emulator, on small shapes, and are ordered by estimates from its counts; "
    "no speed is measured and no finalist is validated"
)
#: A disk with less free space is full before a batch is done.
_FREE_BYTES = 64 << 20


def start(out: Path, manifest: Manifest) -> tuple[Path, Manifest]:
    """Complete the manifest with the defaults of the task and the device, and create the folder ``out/evolve-...``.

    Raises UsageError for invalid settings, before the folder is created, and MachineError if it cannot be created.
    """
    try:
        manifest = msgspec.convert(msgspec.to_builtins(manifest), Manifest)
    except msgspec.ValidationError as e:
        raise UsageError(f"settings of the search: {e}") from None
    check(manifest.space)
    task = load(manifest.task)
    devices = choose_devices(manifest.device)
    raced = make_search_request(manifest, task, manifest.shapes, devices[0], out)
    if len(devices) > 1:
        describe_gpus([int(device) for device in devices], manifest.timeout_s)  # one kind
    sources = Sources(manifest.space, Path(manifest.space_folder), raced, out).digest()
    build_implementation(raced, find_baseline(task, manifest.baseline, out), is_reference=True)
    config = task.config
    suited = [shape for shape in config.shapes if fits_dims(shape.dims, manifest.space.only)]
    if not suited:
        raise UsageError(f"space {manifest.space.name}: no shape of task {config.name} has {manifest.space.only}")
    small = manifest.small or [min(suited, key=lambda s: math.prod(s.dims.values())).name]
    names = [shape.name for shape in suited]
    if strange := [name for name in small if name not in names]:
        raise UsageError(f"--small {strange[0]!r}: shapes of space {manifest.space.name} are {', '.join(names)}")
    gated = [config.shape(name).name for name in (*config.timing.gate_shapes, *config.defaults.shapes[::-1])]
    chosen = [shape.name for shape in raced.shapes] if manifest.shapes else [n for n in gated if n in names][:1]
    if not chosen or not set(chosen) | set(small) <= set(names):
        allowed = ", ".join(names)
        raise UsageError(
            f"space {manifest.space.name}: it is for these shapes: {allowed}; name some of them with --shapes"
        )
    manifest = msgspec.structs.replace(
        manifest,
        created=now().strftime("%Y-%m-%dT%H:%M:%SZ"),
        task=str(task.folder.resolve()),
        shapes=chosen,
        small=small,
        format=raced.format,
        arch=raced.target.name,
        baseline=manifest.baseline or config.defaults.baseline,
        sources=sources,
        package_version=__version__,
        git=git_state(),
        environment=package_versions(),
    )
    check_writable(out)
    try:
        folder = make_stamped(out, f"evolve-{config.name}-{now().strftime('%Y%m%d-%H%M%S')}", Path.mkdir)
    except OSError as e:
        raise MachineError(f"a folder in {out} cannot be made ({e.strerror})") from e
    write_manifest(folder, manifest)
    return folder, manifest


def describe_version_change(manifest: Manifest) -> str:
    """Describe the difference if a run was begun by another version of greenfast; else return an empty text."""
    git = git_state()
    then, here = (
        f"{version}{f' of commit {state.sha[:8]}' if state else ''}"
        for version, state in ((manifest.package_version, manifest.git), (__version__, git))
    )
    if then == here:
        return ""
    return (
        f"this run was begun by greenfast {then}, and goes on with {here}: each may have measured different "
        "kernels; begin a new run to compare them"
    )


def load_resumed_manifest(folder: Path, budget: SearchBudget | None) -> Manifest:
    """Return a run's manifest, with another budget if one is passed. Raises UsageError for a folder without a run."""
    manifest = read_manifest(folder)
    if budget is not None:
        manifest = msgspec.structs.replace(manifest, budget=budget)
        write_manifest(folder, manifest)
    return manifest


def search(
    folder: Path,
    manifest: Manifest,
    make_proposer: Callable[[str, dict[str, str]], Proposer],
    workers: str,
    listener: SearchListener,
    gpus: Sequence[int],
    insights: Sequence[Insight] = (),
) -> State:
    """Run or resume the search in a folder, and write the derived files. Raises as ``Search.run``.

    gpus: from ``choose_gpus``. After an error or an interrupt the derived files of the results so far are written too.
    """
    free = shutil.disk_usage(folder).free
    if free < _FREE_BYTES:
        raise MachineError(f"{folder}: {free >> 20} MiB are free on its disk; a run needs at least {_FREE_BYTES >> 20}")
    proposer = make_proposer(manifest.proposer, manifest.options)
    with (
        lock_run_folder(folder),
        Stages(manifest, folder, gpus[0] if gpus else None, listener.say) as stages,
        contextlib.ExitStack() as ends,
    ):
        if manifest.sources not in ("", stages.sources.digest()) and not has_ended(folder):
            raise UsageError(
                f"{folder}: files of the task, the solution or a region changed since the run began; put them back, or "
                "begin a new run"
            )
        pool = make_workers(workers, manifest, folder, stages)
        ends.callback(pool.close)
        gpu_workers = make_gpu_workers(gpus, manifest, folder, stages)
        if gpu_workers is not None:
            ends.callback(gpu_workers.workers.close)
        run = Search(folder, manifest, proposer, stages, pool, listener, insights, gpu_workers)
        try:
            state = run.run()
            if state.winner is not None:
                keep_winner(stages, state.winner[0].candidate, state.winner[1], folder)
            return state
        finally:
            if run.state.history:
                write_derived(folder, manifest, run.state)


def choose_gpus(folder: Path, manifest: Manifest) -> tuple[list[int], Manifest]:
    """Return the numbers of the GPUs that time candidates, and the manifest with ``untimed``, and write the manifest.

    Finalists are validated on the first GPU. Without a GPU the list is empty, and a run that began without one goes on
    without one. A finished search keeps its ``untimed``: it may be shown on a machine without a GPU.
    """
    events = read_events(folder)
    if len(events) > 1 and all(event.kind != "gpus" for event in events):  # the first event is of the settings
        return [], manifest
    first, *more = choose_devices(manifest.device)
    gpus: list[int] = []
    cause = f"--device {manifest.device}" if manifest.device not in ("auto", "all") else "no GPU was found"
    if first not in (EMULATOR, "none"):
        request = make_search_request(manifest, load(manifest.task), manifest.shapes, first, Path())
        reason = request.cannot_time()
        if reason is None:
            gpus = [int(device) for device in (first, *more)]
        cause = f"GPU {first} cannot time the kernels ({reason})"
    untimed = "" if gpus else f"{cause}: {_UNTIMED}"
    if untimed != manifest.untimed and not has_ended(folder):
        manifest = msgspec.structs.replace(manifest, untimed=untimed)
        write_manifest(folder, manifest)
    return gpus, manifest


@contextlib.contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Hold a lock on a run's folder. The lock is released when the process ends, also after a crash.

    The lock file is not removed: a lock on a removed file would let a third process in.
    """
    path = folder / ".running"
    try:
        file = path.open("a+b", buffering=0)
    except OSError as e:
        raise MachineError(f"{path} cannot be written ({e.strerror})") from e
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            who = file.read(20).decode("ascii", "replace") or "another one"
            raise UsageError(f"{folder}: process {who} is running it; wait until it ends, or end it") from None
        except OSError as e:
            raise MachineError(f"{path} cannot be locked ({e.strerror}); use a disk that knows locks") from e
        file.truncate(0)
        file.write(str(os.getpid()).encode())
        yield
        file.truncate(0)


def write_derived(folder: Path, manifest: Manifest, state: State) -> None:
    """Write the derived files: candidates, index, insights and failures. Raises MachineError for a full disk."""
    for e in state.history:
        if e.stage not in ("duplicate", "space"):
            write_whole(folder / "candidates" / e.candidate.key / "evaluation.json", to_json(e))
    write_whole(folder / INSIGHTS, b"".join(msgspec.json.encode(i) + b"\n" for i in state.insights))
    write_whole(folder / NEGATIVES, "".join(list_failures(manifest, state)))
    write_index(folder / INDEX, state)


def list_failures(manifest: Manifest, state: State) -> list[str]:
    """Return a line for each finalist that did not pass, or one line for a search without finalists."""
    start = f"- {manifest.created[:10]}, {manifest.space.name} against {manifest.baseline}:"
    if not state.verdicts:
        built = f"no finalist among {state.evaluations} kernels of {len(state.history)} candidates"
        return [f"{start} {built}; {state.ended}\n"] if state.ended else []
    return [
        f"{start} {describe(manifest.space, e.candidate)}: {v.decision}, {'; '.join(v.reasons)} ({v.record})\n"
        for e, v in state.verdicts
        if v.decision != "MERGE"
    ]


def write_index(path: Path, state: State) -> None:
    """Write an SQLite table of all evaluations. Raises MachineError if it cannot be written."""
    work = path.with_suffix(".new")
    work.unlink(missing_ok=True)
    try:
        with sqlite3.connect(work) as index:
            index.execute(f"create table evaluations ({', '.join(_COLUMNS)})")
            rows = [_make_row(n, e) for n, e in enumerate(state.history)]
            index.executemany(f"insert into evaluations values ({', '.join('?' * len(_COLUMNS))})", rows)
        index.close()
        os.replace(work, path)
    except (sqlite3.Error, OSError) as e:
        raise MachineError(f"{path} cannot be written ({e})") from e


_COLUMNS = (
    *("n integer primary key", "key", "hash", "stage", "valid", "fitness", "fitness_kind", "pipe", "smem_bytes"),
    *("registers", "parameters", "edits", "origin", "parents", "rationale", "feedback", "cost_seconds", "gpu_seconds"),
)


def _make_row(n: int, e: Evaluation) -> tuple[object, ...]:
    b, c = e.behaviour, e.candidate
    return (
        *(n, c.key, e.hash, e.stage, e.valid, e.fitness, e.fitness_kind),
        *((b.pipe, b.smem_bytes, b.registers) if b else (None, None, None)),
        *(msgspec.json.encode(c.parameters).decode(), len(c.edits), c.origin, " ".join(c.parents), c.rationale),
        *(e.feedback, e.cost_seconds, e.gpu_seconds),
    )
