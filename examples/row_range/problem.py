"""The smallest and the largest number of each row of a float32 matrix: a problem with two outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.spec.problem import Case, OutputSpec, References


def make_case(dims: Mapping[str, int], seed: int, fmt: str) -> Case:
    """Input x (R, C); outputs low (R,) and high (R,)."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((dims["R"], dims["C"]), dtype=np.float32)
    output = OutputSpec((dims["R"],), "float32")
    return Case({"x": x}, {"low": output, "high": output})


def references(dims: Mapping[str, int], seed: int, fmt: str) -> References:
    """Both outputs, one after the other, (2 R,). A minimum and a maximum round nothing: no error is allowed."""
    x = make_case(dims, seed, fmt).inputs["x"].astype(np.float64)
    exact = np.concatenate([x.min(axis=1), x.max(axis=1)])
    return References(full=exact, exact=exact, bound=np.zeros_like(exact), sizes=(dims["R"], dims["R"]))


def decode(outputs: Mapping[str, NDArray[Any]], fmt: str) -> NDArray[np.float64]:
    """Both outputs in the order of the references."""
    return np.concatenate([outputs["low"], outputs["high"]]).astype(np.float64)


def least_work(dims: Mapping[str, int]) -> dict[str, int]:
    """Return the minimum work of any kernel: x is read once, both outputs are written once."""
    return {"global_load_bytes": 4 * dims["R"] * dims["C"], "global_store_bytes": 8 * dims["R"]}
