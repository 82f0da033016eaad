"""The fused multiply-add, rounded once to the nearest number or in a direction."""

from __future__ import annotations

import numpy as np

from greenfast.emulator.machine import Values


def fused(a: Values, b: Values, c: Values, towards: float | None = None) -> Values:
    """a * b + c with one rounding, in the type of the operands.

    towards: -inf, inf or 0 for the rounding modes rm, rp and rz, of float32 only; None for the nearest.
    """
    dtype = np.result_type(a, b, c)
    if dtype == np.float64:
        wide = np.asarray(a, np.longdouble) * b + c  # 64 bits of significand: nearly always the fused result
        return np.asarray(wide, np.float64)
    # The product of two float32 is exact in float64. That its sum is rounded there first changes the result only where
    # the sum lands halfway between two float32, or where those lie closer together (below the normal numbers).
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    addend = np.asarray(c, np.float64)
    total = np.asarray(product + addend)
    doubtful = (total.view(np.int64) & 0x1FFF_FFFF == 0x1000_0000) | ((np.abs(total) < 2.0**-126) & (total != 0))
    if towards is not None:  # a sum that is a float32 only because it was rounded must not pass for exact
        doubtful = np.ones_like(doubtful)
    if doubtful.any():
        product, addend = np.broadcast_arrays(product, addend)
        total[doubtful] = _rounded_to_odd(product[doubtful], addend[doubtful], total[doubtful])
    nearest = total.astype(dtype)
    if towards is None:
        return nearest
    passed = np.abs(nearest) > np.abs(total) if towards == 0 else (nearest > total) == (towards < 0)
    inward = np.nextafter(nearest, np.asarray(towards, dtype))
    return np.where(passed & (nearest != total) & np.isfinite(total), inward, nearest)


def _rounded_to_odd(product: Values, addend: Values, total: Values) -> Values:
    """The float64 sum whose last bit says whether something was cut off, which leaves the second rounding right.

    Boldo and Melquiond, 2008. total: the sum rounded to nearest.
    """
    part = total - product
    error = (product - (total - part)) + (addend - part)
    inexact = (error != 0) & np.isfinite(total)
    bits = total.view(np.int64)
    away = np.where((error > 0) == (total > 0), 1, -1)
    return np.asarray(np.where(inexact & ((bits & 1) == 0), bits + away, bits)).view(np.float64)
