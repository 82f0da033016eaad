"""The corpus: cheats and accidents that the gates must catch, by kind, and honest kernels that they must pass.

- memory, state, time, races, values, launch: kernels as solutions (``kernels``), judged on the problems next to them;
  and the rungs of the doubling task. Their budgets allow state, so that other gates must find its effect
  (``doubling/family.py``).
- host: solutions that bring code (host.py).
- records: edited records (records.py).
- honest: right kernels in many styles (``kernels/honest.py``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from greenfast.judge.solution.schema import find_solution
from tests.cheats.host import HOST, host
from tests.cheats.judging import Finding, rung, solution, task_of
from tests.cheats.kernels import HONEST, KERNELS
from tests.cheats.kernels.kernel import Kernel
from tests.cheats.records import RECORDS, record

#: Rungs of the doubling task by kind; those that are not here are honest, and among them what costs more time only.
_RUNGS = {
    "memory": "unwritten tail_unwritten input_overwritten writes_in_front writes_behind reads_behind skips_written "
    "wild_pointer stale_shared input_restored guards_in_between",
    "state": "remembers later_wrong later_idle cached_by_shape memoizes works_on_launches every_second_launch "
    "first_address previous_output cached_by_address",
    "races": "order_dependent hang",
    "values": "zeros nan infinity one_shape one_seed trap",
    "launch": "too_much_smem too_many_registers spills local_array no_async_copy",
}
#: Cheats that only a GPU shows: they cheat at a size that takes the emulator too long.
GPU_ONLY = {"far_memory", "input_restored_where_large"}


@dataclass(frozen=True)
class Entry:
    """A member of the corpus.

    gate, says: of a cheat, what must catch it without a GPU, and a pattern of the message; empty for those whose
    words another test checks. gpu_only: whether it takes a GPU to catch it.
    """

    kind: str
    name: str
    about: str
    gate: str = ""
    says: str = ""
    gpu_only: bool = False

    @property
    def honest(self) -> bool:
        """Whether it must pass."""
        return self.kind == HONEST

    @property
    def kernel(self) -> Kernel | None:
        """The kernel with a header; None for rungs of the doubling task, and what host.py and records.py make."""
        return KERNELS.get(self.kind, {}).get(self.name)

    def judge(self, gpu: bool = False) -> Finding:
        """Take it through the gates, on the emulator or on a GPU."""
        if self.kind == "records":
            return record(RECORDS[self.name])
        if self.kind == "host":
            return host(HOST[self.name], gpu)
        if self.kernel is None:
            return rung(self.name, gpu)
        return solution(self.kernel.path, find_solution(self.kernel.path).config.problem, gpu)

    def caught_as_expected(self, found: Finding) -> bool:
        """Whether it was caught by the gate, and with the words, that are expected without a GPU."""
        right = not self.gate or re.fullmatch(self.gate, found.gate)
        return found.outcome == "rejected" and bool(right) and bool(re.search(self.says, found.message))


@cache
def entries() -> tuple[Entry, ...]:
    """All of the corpus, by kind."""
    found = []
    for kind, kernels in KERNELS.items():
        for name, kernel in kernels.items():
            about = find_solution(kernel.path).config.description
            found.append(Entry(kind, name, about, kernel.gate, kernel.says, name in GPU_ONLY))
    titles = {rung.name: rung.title for rung in task_of("doubling").config.rungs}
    for kind, names in _RUNGS.items():
        found += [Entry(kind, name, titles.pop(name)) for name in names.split()]
    found += [Entry("host", name, cheat.about, cheat.gate, cheat.says) for name, cheat in HOST.items()]
    found += [Entry("records", name, edit.about, "UsageError", edit.says) for name, edit in RECORDS.items()]
    found += [Entry(HONEST, name, title) for name, title in titles.items()]
    kinds = [*(kind for kind in KERNELS if kind != HONEST), "host", "records", HONEST]
    return tuple(sorted(found, key=lambda entry: (kinds.index(entry.kind), entry.name)))
