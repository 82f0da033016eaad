"""The record of a run: its result with everything that is needed to repeat it.

Records are written as JSON and read back by ``greenfast report`` and ``greenfast compare``; units are in the names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

from greenfast.spec.facts import DeviceInfo, KernelCounts, LaunchFacts, Resources
from greenfast.spec.problem import NORMAL

#: Of records. Those of version 1 had no digest, no limits of the gates, no blocks of the A/A and no exam.
SCHEMA_VERSION = 2

#: What the name of a shape begins with that was drawn at run time, and not named by the task.
DRAWN = "drawn_"

Status = Literal["PASS", "FAIL", "PENDING"]
#: PARTIAL: all that was asked held, and it was less than the whole exam. UNCHECKED: the gates hold, but a check of the
#: exam was not done.
Decision = Literal["MERGE", "PARTIAL", "DEFER", "PENDING", "UNCHECKED"]
#: FAST: the whole interval is at or above the required speedup. SHORT: faster beyond the noise, but the whole interval
#: is below the requirement. SLOWER: the whole interval lies below the noise. NO EFFECT: none of these, and the whole
#: interval lies within 1 % of 1, a margin that does not depend on the noise.
#: INCONCLUSIVE: the interval is too wide for any of these, or the noise is above the margin.
SpeedVerdict = Literal["FAST", "SHORT", "NO EFFECT", "SLOWER", "INCONCLUSIVE"]


#: Each gate in the order in which they run, with the exit code of ``greenfast judge`` if it is the first that falls
#: short. A code belongs to its name: a new gate takes a new number, wherever it runs.
GATES = {"BUILD": 11, "RESOURCES": 12, "CORRECTNESS": 13, "PERFORMANCE": 14, "EVIDENCE": 15}
#: The gates that every record of this version lists. A gate that is added later is listed by the records that ran it,
#: and the others are judged without it.
FIRST_GATES = ("BUILD", "RESOURCES", "CORRECTNESS", "PERFORMANCE", "EVIDENCE")


class _Data(msgspec.Struct, frozen=True, kw_only=True):
    pass


class GitState(_Data, frozen=True, kw_only=True):
    """The source tree that ran; ``sha`` is "unknown" outside a git checkout."""

    sha: str
    branch: str
    dirty: bool


class Build(_Data, frozen=True, kw_only=True):
    """One compiled kernel.

    kernel_hash: over the rendered source and every project header that it includes (``device.compiler``). code_hash:
    over the machine code (``device.identity``). dims: of the first shape that it is for. shapes: all of them by name.
    launches: by shape. shapes, code_hash and launches are empty in records of older versions. resources: None where
    nothing could assemble the kernel's PTX.
    """

    entry: str
    source: str
    dims: dict[str, int]
    arch: str
    options: list[str]
    compiler: str
    kernel_hash: str
    compile_ms: float
    from_cache: bool
    resources: Resources | None
    machine_code: dict[str, int] = {}
    shapes: list[str] = []
    code_hash: str = ""
    launches: dict[str, LaunchFacts] = {}


class TimedKernel(_Data, frozen=True, kw_only=True):
    """What tells whether a kernel that was timed is still today's; the fields are as in ``record.Build``."""

    arch: str
    options: list[str]
    compiler: str
    kernel_hash: str
    code_hash: str
    launch: LaunchFacts


class ErrorStats(_Data, frozen=True, kw_only=True):
    """Error of one array against a reference; max_rel_err: over elements with |reference| above 1e-3 of its largest."""

    max_abs_err: float
    mean_abs_err: float
    max_rel_err: float
    relative_error: float
    pct_bad: float


class Histogram(_Data, frozen=True, kw_only=True):
    """How many elements lie in each bin of a logarithmic scale.

    first: log10 of the lowest edge; the others follow at ``per_decade`` a decade. counts: below the first edge (zeros
    too), between each two edges, and from the last one up.
    """

    first: int
    per_decade: int
    counts: list[int]


class Limits(_Data, frozen=True, kw_only=True):
    """What CORRECTNESS allowed on a shape; the names are as in a task's ``error`` and ``kernel_error``."""

    max_abs_err: float
    mean_abs_err: float
    pct_bad: float
    relative_error: float
    bound_factor: float


class WorstElement(_Data, frozen=True, kw_only=True):
    """The element of an output that is furthest off, measured by its bound.

    output: name of the buffer; "output" if the decoded array is not one buffer after the other. index: in that array.
    got: None if it is NaN or infinite. expected: exact arithmetic. allowed: the largest |got - expected|, None if there
    is no limit. wrong: the share of all elements, from 0 to 1,
    that are off by more than their bounds or are not finite.
    """

    output: str
    index: list[int]
    got: float | None
    expected: float
    allowed: float | None
    wrong: float

    def __str__(self) -> str:
        place = f"{self.output}[{', '.join(map(str, self.index))}]"
        share = "no element" if self.wrong == 0 else f"{max(100 * self.wrong, 0.01):.3g} % of elements"
        got = "NaN or infinity" if self.got is None else f"{self.got:.5g}"
        allowed = "any error" if self.allowed is None else f"{self.allowed:.2g}"
        return f"{place}: got {got}, expected {self.expected:.5g}, allowed {allowed}; {share} wrong"


#: How the note of a case begins that did not run because the process ended at an earlier one; the cause follows.
NOT_RUN = "not run: "


class CorrectnessRow(_Data, frozen=True, kw_only=True):
    """One side's correctness on one (shape, seed).

    error: kernel output against the unquantized reference. format_error: exact arithmetic on dequantized inputs
    against the same. kernel_error: kernel output against exact arithmetic. bound_ratio: the worst element's kernel
    error over the largest that rounding explains. gates: name -> held. case_bytes: of all inputs and outputs, 0 in
    records of older versions. error_histogram, bound_histogram: of each element's absolute kernel error, and of that
    error over what rounding explains; None where there is no kernel error, and in records of older versions.
    worst: the element that is furthest off; None in records of older versions and if the kernel did not run.
    variant: of the problem's inputs. drawn: whether the shape or the seed is not the task's; then, and in variants, the
    format's error is told and not judged. own_shape: whether the shape is the task's and the seed is not; then the
    limits on the error against the unquantized reference hold where the format's error leaves room for them. False in
    records of older versions.
    """

    shape: str
    dims: dict[str, int]
    seed: int
    inputs_digest: str
    error: ErrorStats | None
    format_error: ErrorStats
    kernel_error: ErrorStats | None
    bound_ratio: float | None
    gates: dict[str, bool]
    notes: list[str] = []
    variant: str = NORMAL
    drawn: bool = False
    own_shape: bool = False
    case_bytes: int = 0
    error_histogram: Histogram | None = None
    bound_histogram: Histogram | None = None
    worst: WorstElement | None = None

    @property
    def format_is_judged(self) -> bool:
        """Whether the limits on the format's error, and on the total error, apply."""
        return not self.drawn and self.variant == NORMAL

    @property
    def scatters(self) -> bool:
        """Whether the limit on the relative error is one for cases of any size (``errors.relative_error_factor``)."""
        return self.variant != NORMAL or (self.drawn and not self.own_shape)

    @property
    def passed(self) -> bool:
        """Whether every gate held."""
        return bool(self.gates) and all(self.gates.values())

    @property
    def is_skipped(self) -> bool:
        """Whether the case did not run because the process ended at an earlier one."""
        return self.notes[:1] != [] and self.notes[0].startswith(NOT_RUN)


class ParityRow(_Data, frozen=True, kw_only=True):
    """Baseline and candidate outputs compared bit by bit on one (shape, seed)."""

    shape: str
    seed: int
    identical: bool
    different_elements: int
    max_abs_diff: float


class TimingRow(_Data, frozen=True, kw_only=True):
    """One side's timing on one (shape, seed); method and cache label what was timed.

    seed: whose blocks these are; each launch draws its inputs from those of all timed seeds. block_medians_us: nested
    [process][block], as are block_mhz and block_watts, the clock and the power halfway through each block, which are
    empty where the driver does not tell them. floor: the least time that the device could need, or why none is known.

    resolution_us: the step of the time stamps, 0 where the times do not show it, as in older records. function_us: for
    a program that was captured from a function, the median device time of direct calls, measured by the solution's
    process; else 0.
    """

    shape: str
    dims: dict[str, int]
    seed: int
    method: str
    cache: str
    warmup_iters: int
    timed_iters: int
    discarded_iters: int
    p50_us: float
    p90_us: float
    mean_us: float
    std_us: float
    iters_per_sec: float
    block_medians_us: list[list[float]] = []
    block_mhz: list[list[float]] = []
    block_watts: list[list[float]] = []
    floor: str = ""
    resolution_us: float = 0.0
    function_us: float = 0.0


class SpeedupRow(_Data, frozen=True, kw_only=True):
    """Baseline over candidate time on one shape: 1.10 means that the candidate is 10 % faster.

    required is such a ratio too, 0 where nothing is required; noise_floor is a fraction. slow_replay: why the baseline
    is no fair one, because its captured launches take longer than the function itself; empty if they do not.
    """

    shape: str
    cache: str
    speedup: float
    ci_low: float
    ci_high: float
    confidence: float
    noise_floor: float
    required: float
    gated: bool
    verdict: SpeedVerdict
    processes: int
    blocks: int
    slow_replay: str = ""


class Quote(_Data, frozen=True, kw_only=True):
    """The speedups of a kept record of the same kernels: what a run that could time nothing says of PERFORMANCE.

    path, sha256: the record's file. created, git, device, command: its own. speedups: its rows for this run's shapes,
    with the verdicts against what this run requires.
    """

    path: str
    sha256: str
    created: str
    git: GitState
    device: DeviceInfo
    command: str
    speedups: list[SpeedupRow]


class SolutionSource(_Data, frozen=True, kw_only=True):
    """What a solution was judged from. sha256: over all its files; files: the SHA-256 of each by name."""

    language: str
    author: str = ""
    description: str = ""
    sha256: str
    files: dict[str, str]


class Side(_Data, frozen=True, kw_only=True):
    """One of the two variants of a comparison, with all that was found out about it.

    counts: by shape; empty unless the kernels ran in the emulator. limits: by shape.
    solution: None for a rung of the task. sandbox: what protected the judge from the code of a solution, or of a
    task's own family; empty for greenfast's kernels.
    """

    variant: str
    toggles: dict[str, int]
    builds: list[Build] = []
    correctness: list[CorrectnessRow] = []
    timing: list[TimingRow] = []
    counts: dict[str, KernelCounts] = {}
    limits: dict[str, Limits] = {}
    solution: SolutionSource | None = None
    sandbox: list[str] = []


class GateResult(_Data, frozen=True, kw_only=True):
    """One gate's outcome: a status, a line that says why, and rows of (what, target, actual, held).

    unchecked: the checks of the exam that were not done although the gate holds, and why; of PERFORMANCE, why the
    baseline is no fair one. With any of them there is no MERGE. Empty in records of older versions.
    """

    gate: str
    status: Status
    summary: str
    reasons: list[str] = []
    checks: list[tuple[str, str, str, Status]] = []
    unchecked: list[str] = []


def largest_named_shape(counts: Mapping[str, KernelCounts]) -> str:
    """Return the task's own shape at which most is executed; a drawn one only if nothing else was counted."""
    named = {shape: c.warp_instructions for shape, c in counts.items() if not shape.startswith(DRAWN)}
    sizes = named or {shape: c.warp_instructions for shape, c in counts.items()}
    return max(sizes, key=lambda shape: sizes[shape])


def status_of(gates: Sequence[GateResult], gate: str) -> Status:
    """The status of a gate by name; PENDING where it did not run."""
    return next((result.status for result in gates if result.gate == gate), "PENDING")


class Run(_Data, frozen=True, kw_only=True):
    """What every run of the gates records: what was asked, where, and how each gate ended.

    least_work: what the problem needs by shape and by the count's name in KernelCounts, where it says so and kernels
    were counted. order_seed: of all that timing draws (the order of blocks, and what is in them); in records of older
    versions none, and where nothing was timed.
    """

    schema_version: int = SCHEMA_VERSION
    created: str
    task: str
    format: str
    arch: str
    command: str
    package_version: str
    gates: list[GateResult]
    git: GitState
    device: DeviceInfo | None = None
    environment: dict[str, str] = {}
    clocks: dict[str, float] = {}
    order_seed: int | None = None
    least_work: dict[str, dict[str, int]] = {}

    def sides(self) -> list[tuple[str, Side]]:
        """The role, or the variant's name, and side of each variant."""
        return []

    def gate_status(self, gate: str) -> Status:
        """The status of a gate by name; PENDING where it did not run."""
        return status_of(self.gates, gate)

    def _require_correct(self, timed: bool) -> None:
        if timed and self.gate_status("CORRECTNESS") != "PASS":
            raise ValueError("a record cannot hold timings unless its CORRECTNESS gate passed")


class PhaseRecord(Run, frozen=True, kw_only=True, tag_field="kind", tag="phases"):
    """Mean SM cycles per block and phase, by shape, of a variant's instrumented build.

    phase_counts: by shape and phase, what was executed, where the emulator ran it and there are no cycles.
    """

    side: Side
    phase_cycles: dict[str, dict[str, float]]
    phase_counts: dict[str, dict[str, KernelCounts]] = {}

    def sides(self) -> list[tuple[str, Side]]:
        """The variant's name and its side."""
        return [(self.side.variant, self.side)]


class BenchRecord(Run, frozen=True, kw_only=True, tag_field="kind", tag="bench"):
    """One variant, checked and timed. Raises ValueError as Record does."""

    side: Side

    def __post_init__(self) -> None:
        self._require_correct(bool(self.side.timing))

    def sides(self) -> list[tuple[str, Side]]:
        """The variant's name and its side."""
        return [(self.side.variant, self.side)]


class Exam(_Data, frozen=True, kw_only=True):
    """How much of the whole exam a run asked (``judge.exam``).

    seed: what was drawn from, and the first seed of the inputs; None where nothing was drawn. drawn: the drawn shapes'
    dimensions by name. missing: what was not asked, in words; empty for the whole exam. complete: whether nothing is
    missing, or what is was asked by the record that PERFORMANCE is quoted from.
    """

    seed: int | None
    drawn: dict[str, dict[str, int]] = {}
    complete: bool
    missing: list[str] = []


class Record(Run, frozen=True, kw_only=True, tag_field="kind", tag="comparison"):
    """A whole comparison.

    baseline_again: timings of the baseline against itself, from which the noise floor comes. quoted: where nothing was
    timed, what PERFORMANCE was quoted from; such a record has no timings or speedups itself.
    Raises ValueError for timings of a kernel whose correctness did not pass (no record is wrong but fast), and for a
    record that was both timed and quoted.
    """

    baseline: Side
    candidate: Side
    parity: list[ParityRow] = []
    speedups: list[SpeedupRow] = []
    baseline_again: list[TimingRow] = []
    decision: Decision
    reasons: list[str]
    exam: Exam | None = None
    quoted: Quote | None = None

    def __post_init__(self) -> None:
        timed = bool(self.speedups or self.baseline.timing or self.candidate.timing or self.baseline_again)
        self._require_correct(timed or self.quoted is not None)
        if timed and self.quoted is not None:
            raise ValueError("a record holds its own timings or quotes another's, never both")

    def sides(self) -> list[tuple[str, Side]]:
        """Each role and its side."""
        return [("baseline", self.baseline), ("candidate", self.candidate)]


#: What a record.json of the gates may hold; its ``kind`` says which.
AnyRecord: TypeAlias = "Record | BenchRecord | PhaseRecord"
