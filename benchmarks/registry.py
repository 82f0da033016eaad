"""The registry of backends: the libraries and kernels that benchmarks compare, by suite."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal, TypeVar

from benchmarks.records import BackendFacts
from benchmarks.timing import capture, time_graphs

Precision = Literal["fp8", "int8", "bf16", "none"]
#: (Module to import, distribution with the recorded version).
Library = tuple[str, str]
GREENFAST: Library = ("greenfast", "greenfast")
TORCH: Library = ("torch", "torch")
#: The backend for a task's own kernel, built by the task's family.
KERNEL = "greenfast"


@dataclass(frozen=True)
class BoundCall:
    """A backend bound to inputs.

    call: queues one call on torch's current stream and returns its output; for attention a tensor (batch, heads,
    length, head_dim). unit: scale of the output. copies: number of calls after which the same memory is read again.
    """

    call: Callable[[], Any]
    unit: float = 1.0
    copies: int = 1


@dataclass(frozen=True)
class Backend:
    """A library or kernel to compare.

    prepare: binds it to inputs, with the library's own exceptions; None for a
    task's own kernel. same_codes: whether it reads greenfast's codes of the inputs. attention: whether its output is
    attention and is checked.
    """

    name: str
    label: str
    precision: Precision
    library: Library
    prepare: Callable[[Any], BoundCall] | None
    same_codes: bool = False
    attention: bool = True

    @property
    def own(self) -> bool:
        """Whether it belongs to greenfast."""
        return self.library[1] == GREENFAST[1]

    def bind(self, inputs: Any) -> BoundCall:
        """Bind it to inputs. Not for a task's own kernel."""
        assert self.prepare is not None, f"{self.name} is built for a shape"
        return self.prepare(inputs)

    def describe(self) -> BackendFacts:
        """Return its facts for a record: the version, or the reason why it is missing."""
        version, missing, (name, package) = "", "", self.library
        try:
            version = _version(package, importlib.import_module(name))
        except ModuleNotFoundError as e:
            missing = f"{package} is not installed (no module {e.name}): pip install {package}"
        except Exception as e:  # any import error, such as a missing CUDA library
            missing = f"{name} cannot be imported: {first_line(e)}"
        return BackendFacts(
            name=self.name, label=self.label, precision=self.precision, version=version, missing=missing
        )


def first_line(error: BaseException) -> str:
    """Return the first line of an exception, short enough for a table."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:240]


def _version(package: str, module: Any) -> str:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = str(getattr(module, "__version__", "unknown"))
    return f"{package} {version}"


class Suite(dict[str, Backend]):
    """The backends of a benchmark by name, in the order of their registration."""

    def register(
        self, name: str, label: str, precision: Precision, library: Library, /, *, same_codes: bool = False,
        attention: bool = True, **options: Any,
    ) -> Callable[[_Prepare], _Prepare]:  # fmt: skip
        """Register the decorated function under a name. It binds a backend to inputs; options: its other arguments."""

        def add(prepare: _Prepare) -> _Prepare:
            bound = partial(prepare, **options) if options else prepare
            self[name] = Backend(name, label, precision, library, bound, same_codes, attention)
            return prepare

        return add


def time_backends(
    backends: Mapping[str, Backend], inputs: Any, names: Sequence[str], measure_error: Callable[[Any], float],
    most_error: float,
) -> dict[str, Any]:  # fmt: skip
    """Return the median microseconds of each backend, the errors, and the reasons why others have no time.

    They are timed interleaved, as graphs. measure_error: of an output; one of ``most_error`` or more is wrong, and such
    a backend is not timed.
    """
    captured, errors, reasons = {}, {}, {}
    for name in names:
        backend = backends[name]
        try:
            call = backend.bind(inputs).call
            out = call()
            if backend.attention:
                errors[name] = round(measure_error(out), 4)
                if not errors[name] < most_error:
                    reasons[name] = f"its output is wrong: an error of {errors[name]}"
                    continue
            captured[name] = capture(call)
        except Exception as e:  # whatever a library raises
            reasons[name] = first_line(e)
    us = {name: round(median(each), 2) for name, each in time_graphs(captured).items()}
    return {"us": us, "error": errors, "missing": reasons}


_Prepare = TypeVar("_Prepare", bound=Callable[..., BoundCall])
