"""Which calls of PyTorch's attention the FP8 kernels take: the rules, and the counts of calls."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from greenfast.operator import cuda
from greenfast.operator.arguments import (
    causal_of,
    check_cast,
    check_flag,
    check_length,
    dropout_of,
    number,
    usable_scale,
)
from greenfast.operator.quantized import PRECISIONS, check_choice, padded_head_dim
from greenfast.operator.rules import Form, Refusal, dtype_of, form_of
from greenfast.operator.sdpa import Alignment, Precision

TORCH = "torch"  # the kernel of an Explanation where PyTorch's own attention computes the call
NOTHING = "none"  # where there is nothing to compute
#: Below this many keys or queries quantization costs more than the FP8 products save, as measured with a causal mask,
#: the worse case (docs/operator.md).
MIN_LENGTH = 4096

_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)  # other subclasses define attention themselves


@dataclass(frozen=True)
class Explanation:
    """Which kernel computes a call of attention, and why.

    kernel: "hopper" or "ada"; "reference" for CPU tensors, "meta" for meta tensors, "none" where there is nothing to
    compute; "torch" where no kernel can, so that PyTorch's own attention has to.
    """

    kernel: str
    reason: str

    @property
    def taken(self) -> bool:
        """Whether ``greenfast.sdpa`` computes the call."""
        return self.kernel != TORCH

    def __str__(self) -> str:
        return f"{self.kernel}: {self.reason}"


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    precision: Precision = "fp8",
    causal_alignment: Alignment = "upper_left",
    float32_as: torch.dtype | None = None,
    min_length: int = 0,
) -> Explanation:
    """What ``greenfast.sdpa`` would run with these arguments, or why it refuses them. Launches nothing.

    ``greenfast.use`` and ``greenfast.register_with_transformers`` follow the same rules. They leave calls to PyTorch
        - with ``dropout_p``, a ``scale`` that is not positive and finite, or an ``attn_mask`` that ``sdpa`` refuses;
      - where ``torch.nn.attention.sdpa_kernel`` or ``torch.backends.cuda`` allow none of PyTorch's fused backends;
      - on tensors that are nested, sparse or of a subclass;
      - of dtypes other than float16 and bfloat16, after autocast and ``float32_as``;
      - with a head dim of Q and K that is not a multiple of 8 up to 256, or a head dim of V above 256;
      - with shapes that cannot be broadcast or share heads unevenly, for which PyTorch raises its error;
      - on devices that have no kernel;
      - where query or key is shorter than ``min_length``. A call quantizes all of Q, K and V. What FP8 saves grows
        with queries x keys, what quantization costs with queries + keys, so both must be long: one query over a long
        cache, as in decoding, would quantize all of K and V again for every token.

    Raises TypeError for flags, numbers and lengths of the wrong type, and ValueError for an unknown ``precision`` or
    ``causal_alignment`` and for a probability outside 0 to 1.
    """
    check_choice("precision", precision, PRECISIONS)
    causal = causal_of(is_causal, causal_alignment)
    check_flag("enable_gqa", enable_gqa)
    check_length("min_length", min_length)
    check_cast(float32_as)
    dropout = dropout_of(dropout_p)
    if scale is not None and not usable_scale(number("scale", scale)):
        return Explanation(TORCH, "scale: the kernels take positive, finite ones")
    if not _fused_allowed():
        return Explanation(TORCH, "sdpa_kernel: PyTorch's fused backends are disabled, so only its math remains")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if isinstance(x, Tensor) and type(x) not in _PLAIN:
            return Explanation(TORCH, f"{name}: a {type(x).__name__}; the kernels take plain tensors")
    form = form_of(query, key, value, attn_mask, dropout, causal, enable_gqa, float32_as)
    if isinstance(form, Refusal):
        return Explanation(TORCH, form.reason)
    for name, shape in (("query", form.query), ("key", form.key)):
        if shape[2] < min_length:
            return Explanation(TORCH, f"{name}: shorter than min_length={min_length}, where quantization does not pay")
    if form.empty:
        return Explanation(NOTHING, "no rows, or no keys that they attend to: zeros, without a kernel")
    return _kernel(query, form, dtype_of(query, float32_as), precision)


def _fused_allowed() -> bool:
    """Whether any of PyTorch's fused backends may run: a user who allows only ``SDPBackend.MATH`` wants none."""
    backends: Any = torch.backends.cuda
    return bool(backends.flash_sdp_enabled() or backends.mem_efficient_sdp_enabled() or backends.cudnn_sdp_enabled())


# A constant of the graph, like the backends in PyTorch's own graphs; see _traced_kernel.
_fused_allowed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _kernel(query: Tensor, form: Form, dtype: torch.dtype, precision: str) -> Explanation:
    device = query.device
    if device.type == "cpu":
        return Explanation("reference", "the kernels' arithmetic in PyTorch, for CPU tensors; slow")
    if device.type == "meta":
        return Explanation("meta", "a shape and a dtype: meta tensors hold no numbers")
    if device.type != "cuda":
        return Explanation(TORCH, f"query: on {device.type}, for which there are no kernels")
    if torch.compiler.is_compiling():  # lengths and head_dim may be symbols there; the padded head dim is not
        head_dim = padded_head_dim(form.query[3])
        name, reason = _traced_kernel(query.get_device(), head_dim, dtype, precision, form.causal)
        return Explanation(name, reason)
    return _cuda_kernel(query.get_device(), tuple(form.query), tuple(form.key), dtype, precision, form.causal)


@lru_cache(maxsize=4096)
def _cuda_kernel(
    device: int, query: cuda.Shape, key: cuda.Shape, dtype: torch.dtype, precision: str, causal: int
) -> Explanation:
    try:
        target = cuda.target_of(device)
        config = cuda.sdpa_config(target, query[3], dtype, precision, causal)
        choice = cuda.kernel_for(target, config, cuda.sizes_of(query, key))
    except NotImplementedError as e:
        return Explanation(TORCH, str(e))
    return Explanation(choice.rung, choice.reason)


def _traced_kernel(device: int, head_dim: int, dtype: torch.dtype, precision: str, causal: int) -> tuple[str, str]:
    """The kernel's name and the reason as constants, which torch.compile evaluates while it traces."""
    shape = (1, 1, MIN_LENGTH, head_dim)
    found = _cuda_kernel(device, shape, shape, dtype, precision, causal)
    return found.kernel, found.reason


# What torch.compiler.assume_constant_result does, but that loads all of torch._dynamo first, which takes two seconds.
_traced_kernel._dynamo_marked_constant = True  # type: ignore[attr-defined]


_COUNTING = threading.Lock()  # one for all counts: they are copied together with models, and a lock cannot be


class Routed:
    """Counts of calls: how many greenfast has ``taken``, and the others by reason, ``fallen_back``."""

    def __init__(self) -> None:
        self.taken = 0
        self._left: dict[str, int] = {}  # not a Counter, which torch.compile cannot trace

    @property
    def fallen_back(self) -> Counter[str]:
        """How many calls PyTorch has computed, by reason."""
        return Counter(self._left)

    def count(self, explanation: Explanation) -> None:
        """Count a call. Calls in a graph of torch.compile are not counted."""
        if torch.compiler.is_compiling():
            return
        with _COUNTING:  # threads may share a model
            if explanation.taken:
                self.taken += 1
            else:
                self._left[explanation.reason] = self._left.get(explanation.reason, 0) + 1

    def __repr__(self) -> str:
        return f"Routed(taken={self.taken}, fallen_back={self._left})"
