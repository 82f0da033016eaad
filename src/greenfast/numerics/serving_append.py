"""Append to a paged FP8 cache on CPU tensors: QK-norm, RoPE, quantization and the layout of codes.

``kernels/serving/append.cuh`` computes the same in the same order, so that codes, scales and Q agree bit by bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from greenfast.kernels.attention.config import KEY_GROUP, KEY_ORDER
from greenfast.numerics.formats import CODE_MAX, LEAST_SCALE

#: Byte index of each token within a group of V.
KEY_PLACE = tuple(KEY_ORDER.index(token) for token in range(KEY_GROUP))

_NAN_CODE = 0x7F


def append(
    q: Tensor | None, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor,
    v_scale: Tensor, q_weight: Tensor | None = None, k_weight: Tensor | None = None, cos: Tensor | None = None,
    sin: Tensor | None = None, positions: Tensor | None = None, eps: float = 1e-6, interleaved: bool = False,
) -> Tensor | None:  # fmt: skip
    """Normalize and rotate Q and K, quantize K and V, and write them to the pages of a cache in place.

    Everything is float32 up to one rounding: to the code of K and V, to the dtype of Q.

    q: (tokens, heads, head_dim), k, v: (tokens, kv_heads, head_dim), bfloat16 or float16, any strides. k_cache:
    float8_e4m3fn (pages, page_size, kv_heads, head_dim), any strides. v_cache: the same, or in groups (pages, kv_heads,
    page_size // 16, head_dim, 16), where byte j of a group is of its token KEY_ORDER[j]. slot_mapping: (tokens,), page
    * page_size + index in the page. A token with a slot outside the cache, such as -1, is not written. Two tokens must
    not have the same slot. k_scale, v_scale: float32. Of (pages, kv_heads, page_size): the scales of each token and
    head, amax / 448, are written there; a row that is not finite gets scale NaN and codes 0. Of () or (kv_heads,):
    inputs; codes saturate, and NaN has the code NaN. q_weight, k_weight: (head_dim,) of the RMS norms, or None for
    none. eps: added to the mean of the squares. cos, sin: (max_position, rotary_dim // 2) of the rotation of columns
    below rotary_dim, a multiple of 16, or None for none; positions: (tokens,), their rows. A position outside the table
    makes NaN. interleaved: whether columns 2i and 2i + 1 are rotated together, else i and i + rotary_dim // 2.

    Returns Q, contiguous and of q's dtype; None if q is None.
    """
    rotary_dim = 0 if cos is None else 2 * cos.shape[1]
    angles = None
    if cos is not None and sin is not None and positions is not None:
        angles = _rows(cos, positions), _rows(sin, positions)

    def transform(x: Tensor, weight: Tensor | None) -> Tensor:
        wide = x.float()
        if weight is not None:
            wide = _normalize(wide, weight.float(), eps, _lane_order(x.shape[2], 0 if interleaved else rotary_dim))
        return wide if angles is None else rotate(wide, *angles, interleaved)

    kept = (slot_mapping >= 0) & (slot_mapping < k_cache.shape[0] * k_cache.shape[1])
    pages, places = (f(slot_mapping[kept], k_cache.shape[1]) for f in (torch.floor_divide, torch.remainder))
    k_codes = _quantize(transform(k, k_weight)[kept], k_scale, pages, places)
    v_codes = _quantize(v.float()[kept], v_scale, pages, places)
    k_cache.view(torch.uint8)[pages, places] = k_codes
    if v_cache.dim() == 5:
        byte = torch.tensor(KEY_PLACE)[places % KEY_GROUP]
        v_cache.view(torch.uint8)[pages, :, places // KEY_GROUP, :, byte] = v_codes
    else:
        v_cache.view(torch.uint8)[pages, places] = v_codes
    return None if q is None else transform(q, q_weight).to(q.dtype).contiguous()


def _quantize(x: Tensor, scale: Tensor, pages: Tensor, places: Tensor) -> Tensor:
    """Codes (uint8, shape of x) of (tokens, kv_heads, head_dim); scales of tokens are written to ``scale``."""
    if scale.dim() == 3:
        amax = x.abs().amax(dim=2)
        of_rows = (amax / CODE_MAX["e4m3"]).clamp(min=LEAST_SCALE).masked_fill(amax == 0, 1.0)
        of_rows = of_rows.masked_fill(~amax.isfinite(), torch.nan)
        scale[pages, :, places] = of_rows
        known = of_rows.isfinite().unsqueeze(2)
        return torch.where(known, _encode(x * (1 / of_rows).unsqueeze(2)), 0)
    return _encode(x * (1 / scale.reshape(-1, 1)))


def _encode(x: Tensor) -> Tensor:
    """Return the nearest E4M3 codes (uint8), saturating."""
    limit = CODE_MAX["e4m3"]
    codes = x.clamp(-limit, limit).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill(x.isnan(), _NAN_CODE)


def _rows(table: Tensor, positions: Tensor) -> Tensor:
    """Return rows of a table in float32, (tokens, 1, columns); NaN for positions outside the table."""
    known = (positions >= 0) & (positions < table.shape[0])
    rows = table.float()[positions.long().masked_fill(~known, 0)]
    return rows.masked_fill(~known.unsqueeze(1), torch.nan).unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs of the first columns of x by angles, each product and sum rounded separately.

    cos, sin: (..., angles), broadcast to rows of x. interleaved: columns 2 i and 2 i + 1 are a pair, else i and i +
    angles. Further columns of x stay as they are.
    """
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    first, second = a * cos - b * sin, b * cos + a * sin
    together = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    return torch.cat((together, rest), -1)


def _normalize(x: Tensor, weight: Tensor, eps: float, order: Tensor) -> Tensor:
    squares = (x * x)[..., order]
    while squares.shape[-1] > 1:  # neighbours first, as a kernel's threads add their own before each other's
        squares = squares[..., 0::2] + squares[..., 1::2]
    mean = squares / x.shape[-1] + torch.tensor(eps, dtype=torch.float32)
    root = mean.double().sqrt().float()  # rounded to nearest, as float32's sqrt need not be on a CPU
    return x * (1 / root) * weight


def _lane_order(head_dim: int, halves: int) -> Tensor:
    """Columns as the kernel's threads own them: 16 neighbours, or 8 of each half of the ``halves`` rotated columns."""
    columns = torch.arange(head_dim)
    first, second = columns[: halves // 2].view(-1, 8), columns[halves // 2 : halves].view(-1, 8)
    return torch.cat((torch.stack((first, second), 1).flatten(), columns[halves:]))
