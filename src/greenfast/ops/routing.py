"""Routing: which kernel computes a call of PyTorch's attention, and counts of calls."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from greenfast.kernels import HEAD_DIMS
from greenfast.kernels.attention.backward import MOST_HEAD_BYTES, BackwardMask, describe_excess, stored_bytes
from greenfast.ops import routing_rules, torch_ops
from greenfast.ops.arguments import (
    MASKED_ON_HOPPER,
    NO_OPTIONS,
    PACKED_ON_HOPPER,
    SERVING_ON_HOPPER,
    is_valid_scale,
    parse_length,
    parse_options,
)
from greenfast.ops.block import RowArguments
from greenfast.ops.block_mask import BlockMask
from greenfast.ops.canonicalize import CanonicalCall, Refusal, SdpaCall, Shape, get_cast_dtype, parse_call
from greenfast.ops.context_stack import ACTIVE, in_context_parallel
from greenfast.ops.masked import TOKEN_MASKS, check_options, describe_mask
from greenfast.ops.parts import list_tensors
from greenfast.ops.quantized import (
    BACKWARDS,
    DTYPES,
    PRECISIONS,
    PRECISIONS_AND_AUTO,
    TOKEN,
    Alignment,
    AutoPrecision,
    Backward,
    check_choice,
    pad_head_dim_size,
)
from greenfast.ops.symbols import is_certain, is_known
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError

TORCH = "torch"  # PyTorch's own attention computes the call
NONE = "none"  # there is nothing to compute
#: Queries and keys from which on "auto" keeps the forward pass for the backward pass, as it was measured to be faster.
LONG_BACKWARD = 4096
#: Keys of the narrowest window for which that was measured.
WIDE_WINDOW = 1024
#: The backward passes that keep the forward pass, as "auto" tries them: the faster one first (docs/training.md).
KEPT_BACKWARDS = ("8bit", "16bit_kept")
_KEPT_REASONS = {
    "8bit": "int8 and E4M3 products; the output and the log-sum-exp of the forward pass are kept",
    "16bit_kept": "PyTorch's backward pass; the output and the log-sum-exp of the forward pass are kept",
}
_TENSOR_TYPES = (Tensor, torch.nn.Parameter, FakeTensor)  # other subclasses define attention themselves


@dataclass(frozen=True)
class Explanation:
    """Which kernel computes a call of attention, and why.

    kernel: "hopper", "ada" or "serving"; "reference" for CPU tensors, "meta" for meta tensors, "none" if there is
    nothing to compute; "ring" or "ulysses" inside a ``context_parallel``, where ``use`` counts calls of
    "context_parallel"; "torch" if PyTorch's own attention computes it, because no kernel can or none is faster.
    precision: the precision of the computation; empty for "torch".
    backward: the backward pass of such a call with gradients: "16bit", "16bit_kept" or "8bit", "torch" for PyTorch's
    own attention. Empty for calls that only have a forward pass. backward_reason: why, empty for the default.
    """

    kernel: str
    reason: str
    precision: str = ""
    backward: str = ""
    backward_reason: str = ""

    @property
    def taken(self) -> bool:
        """Whether a kernel of greenfast, not PyTorch, computes the call."""
        return self.kernel != TORCH

    def __str__(self) -> str:
        backward = f"; backward {self.backward}: {self.backward_reason}" if self.backward_reason else ""
        return f"{self.kernel}: {self.reason}{backward}"


#: The explanation that ``use`` counts inside a ``context_parallel``.
CONTEXT_PARALLEL = Explanation("context_parallel", "attention to the rows of all ranks")


def explain(
    query: Tensor | Sequence[Tensor],
    key: Tensor | Sequence[Tensor],
    value: Tensor | Sequence[Tensor],
    attn_mask: Tensor | BlockMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    precision: AutoPrecision = "fp8",
    causal_alignment: Alignment = "upper_left",
    float32_as: torch.dtype | None = None,
    window: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    skip_threshold: float = 0.0,
    q_norm: Any = None,
    rope: Any = None,
    norm: str = "rms",
    min_length: int | None = 0,
    target: str | None = None,
    backward: Backward = "16bit",
) -> Explanation:
    """Return the kernel that ``greenfast.sdpa`` would run, or the reason of its refusal. Launches nothing.

    ``greenfast.use`` and ``greenfast.register_with_transformers`` follow the same rules. They pass calls to PyTorch

      - with ``dropout_p``, a ``scale`` that is not positive and finite, or an ``attn_mask`` that ``sdpa`` refuses;
      - if ``torch.nn.attention.sdpa_kernel`` or ``torch.backends.cuda`` allow none of PyTorch's fused backends;
      - on tensors that are sparse, of a subclass, or nested, except jagged ones (B, H, j, D): their mean length counts;
      - of dtypes other than float16 and bfloat16, after autocast and ``float32_as``;
      - with a head dim of Q and K that is not a multiple of 8 up to 256, or a head dim of V above 256;
      - with shapes that do not broadcast or share heads unevenly, for which PyTorch raises its error;
      - on devices that have no kernel; with a mask that is not causal, those other than Hopper GPUs;
      - if query or key is shorter than ``min_length``, or if only the run of a graph can decide that;
      - with a ``min_length`` of None or ``precision="auto"``, unless the rules of ``greenfast.ops.routing_rules`` show
        that FP8 is faster; the reason quotes their measurement. A call quantizes all of Q, K and V. The gain of FP8
        grows with queries x keys, the cost of quantization with queries + keys, so both must be long: one query over a
        long cache, as in decoding, would quantize all of K and V again for every token. "auto" takes the faster
        precision.

    The reason states the cost of a mask. PyTorch's attention has no ``window``, ``softcap``, ``sinks``, ``kv_lengths``
    and ``skip_threshold``: calls with them that no kernel can compute are refused.

    q_norm, rope, norm: of a call of ``attention_block``. The reason then names the code for norm and RoPE: the pass
    that quantizes, or PyTorch before it. query, key and value may then be lists of the parts of a sequence, and the
    reason also names whether they are read in place.

    target: explain a call on a GPU of this target, such as "sm_90a" for H100 and H200, on any device of the tensors.
    The default is the tensors' own device.

    backward: as for ``sdpa``. The result names the backward pass of such a call with gradients, whether or not these
    tensors require them, and why "auto" chose it. A call that cannot have the named backward pass is refused,
    with the unsupported part as the reason.

    Raises TypeError for flags, numbers and lengths of the wrong type, and ValueError for an unknown ``precision``,
    ``causal_alignment``, ``backward`` or ``target`` and for a probability outside 0 to 1.
    """
    check_choice("backward", backward, BACKWARDS)
    gpu = None if target is None else _parse_target(target)
    if min_length is not None:
        min_length = parse_length("min_length", min_length)
    options = parse_options(window, softcap, sinks, kv_lengths, skip_threshold, causal_alignment)
    row = None
    if _are_parts(query, key, value):
        row = RowArguments(query, key, value, q_norm, q_norm, norm, None, None, 0.0, rope, None, False)
        query, key, value = _expand_parts(row)
    call = parse_call(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, precision, causal_alignment, False,
        float32_as, options, operators_check=False,
    )  # fmt: skip
    forward = explain_call(call, min_length, gpu)
    if not forward.taken:
        return replace(forward, backward=TORCH)
    if row is not None:
        forward = _add_reason(forward, _explain_parts(row, call, forward))
    else:
        forward = _add_reason(forward, _explain_transform(call, forward, q_norm is not None, rope is not None))
    if backward == "16bit":
        return replace(forward, backward=backward)
    chosen = ""
    if row is not None or q_norm is not None or rope is not None:
        obstacle = "the backward pass of attention_block recomputes the forward pass"
    elif in_context_parallel():
        obstacle = "not inside a context_parallel"
    else:
        chosen, obstacle = choose_backward(backward, call, gpu)
    if obstacle:
        if backward != "auto":
            return Explanation(TORCH, f'backward="{backward}": {obstacle}', "", TORCH)
        return replace(forward, backward="16bit", backward_reason=obstacle)
    why = _KEPT_REASONS[chosen]
    if target is None and not call.query.is_cuda:
        why = "the output and the log-sum-exp of the forward pass are kept; exact gradients without a GPU"
    return replace(forward, backward=chosen, backward_reason=why)


def _add_reason(explanation: Explanation, reason: str) -> Explanation:
    """Return the explanation of a call that a kernel computes with a further reason, unless that is empty."""
    if not explanation.taken or not reason:
        return explanation
    return replace(explanation, reason=f"{explanation.reason}; {reason}")


def choose_backward(backward: Backward, call: SdpaCall, gpu: Target | None = None) -> tuple[str, str]:
    """Return "8bit" or "16bit_kept", and the reason why a call of ``sdpa`` cannot have it, or an empty string.

    backward: the choice itself, or "auto": then the reason is that of "8bit" if the call can have neither. gpu: the
    target, by default the query's device.
    """
    left, right = call.options.window
    window = left + max(right, 0) + 1 if left >= 0 and (right >= 0 or call.causal > 0) else None
    obstacles = {}
    for chosen in KEPT_BACKWARDS if backward == "auto" else (str(backward),):
        in_8_bits = chosen == "8bit"
        obstacle = _find_kept_obstacle(call, in_8_bits, gpu)
        if not obstacle and in_8_bits:
            obstacle = _find_large_ds(call.query, call.key, window)
        if not obstacle and backward == "auto":
            shifted = call.causal == 2 and not is_certain(call.query.shape[2] == call.key.shape[2])
            narrow = window is not None and window < WIDE_WINDOW
            masked = call.attn_mask is not None or narrow or (shifted and in_8_bits)
            obstacle = _find_unmeasured(call.query, call.key, masked)
        if not obstacle:
            return chosen, ""
        obstacles[chosen] = obstacle
    return next(iter(obstacles.items()))


def _find_kept_obstacle(call: SdpaCall, in_8_bits: bool, gpu: Target | None) -> str:
    """Return why a call cannot keep its forward pass for the backward pass, or an empty string."""
    query, options = call.query, call.options
    recomputed = options.softcap or options.sinks is not None or options.skip_threshold
    if recomputed or call.dropout_p or call.return_lse or (call.attn_mask is not None and not _has_padding(call)):
        return (
            "with softcap, sinks, skip_threshold, dropout, return_lse, and an attn_mask other than booleans "
            "(B, 1, 1, KV), the backward pass recomputes the forward pass"
        )
    if (call.attn_mask is not None or options is not NO_OPTIONS) and not in_8_bits:
        return 'with window, kv_lengths and attn_mask the backward pass recomputes the forward pass; "8bit" has them'
    if call.jagged:
        return 'with jagged tensors the backward pass recomputes the forward pass; "8bit" takes padding with kv_lengths'
    if call.precision not in PRECISIONS:
        allowed = ", ".join(map(repr, PRECISIONS))
        return f"with precision {call.precision!r} the backward pass recomputes the forward pass; allowed are {allowed}"
    dtypes = (torch.bfloat16,) if in_8_bits else DTYPES
    if (
        not call.canonical
        or len({torch_ops.get_autocast_dtype(x) for x in (query, call.key, call.value)} | {*dtypes}) > len(dtypes)
        or (in_8_bits and query.shape[3] not in HEAD_DIMS)
    ):
        *others, last = HEAD_DIMS
        dims = f" with D {', '.join(map(str, others))} or {last}" if in_8_bits else ""
        names = "bfloat16" if in_8_bits else "float16 or bfloat16"
        return f"query, key and value must be {names} tensors (B, H, length, D){dims}, on one device"
    if (gpu is not None and gpu.name != routing_rules.TARGET) or (
        gpu is None and query.is_cuda and not is_hopper(query.get_device())
    ):
        return "the GPU has no such kernels; they need an H100 or H200"
    return ""


def _has_padding(call: SdpaCall) -> bool:
    """Return whether the mask of a call leaves out keys for all queries: booleans (B or 1, 1, 1, KV)."""
    mask, query, key = call.attn_mask, call.query, call.key
    return (
        call.canonical
        and isinstance(mask, Tensor)
        and not call.causal
        and mask.dtype == torch.bool
        and mask.device == query.device
        and mask.dim() == 4
        and is_known(mask.shape[1] == 1)
        and is_known(mask.shape[2] == 1)
        and is_known(mask.shape[3] == key.shape[2])
        and (is_known(mask.shape[0] == 1) or is_known(mask.shape[0] == query.shape[0]))
    )


def _find_large_ds(query: Tensor, key: Tensor, window: int | None) -> str:
    """Return that a call needs more than MOST_HEAD_BYTES, or an empty string. window: the most keys of a query."""
    (_, heads, q_len, _), (kv_heads, kv_len) = query.shape, key.shape[1:3]
    mask = BackwardMask(shifts=None if window is None else (0, window - 1))
    of_head = stored_bytes(heads // kv_heads, q_len, kv_len, mask)
    return describe_excess(of_head) if is_certain(of_head > MOST_HEAD_BYTES) else ""


def _find_unmeasured(query: Tensor, key: Tensor, masked: bool) -> str:
    """Return why "auto" recomputes the forward pass of such a call, or an empty string.

    masked: with another mask than a causal one from the first key, a wide window, and lengths.
    """
    if query.shape[3] not in HEAD_DIMS:
        return f"with D {query.shape[3]} a kept forward pass was not measured to be faster"
    if masked:
        return (
            f"with masks other than causal ones from the first key, windows of {WIDE_WINDOW} keys and more, and "
            "kv_lengths, a kept forward pass was not measured to be faster"
        )
    if is_certain(query.shape[2] >= LONG_BACKWARD) and is_certain(key.shape[2] >= LONG_BACKWARD):
        return ""
    return f"query or key may be shorter than {LONG_BACKWARD}, where a kept forward pass was not measured to be faster"


def is_in_torch(call: SdpaCall) -> bool:
    """Return whether PyTorch's attention supports the call, apart from its log-sum-exp.

    Of jagged tensors with lengths of their own it has no causal mask from the last key.
    """
    of_torch = call.options is NO_OPTIONS and not isinstance(call.attn_mask, BlockMask)
    return of_torch and not (call.jagged and call.causal == 2)


def explain_call(call: SdpaCall, min_length: int | None = 0, gpu: Target | None = None) -> Explanation:
    """Compute ``explain`` of a call with a form, without norm, RoPE and the backward pass.

    gpu: the target, by default the query's device.
    """
    query, form, precision = call.query, call.form, call.precision
    if call.scale is not None and not is_valid_scale(call.scale):
        return Explanation(TORCH, "scale: the kernels take positive, finite ones")
    if in_context_parallel():
        alignment = "lower_right" if call.causal == 2 else "upper_left"
        parallel: Explanation = ACTIVE[-1].explain(
            query, call.key, call.value, call.attn_mask, call.dropout_p, call.causal > 0, call.enable_gqa,
            precision=precision, causal_alignment=alignment, float32_as=call.float32_as,
        )  # fmt: skip
        return parallel
    if not _is_fused_allowed():
        return Explanation(TORCH, "sdpa_kernel: PyTorch's fused backends are disabled, so only its math remains")
    for name, x in (("query", query), ("key", call.key), ("value", call.value)):
        if isinstance(x, Tensor) and type(x) not in _TENSOR_TYPES and not call.jagged:
            return Explanation(TORCH, f"{name}: a {type(x).__name__}; the kernels take plain tensors")
    if isinstance(form, Refusal):
        return Explanation(TORCH, form.reason)
    if form is None:
        raise AssertionError
    for name, shape in (("query", form.query), ("key", form.key)):
        if min_length is not None and not is_certain(shape[2] >= min_length):
            return Explanation(TORCH, f"{name}: shorter than min_length={min_length}, where quantization does not pay")
    fixed = "fp8" if precision == "auto" else precision
    cost = describe_mask(form.mask, call.options)
    if cost and (precision == TOKEN or not _has_masks(query, gpu)):
        return Explanation(TORCH, TOKEN_MASKS if precision == TOKEN else MASKED_ON_HOPPER)
    if not call.jagged and (call.options is not NO_OPTIONS or isinstance(form.mask, BlockMask)):
        device = None if gpu is None else query.device  # a target is for tensors on any device
        try:
            check_options(form.mask, call.options, query.new_empty(1).expand(form.query), form.key[2], device)
        except ValueError as refused:
            return Explanation(TORCH, str(refused))
    if form.empty:
        return Explanation(NONE, "no rows, or no keys that they attend to: zeros, without a kernel", fixed)
    dtype = get_cast_dtype(query, call.float32_as)
    chosen, quote = fixed, ""
    if is_in_torch(call) and (precision == "auto" or min_length is None):
        chosen, quote = _choose_faster(query, form, precision, gpu)
        if not chosen:
            return Explanation(TORCH, quote)
    kernel = _explain_kernel(query, form, dtype, chosen, gpu, call.jagged)
    return _add_reason(_add_reason(kernel, quote), cost)


def _parse_target(text: str) -> Target:
    """Parse the name of a target. Raises TypeError and ValueError with the allowed names."""
    if not isinstance(text, str):
        raise TypeError(
            f"target: {text!r}; a name such as {routing_rules.TARGET!r} is needed, not a {type(text).__name__}"
        )
    try:
        return Target.parse(text)
    except UsageError as e:
        raise ValueError(f"target: {e}") from None


def _are_parts(*inputs: Any) -> bool:
    """Return whether query, key and value are lists of equally many tensors (B, H, S, D)."""
    return all(
        isinstance(parts, list | tuple)
        and 0 < len(parts) == len(inputs[0])
        and all(isinstance(x, Tensor) and x.dim() == 4 for x in parts)
        for parts in inputs
    )


def _expand_parts(row: RowArguments) -> list[Tensor]:
    """Return tensors with the shapes of the joined query, key and value, without their memory."""
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (*row.query, *row.key, *row.value))
    return [
        parts[0]
        .new_empty(1, 1, 1, 1)
        .requires_grad_(needs_grad)
        .expand(*parts[0].shape[:2], sum(x.shape[2] for x in parts), parts[0].shape[3])
        for parts in (row.query, row.key, row.value)
    ]


def _explain_transform(call: SdpaCall, forward: Explanation, has_norm: bool, has_rope: bool) -> str:
    """Return the code for norm and RoPE of a call of ``attention_block``; an empty string without them."""
    mask, options = call.attn_mask, call.options
    names = " and ".join(name for name, x in (("norm", has_norm), ("RoPE", has_rope)) if x)
    padding = options.kv_lengths is not None or (isinstance(mask, Tensor) and mask.shape[-2] == 1)
    masked_grad = call.query.requires_grad and (mask is not None or options.window != (-1, -1))
    fused = forward.kernel == "hopper" and not padding and not masked_grad
    by = "in the pass that quantizes Q, K and V" if fused else "by PyTorch, before quantization"
    return f"{names} {by}" if names else ""


def _explain_parts(row: RowArguments, call: SdpaCall, forward: Explanation) -> str:
    """Return whether the parts of a sequence are read in place, and the code for their norms and RoPE.

    call, forward: of the joined tensors.
    """
    mask, listed = call.attn_mask, list_tensors(row)
    in_place = (
        forward.kernel == "hopper"
        and listed is not None
        and not any(isinstance(x, Tensor) and x.dim() != 1 for x in listed[3:5])
        and call.options.kv_lengths is None
        and not (isinstance(mask, Tensor) and mask.shape[-2] == 1)
        and not call.query.requires_grad
    )
    separate = isinstance(row.q_norm, list | tuple)
    has_norm = any(x is not None for x in (row.q_norm if separate else [row.q_norm]))
    has_rope = row.rope is not None
    if in_place:
        names = " and ".join(name for name, x in (("norm", has_norm), ("RoPE", has_rope)) if x)
        more = f"{names} in the pass that quantizes Q, K and V; it" if names else "one pass that quantizes Q, K and V"
        return f"{more} reads both parts in place"
    own = has_norm and separate
    joined = _explain_transform(call, forward, row.q_norm is not None and not own, has_rope)
    by = "norms of the parts by PyTorch, then joined by a copy" if own else "parts joined by a copy"
    return f"{joined}; {by}" if joined else by


def _choose_faster(query: Tensor, form: CanonicalCall, precision: str, gpu: Target | None) -> tuple[str, str]:
    """Return the precision in which greenfast is faster than PyTorch, empty for none, and the measurement."""
    batch, heads, queries, width = form.query
    keys, longer = form.key[2], is_certain(form.key[2] > queries)
    if not is_certain(form.key[1] > 0) or (form.causal and not longer and not is_certain(keys <= queries)):
        return "", "lengths or heads are known only at run time, so no measurement applies"
    reuse = queries * heads // form.key[1]
    if form.causal == 1 and longer:  # no query attends to the last keys
        keys, reuse = queries, reuse * queries // keys
    elif form.causal == 2 and is_certain(queries > keys):  # lower right: the first queries attend to nothing
        queries, reuse = keys, reuse * keys // queries
    head_dim = next((d for d in HEAD_DIMS if width == d), 0)
    measured = head_dim and form.mask is None and _have_rules(query, gpu)
    rules = _get_rules(head_dim, form.causal > 0, precision) if measured else None
    if rules is None:
        least = routing_rules.UNMEASURED_LENGTH
        quote = f"such calls have not been measured; they are taken from {least} queries and keys on"
        taken = is_certain(queries >= least) and is_certain(keys >= least)
        return ("fp8" if precision == "auto" else precision) if taken else "", quote
    flop = 4 * batch * heads * queries * keys * width // (2 if form.causal else 1)
    for name, least_reuse, least_keys, least_flop, quote in rules:
        if is_certain(reuse >= least_reuse) and is_certain(keys >= least_keys) and is_certain(flop >= least_flop):
            # Return a string of this package: torch.compile (2.13) cannot trace the type of a graph constant's item.
            return PRECISIONS_AND_AUTO[PRECISIONS_AND_AUTO.index(name)], f"{name} {quote}"
    tried = "; ".join(f"{name} {quote}" for name, _, _, _, quote in rules) or "no measured shapes show it"
    return "", f"not known to be faster than PyTorch here: {tried}"


def _get_rules(head_dim: int, causal: bool, precision: str) -> tuple[routing_rules.Rule, ...] | None:
    return routing_rules.find_rules(
        head_dim, causal, precision, routing_rules.FA3 if _is_flash_replaced() else routing_rules.TORCH
    )


def _is_flash_replaced() -> bool:
    """Return whether the user has activated a later FlashAttention in PyTorch's attention."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)  # PyTorch 2.11 and later
    return current is not None and current() is not None


def _have_rules(query: Tensor, gpu: Target | None) -> bool:
    """Return whether the rules were measured on the target ``gpu``, or on a device like the one of the query."""
    if gpu is not None:
        return gpu.name == routing_rules.TARGET and bool(routing_rules.load_data()["rules"])
    return query.is_cuda and _is_measured_device(query.get_device())


def _has_masks(query: Tensor, gpu: Target | None) -> bool:
    """Return whether the kernels of the target, or of the query's device, have masks that are not causal."""
    if gpu is not None:
        return gpu.name == routing_rules.TARGET
    return not query.is_cuda or is_hopper(query.get_device())


def is_hopper(device: int) -> bool:
    """Return whether a GPU by its number is one that the Hopper kernels run on."""
    try:
        return bool(torch_ops.load_cuda().get_target(device).name == routing_rules.TARGET)
    except NotImplementedError:  # too old for any kernel; the refusal comes later
        return False


def _is_measured_device(device: int) -> bool:
    return is_hopper(device) and bool(routing_rules.load_data()["rules"])


# Constants of a graph, as _traced_kernel's; torch.compile would trace into a cached function.
_get_rules._dynamo_marked_constant = True  # type: ignore[attr-defined]
_is_measured_device._dynamo_marked_constant = True  # type: ignore[attr-defined]
is_hopper._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_fused_allowed() -> bool:
    """Return whether any of PyTorch's fused backends may run. The user may have allowed ``SDPBackend.MATH`` only."""
    backends: Any = torch.backends.cuda
    return bool(backends.flash_sdp_enabled() or backends.mem_efficient_sdp_enabled() or backends.cudnn_sdp_enabled())


# A constant of the graph, like the backends in PyTorch's own graphs; see _traced_kernel.
_is_fused_allowed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def explain_device(name: str, device: torch.device, precision: str = "") -> Explanation | None:
    """Explain a call on any device but a GPU; None for a GPU. name: the argument on the device."""
    if device.type == "cpu":
        return Explanation("reference", "the kernels' arithmetic in PyTorch, for CPU tensors; slow", precision)
    if device.type == "meta":
        return Explanation("meta", "a shape and a dtype: meta tensors hold no numbers", precision)
    if device.type != "cuda":
        return Explanation(TORCH, f"{name}: on {device.type}, for which there are no kernels")
    return None


def _explain_kernel(
    query: Tensor, form: CanonicalCall, dtype: torch.dtype, precision: str, gpu: Target | None, packed: bool
) -> Explanation:
    if gpu is not None:
        return _explain_cuda(gpu, tuple(form.query), tuple(form.key), dtype, precision, form.causal, packed)
    if (elsewhere := explain_device("query", query.device, precision)) is not None:
        return elsewhere
    if torch.compiler.is_compiling():  # lengths and head_dim may be symbols; the padded head dim is not
        head_dim = pad_head_dim_size(form.query[3])
        name, reason = _explain_traced(query.get_device(), head_dim, dtype, precision, form.causal, packed)
        return Explanation(name, reason, precision if name != TORCH else "")
    return _explain_cuda(query.get_device(), tuple(form.query), tuple(form.key), dtype, precision, form.causal, packed)


@lru_cache(maxsize=4096)
def _explain_cuda(
    device: int | Target, query: Shape, key: Shape, dtype: torch.dtype, precision: str, causal: int, packed: bool
) -> Explanation:
    """Explain a call on a GPU by its number, or on any GPU of a target. packed: of sequences of several lengths."""
    try:
        cuda = torch_ops.load_cuda()
        target = device if isinstance(device, Target) else cuda.get_target(device)
        if precision == TOKEN:
            cuda.require_hopper(target, SERVING_ON_HOPPER)
            return Explanation(
                "serving", "a scale for each token, by the serving kernels on temporary pages", precision
            )
        if packed:
            cuda.require_hopper(target, PACKED_ON_HOPPER)
        config = cuda.build_sdpa_config(target, query[3], dtype, precision, causal)
        choice = cuda.choose_kernel(target, config, cuda.get_sizes(query, key))
    except NotImplementedError as e:
        return Explanation(TORCH, str(e))
    return Explanation(choice.rung, choice.reason, precision)


def _explain_traced(
    device: int, head_dim: int, dtype: torch.dtype, precision: str, causal: int, packed: bool = False
) -> tuple[str, str]:
    """Return the kernel's name and the reason. torch.compile evaluates them as constants while it traces."""
    shape = (1, 1, routing_rules.UNMEASURED_LENGTH, head_dim)
    explanation = _explain_cuda(device, shape, shape, dtype, precision, causal, packed)
    return explanation.kernel, explanation.reason


# Like torch.compiler.assume_constant_result, without the two seconds for loading torch._dynamo.
_explain_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


_COUNTING = threading.Lock()  # one lock for all counts: models with counts are copied, and a lock cannot be copied


class Routed:
    """Counts of calls: how many greenfast has ``taken``, and the others by reason, ``fallen_back``."""

    def __init__(self) -> None:
        self.taken = 0
        self._left: dict[str, int] = {}  # torch.compile cannot trace a Counter

    @property
    def fallen_back(self) -> Counter[str]:
        """The number of calls that PyTorch computed, by reason."""
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
