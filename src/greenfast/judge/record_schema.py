"""The schema of a run's record: its measurements, with everything that is needed to repeat the run.

Records are JSON files. ``greenfast report`` reads them. Field names contain the units. A file has no conclusions
(``judge.record_io``): gates of rows, speedups, verdicts, PERFORMANCE and the decision are computed when it is read
(``judge.record_io``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

from greenfast.spec.facts import DeviceInfo, KernelCounts, LaunchFacts, Resources
from greenfast.spec.problem import NORMAL

#: Version of the record schema. Files of version 2 have the conclusions too, and are still read. Version 1 had no
#: digest, no limits of the gates, no A/A blocks and no exam.
SCHEMA_VERSION, OLDEST_VERSION = 3, 2

#: Relative tolerance of a floating-point sum, and tolerance of times: these are rounded to a thousandth.
_ROUNDING, _LAST_DIGITS_US = 1e-9, 1.1e-3

#: Prefix of the names of random shapes. They are drawn at run time.
DRAWN = "drawn_"

Status = Literal["PASS", "FAIL", "PENDING"]
#: INCOMPLETE: all gates hold on a part of the check plan. UNCHECKED: all gates hold, but a check was skipped.
Decision = Literal["MERGE", "INCOMPLETE", "DEFER", "PENDING", "UNCHECKED"]
#: FAST: the whole interval is at or above the required speedup. SHORT: faster beyond the noise, but the whole interval
#: is below the requirement. SLOWER: the whole interval is below the noise. NO EFFECT: no other verdict, and the whole
#: interval is within 1 % of 1; this margin does not depend on the noise.
#: INCONCLUSIVE: the interval is too wide for the other verdicts, or the noise is above the margin.
SpeedVerdict = Literal["FAST", "SHORT", "NO EFFECT", "SLOWER", "INCONCLUSIVE"]


#: The gates that every record of this version lists. A later gate is listed only by the records that ran it, and
#: other records are judged without it.
FIRST_GATES = ("BUILD", "RESOURCES", "CORRECTNESS", "PERFORMANCE", "EVIDENCE")


class _Data(msgspec.Struct, frozen=True, kw_only=True):
    pass


class GitState(_Data, frozen=True, kw_only=True):
    """The source tree of the run. ``sha`` is "unknown" outside a git checkout."""

    sha: str
    branch: str
    dirty: bool

    def __str__(self) -> str:
        return f"{self.sha}{' (dirty)' if self.dirty else ''}"

    @property
    def short(self) -> str:
        """The commit, shortened, with "(dirty)" for a modified tree."""
        return f"{self.sha[:10]}{' (dirty)' if self.dirty else ''}"

    @property
    def details(self) -> str:
        """The commit with its branch, and whether the tree was modified."""
        return f"{self.sha} on {self.branch}, {'dirty' if self.dirty else 'clean'}"


class Build(_Data, frozen=True, kw_only=True):
    """One compiled kernel.

    kernel_hash: hash of the rendered source and all included project headers (``device.compiler``).
    code_hash: hash of the machine code (``device.identity``).
    dims: dimensions of the kernel's first shape. shapes: names of all its shapes. launches: by shape.
    resources: None if the kernel's PTX was not assembled.
    shapes, code_hash and launches are empty in older records.
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
    """The identity of a timed kernel, to detect later changes of it. The fields are as in ``Build``."""

    arch: str
    options: list[str]
    compiler: str
    kernel_hash: str
    code_hash: str
    launch: LaunchFacts


class ErrorStats(_Data, frozen=True, kw_only=True):
    """Errors of an array against a reference. max_rel_err covers elements with |reference| > 1e-3 of its maximum."""

    max_abs_err: float
    mean_abs_err: float
    max_rel_err: float
    relative_error: float
    pct_bad: float

    def __post_init__(self) -> None:
        if self.mean_abs_err > self.max_abs_err * (1 + _ROUNDING):
            raise ValueError(f"mean_abs_err is {self.mean_abs_err}, above max_abs_err {self.max_abs_err}")


class Histogram(_Data, frozen=True, kw_only=True):
    """A histogram with logarithmic bins.

    first: log10 of the lowest edge. per_decade: number of edges per decade.
    counts: elements below the first edge (including zeros), between neighbouring edges, and above the last edge.
    """

    first: int
    per_decade: int
    counts: list[int]

    def top_bin(self) -> tuple[float, float]:
        """Return the edges of the highest bin with an element; of the lowest bin if there is none."""
        top = max((n for n, count in enumerate(self.counts) if count), default=0)
        low, high = (10.0 ** (self.first + (top - n) / self.per_decade) for n in (1, 0))
        return (low if top else 0.0), (high if top < len(self.counts) - 1 else math.inf)


class Limits(_Data, frozen=True, kw_only=True):
    """The limits of CORRECTNESS for a shape, with the names of a task's ``error`` and ``kernel_error``."""

    max_abs_err: float
    mean_abs_err: float
    pct_bad: float
    relative_error: float
    bound_factor: float


class WorstElement(_Data, frozen=True, kw_only=True):
    """The element of an output with the largest error relative to its bound.

    output: name of the buffer; "output" if the decoded array is not a concatenation of the buffers.
    index: position in this array.
    got: None if it is NaN or infinite. expected: the result of exact arithmetic.
    allowed: the maximum of |got - expected|; None if there is no limit.
    wrong: the share of all elements, from 0 to 1, that exceed their bounds or are not finite.
    """

    output: str
    index: list[int]
    got: float | None
    expected: float
    allowed: float | None
    wrong: float

    def __str__(self) -> str:
        element = f"{self.output}[{', '.join(map(str, self.index))}]"
        share = "no element" if self.wrong == 0 else f"{max(100 * self.wrong, 0.01):.3g} % of elements"
        got = "NaN or infinity" if self.got is None else f"{self.got:.5g}"
        allowed = "any error" if self.allowed is None else f"{self.allowed:.2g}"
        return f"{element}: got {got}, expected {self.expected:.5g}, allowed {allowed}; {share} wrong"


class ErrorMap(_Data, frozen=True, kw_only=True):
    """Where an output is wrong: the buffer of the worst element as a matrix, its last dimension as columns.

    output: name of the buffer. rows, columns: of the matrix. cells: the matrix in coarse cells, each with the largest
    ratio of an element's error to its allowed error; None if one is not finite, or any error is too much.
    top, left: position of the first of the values around the worst element. got, expected: these values, by row;
    None if not finite.
    """

    output: str
    rows: int
    columns: int
    cells: list[list[float | None]]
    top: int
    left: int
    got: list[list[float | None]]
    expected: list[list[float | None]]


#: The gates of a correctness row that do not follow from its numbers.
OBSERVED_GATES = ("ran_pass", "memory_pass", "repeat_pass")
#: Prefix of the note of a case that did not run because the process ended at an earlier case. The cause follows.
NOT_RUN = "not run: "


class CorrectnessRow(_Data, frozen=True, kw_only=True):
    """The correctness of one implementation on one case.

    error: error of the output against the unquantized reference.
    format_error: error of exact arithmetic on dequantized inputs against the same reference.
    kernel_error: error of the output against exact arithmetic.
    bound_ratio: the largest ratio of an element's kernel error to its rounding bound.
    gates: by name, True if the gate held. A file has ``OBSERVED_GATES``; the others follow from the numbers.
    elements: number of compared elements; 0 in older records.
    variant: name of the inputs' variant.
    drawn: True if the shape or the seed is not the task's. In such cases and in variants the format's error is reported
        and not judged.
    own_shape: True if the shape is the task's and the seed is not. The limits on ``error`` then apply only if the
        format's error is well below them. False in older records.
    case_bytes: bytes of all inputs and outputs; 0 in older records.
    error_histogram: absolute kernel error per element. bound_histogram: ratio of this error to its rounding bound. Both
        are None without a kernel error and in older records.
    worst: the element with the largest ratio; None in older records and if the kernel did not run.
    error_map: where the output is wrong; None if no element is, and in older records.
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
    elements: int = 0
    error_histogram: Histogram | None = None
    bound_histogram: Histogram | None = None
    worst: WorstElement | None = None
    error_map: ErrorMap | None = None

    def __post_init__(self) -> None:
        if self.kernel_error is not None and self.error_histogram is not None:
            low, high = self.error_histogram.top_bin()
            if not low * (1 - _ROUNDING) <= self.kernel_error.max_abs_err <= high * (1 + _ROUNDING):
                raise ValueError(
                    f"kernel_error.max_abs_err is {self.kernel_error.max_abs_err}, its histogram is from {low:.3g} to "
                    f"{high:.3g}"
                )

    @property
    def format_is_judged(self) -> bool:
        """True if the limits on the format's error and on the total error apply."""
        return not self.drawn and self.variant == NORMAL

    @property
    def scatters(self) -> bool:
        """True if the limit on the relative error has the factor of ``error_metrics.relative_error_factor``."""
        return self.variant != NORMAL or (self.drawn and not self.own_shape)

    @property
    def passed(self) -> bool:
        """True if every gate held."""
        return bool(self.gates) and all(self.gates.values())

    @property
    def case(self) -> str:
        """The case in words, such as "small seed 3"; its variant follows if the inputs are not the normal ones."""
        return f"{self.shape} seed {self.seed}" + (f" {self.variant}" if self.variant != NORMAL else "")

    @property
    def is_skipped(self) -> bool:
        """True if the case did not run because the process ended at an earlier case."""
        return self.notes[:1] != [] and self.notes[0].startswith(NOT_RUN)


class ParityRow(_Data, frozen=True, kw_only=True):
    """Bitwise comparison of the outputs of baseline and candidate on one (shape, seed)."""

    shape: str
    seed: int
    identical: bool
    different_elements: int
    max_abs_diff: float


class TimingRow(_Data, frozen=True, kw_only=True):
    """The timing of one implementation on one (shape, seed).

    seed: the seed of the first inputs of the blocks. Each launch draws its inputs from all timed seeds.
    method, cache: the timing method and the state of the L2 cache.
    block_medians_us: nested [process][block].
    block_mhz, block_watts: clock and power in the middle of each block, nested likewise; empty if the driver does not
        report them.
    floor: the minimum time of the device for this work, or the reason why it is unknown.
    resolution_us: step of the time stamps; 0 if it is unknown, as in older records.
    function_us: for a program captured from a function, the median device time of direct calls; else 0.
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

    def __post_init__(self) -> None:
        medians = [median for process in self.block_medians_us for median in process]
        low, high = min(medians, default=self.p50_us), max(medians, default=self.p50_us)
        if not low - _LAST_DIGITS_US <= self.p50_us <= min(high + _LAST_DIGITS_US, self.p90_us):
            raise ValueError(
                f"p50_us is {self.p50_us}, its blocks are from {low} to {high} and its p90_us is {self.p90_us}"
            )


class SpeedupRow(_Data, frozen=True, kw_only=True):
    """Baseline over candidate time on one shape: 1.10 means that the candidate is 10 % faster.

    required: the required ratio; 0 for no requirement. noise_floor: a fraction.
    slow_replay: the reason why the baseline is not fair: its captured launches take longer than the function itself;
        empty otherwise.
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
    verdict: SpeedVerdict = "INCONCLUSIVE"
    processes: int
    blocks: int
    slow_replay: str = ""


class Claim(_Data, frozen=True, kw_only=True):
    """The claim that PERFORMANCE tests: on the ``gated`` shapes, warm, the speedup reaches ``required`` (0: the noise).

    confidence: of each interval.
    """

    confidence: float
    required: float
    gated: list[str]


class CachedTiming(_Data, frozen=True, kw_only=True):
    """The cached speedups of an earlier record of the same kernels, for a run that could not time.

    path, sha256: the earlier record's file. created, git, device, command: fields of the earlier record.
    speedups: its rows for this run's shapes, with verdicts against this run's requirement.
    """

    path: str
    sha256: str
    created: str
    git: GitState
    device: DeviceInfo
    command: str
    speedups: list[SpeedupRow]


class SolutionSource(_Data, frozen=True, kw_only=True):
    """The sources of a judged solution. sha256: hash of all files. files: SHA-256 of each file by name.

    commit: of the repository that the solution is in, with " (dirty)" if that has changes; empty if it is in none, and
        in older records.
    """

    language: str
    author: str = ""
    description: str = ""
    sha256: str
    files: dict[str, str]
    commit: str = ""


class Side(_Data, frozen=True, kw_only=True):
    """The results of one implementation of a comparison.

    counts: by shape; empty unless the kernels ran on the emulator. limits: by shape.
    solution: None for a rung of the task.
    sandbox: the protections against the code of a solution or of a task's own family; empty for greenfast's kernels.
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
    """The result of one gate: a status, a summary line, and rows of (check, target, actual, status).

    status: FAIL if a row fails. A file has no content of PERFORMANCE if it follows from timings.
    unchecked: the skipped checks with their reasons, although the gate holds; for PERFORMANCE, the reason why the
        baseline is not fair. They prevent MERGE. Empty in older records.
    """

    gate: str
    status: Status = "PENDING"
    summary: str = ""
    reasons: list[str] = []
    checks: list[tuple[str, str, str, Status]] = []
    unchecked: list[str] = []


def largest_named_shape(counts: Mapping[str, KernelCounts]) -> str:
    """Return the task's shape with the most executed instructions; a random shape only if no other was counted."""
    named = {shape: c.warp_instructions for shape, c in counts.items() if not shape.startswith(DRAWN)}
    sizes = named or {shape: c.warp_instructions for shape, c in counts.items()}
    return max(sizes, key=lambda shape: sizes[shape])


def read_status(gates: Sequence[GateResult], gate: str) -> Status:
    """Return the status of a gate by name; PENDING if it did not run."""
    return next((result.status for result in gates if result.gate == gate), "PENDING")


class Run(_Data, frozen=True, kw_only=True):
    """The fields that all records share: the request, the environment and the results of the gates.

    least_work: the problem's minimum counts by shape and by name in KernelCounts, for shapes with counted
        instructions.
    order_seed: seed of the random order of timing blocks and launches; None if nothing was timed and in older records.
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
        """Return the role (or the variant's name) and the results of each implementation."""
        return []

    def gate_status(self, gate: str) -> Status:
        """Return the status of a gate by name; PENDING if it did not run."""
        return read_status(self.gates, gate)

    def _require_correct(self, timed: bool) -> None:
        if timed and self.gate_status("CORRECTNESS") != "PASS":
            raise ValueError("a record cannot hold timings unless its CORRECTNESS gate passed")


class SideRun(Run, frozen=True, kw_only=True):
    """The fields of a record of one implementation."""

    side: Side

    def sides(self) -> list[tuple[str, Side]]:
        """Return the variant's name and its results."""
        return [(self.side.variant, self.side)]


class PhaseRecord(SideRun, frozen=True, kw_only=True, tag_field="kind", tag="phases"):
    """The phases of an implementation's instrumented build.

    phase_cycles: mean SM cycles per block, by shape and phase.
    phase_counts: executed instructions by shape and phase, from the emulator; it has no cycles.
    """

    phase_cycles: dict[str, dict[str, float]]
    phase_counts: dict[str, dict[str, KernelCounts]] = {}


class BenchRecord(SideRun, frozen=True, kw_only=True, tag_field="kind", tag="bench"):
    """The record of one implementation, checked and timed. Raises ValueError as Record does."""

    def __post_init__(self) -> None:
        self._require_correct(bool(self.side.timing))


class PlanCoverage(_Data, frozen=True, kw_only=True):
    """The part of the full check plan that a run covered (``judge.check_plan``).

    seed: the first seed of the inputs and the source of random shapes; None if nothing was drawn.
    drawn: the dimensions of the random shapes by name.
    missing: the skipped parts of the full plan, in words.
    complete: True if nothing is missing, or if the record with the cached timings covered the missing parts.
    """

    seed: int | None
    drawn: dict[str, dict[str, int]] = {}
    complete: bool
    missing: list[str] = []


class Record(Run, frozen=True, kw_only=True, tag_field="kind", tag="comparison"):
    """The record of a comparison of a candidate with a baseline.

    baseline_again: timings of the baseline against itself (A/A), for the noise floor.
    claim: None if nothing was timed, and in older records. speedups, decision, reasons: conclusions, in no file.
    quoted: the cached timings of PERFORMANCE, if this run could not time. Such a record has no timings of its own.
    Raises ValueError for timings of an incorrect kernel, and for a record with both its own and cached timings.
    """

    baseline: Side
    candidate: Side
    parity: list[ParityRow] = []
    speedups: list[SpeedupRow] = []
    baseline_again: list[TimingRow] = []
    claim: Claim | None = None
    decision: Decision = "PENDING"
    reasons: list[str] = []
    exam: PlanCoverage | None = None
    quoted: CachedTiming | None = None

    def __post_init__(self) -> None:
        timed = bool(self.speedups or self.baseline.timing or self.candidate.timing or self.baseline_again)
        self._require_correct(timed or self.quoted is not None)
        if timed and self.quoted is not None:
            raise ValueError("a record holds its own timings or quotes another's, never both")

    def sides(self) -> list[tuple[str, Side]]:
        """Return each role with its results."""
        return [("baseline", self.baseline), ("candidate", self.candidate)]


#: The types of a record.json. Its field ``kind`` selects one.
AnyRecord: TypeAlias = "Record | BenchRecord | PhaseRecord"
