"""The public functions: attention on tensors and on quantized inputs, and quantization."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function_variadic

from greenfast.ops import reference, torch_ops
from greenfast.ops.arguments import (
    NO_OPTIONS,
    ScoreOptions,
    check_flag,
    has_key_mean,
    parse_causal,
    parse_options,
    parse_scale,
)
from greenfast.ops.block import (
    BLOCK,
    BLOCKS,
    QUANTIZE_BLOCK,
    Norm,
    RowArguments,
    is_empty,
    join_parts,
    parse_transform,
    transform,
    transform_both,
)
from greenfast.ops.block_mask import BlockMask
from greenfast.ops.call_cache import CachedLaunch, CallCache, replay, store_plan
from greenfast.ops.canonicalize import (
    BIAS,
    CanonicalCall,
    Refusal,
    SdpaCall,
    from_kernel_layout,
    get_cast_dtype,
    parse_call,
    to_kernel_layout,
)
from greenfast.ops.context_stack import ACTIVE
from greenfast.ops.masked import (
    MASKED_KEPT,
    TOKEN_MASKS,
    MaskSpec,
    check_options,
    clear_padding,
    compute_masked,
    compute_masked_codes,
    make_spec,
)
from greenfast.ops.parts import (
    BLOCK_PARTS,
    PARTS,
    QUANTIZE_PARTS,
    TwoParts,
    list_tensors,
    parse_parts,
)
from greenfast.ops.quantized import (
    BACKWARDS,
    PRECISIONS,
    TOKEN,
    VALUE_SCALES,
    Alignment,
    AutoPrecision,
    Backward,
    Precision,
    QuantizedQKV,
    check_choice,
    check_tensors,
)
from greenfast.ops.routing import choose_backward, explain_call, is_in_torch
from greenfast.ops.symbols import is_certain, is_known
from greenfast.ops.token_scales import SDPA_TOKEN, SDPA_TOKEN_LSE
from greenfast.ops.varlen import attend_jagged

RowNorm = Tensor | bool | None
Tables = tuple[Tensor, Tensor]
Biases = Tensor | Sequence[Tensor | None] | None

#: For subclasses of Tensor, modes, and the tracing of torch.fx.
_call_torch_function: Any = handle_torch_function
#: Plans of calls that skipped the dispatcher.
SDPA_CACHE, BLOCK_CACHE, PARTS_CACHE = CallCache(5), CallCache(9), CallCache(14)
_NO_MEAN_SCORES = (
    "return_lse: these codes lack the contribution of the keys' mean to the scores; quantize with log_sum_exp=True, or "
    "with subtract_key_mean=False"
)
_ALTERNATIVE = "; torch.nn.functional.scaled_dot_product_attention has it"


@overload
def sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | BlockMask | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., *, precision: AutoPrecision = ...,
    causal_alignment: Alignment = ..., return_lse: Literal[False] = ..., float32_as: torch.dtype | None = ...,
    window: Sequence[int] = ..., softcap: float = ..., sinks: Tensor | None = ..., kv_lengths: Tensor | None = ...,
    skip_threshold: float = ..., backward: Backward = ...,
) -> Tensor: ...  # fmt: skip
@overload
def sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | BlockMask | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., *, precision: AutoPrecision = ...,
    causal_alignment: Alignment = ..., return_lse: Literal[True], float32_as: torch.dtype | None = ...,
    window: Sequence[int] = ..., softcap: float = ..., sinks: Tensor | None = ..., kv_lengths: Tensor | None = ...,
    skip_threshold: float = ..., backward: Backward = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | BlockMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    precision: AutoPrecision = "fp8",
    causal_alignment: Alignment = "upper_left",
    return_lse: bool = False,
    float32_as: torch.dtype | None = None,
    window: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    skip_threshold: float = 0.0,
    backward: Backward = "16bit",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute FP8 attention, with the signature of ``torch.nn.functional.scaled_dot_product_attention``.

    query: (B, H, S, D); key and value: (B, HK, KV, D). HK is H, or with ``enable_gqa`` a divisor of H. The dtype is
    float16 or bfloat16, strides are arbitrary, D is a multiple of 8 up to 256. Shapes (..., S, D) with any number of
    leading dimensions are accepted: the last one is the heads, and all are broadcast. The head dim of value may
    differ, up to 256. Three nested tensors (B, H, j, D) with ``layout=torch.jagged`` are accepted. No length is read on
    the host; ``is_causal`` then needs one tensor of offsets for query and key, or the alignment "lower_right".
    attn_mask: booleans that broadcast to (B, H, S, KV), True for keys that a query attends to; a
    ``greenfast.BlockMask``; a ``torch.nn.attention.bias.CausalBias``; or zeros on the CPU that need no gradient. The
    kernels' form of booleans is kept while the tensor lives and is not written to.
    is_causal: query i attends to keys 0 .. i; with ``causal_alignment="lower_right"`` to keys 0 .. i + KV - S. scale:
    positive, 1 / sqrt(D) by default. float32_as: float16 or bfloat16. float32 tensors are cast to this dtype, and the
    output is float32 again. Without it they are refused.
    window: (left, right), the keys before and after a query's own place, -1 for all; its place is key i, or key i + KV
    - S with "lower_right". softcap: scores s become softcap * tanh(s / softcap). sinks: (H,), the logit of one more key
    of each row, without a value. kv_lengths: int32 or int64 (B,) on the same device, the keys of each sequence; those
    after them are padding. Keys of the padding, and keys that a mask (B, 1, 1, KV) leaves out, change no result,
    whatever they hold.
    skip_threshold: 0 (skips nothing) to below 1. A tile of 128 keys is left out for 64 rows, counted from row 0, if all
    of its weights are below it in each of them; a row's largest score in earlier tiles has the weight 1 (BLASST, Yuan
    et al., 2025). Only its Q K^T is computed. Results and the log-sum-exp are without these tiles.
    precision: "fp8" computes both products in E4M3. "int8" computes Q K^T in int8 and P V in E4M3. "int8_fine" is
    "int8" with a scale for each row of Q and each 32 of 128 keys; the others have one for 16 rows and one for 128 keys.
    Before quantization Q and K are rotated by a Hadamard matrix, and the mean of K is subtracted; neither changes the
    result. "fp8_token" computes both products in E4M3 with a scale for each token and head, without mean and rotation.
    It is slower, but a row depends only on its query and the keys that it attends to. With the other precisions a row
    under a causal mask changes a little with later tokens, because they share its scales and the mean. "auto" is the
    faster of "fp8" and "int8", or PyTorch's own attention if that is faster or no kernel can compute the call (see
    ``explain``). With ``return_lse`` "auto" is "fp8", because PyTorch returns no log-sum-exp.

    Returns (B, H, S, D) of the inputs' dtype, in the memory order of query, as in PyTorch. With ``return_lse`` also the
    natural log-sum-exp of each row's scores, float32 (B, H, S). A row that attends to no key is 0, and its log-sum-exp
    -inf. NaN or infinity in a query makes its block of 16 rows NaN (with "int8_fine" its row). In a key or value it
    makes all rows NaN that attend to any key of its block of 128. The gradients are of attention on the unquantized
    tensors, and no tile is skipped in them; the backward pass recomputes it in 16 bits. There is no forward mode and no
    second derivative, and a gradient that reaches the log-sum-exp raises NotImplementedError. sinks have gradients.
    With softcap the backward pass is in float32, slower on a GPU.
    backward: "16bit" as above. "16bit_kept" keeps the output and the log-sum-exp of the forward pass instead of
    recomputing them. "8bit" also computes the five products of the backward pass in int8 and E4M3. Both are for
    training on a Hopper GPU, (B, H, S, D), with causal masks. "8bit" takes bfloat16, D 64, 128 or 256, and also
    ``window``, ``kv_lengths`` and booleans (B, 1, 1, KV). docs/training.md has speed and errors. On a CPU their
    gradients are exact. "auto" is the fastest for calls with 4,096 queries and keys or more: "16bit_kept" at D 64,
    "8bit" at D 128 and 256, with windows of 1,024 keys and more, and with ``kv_lengths``. For others it is "16bit".

    Raises TypeError for wrong dtypes, flags and numbers, ValueError for shapes, devices and choices that do not fit,
    and NotImplementedError for masks that are added to scores, ``dropout_p``, other nested and sparse tensors, and head
    dims and GPUs without a kernel. Each error names the argument and the allowed values.
    """
    if ACTIVE:
        if parse_options(window, softcap, sinks, kv_lengths, skip_threshold, causal_alignment) is not NO_OPTIONS:
            raise NotImplementedError(
                "window, softcap, sinks, kv_lengths, skip_threshold: not inside a context_parallel"
            )
        if backward in ("8bit", "16bit_kept"):
            raise NotImplementedError(f'backward="{backward}": not inside a context_parallel')
        return ACTIVE[-1].sdpa(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, precision, causal_alignment,
            return_lse, float32_as,
        )  # fmt: skip
    if has_torch_function_variadic(query, key, value):
        return _call_torch_function(  # type: ignore[no-any-return]
            sdpa, (query, key, value), query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
            precision=precision, causal_alignment=causal_alignment, return_lse=return_lse, float32_as=float32_as,
            window=window, softcap=softcap, sinks=sinks, kv_lengths=kv_lengths, skip_threshold=skip_threshold,
            backward=backward,
        )  # fmt: skip
    recomputes = type(backward) is str and backward == "16bit"
    options = parse_options(window, softcap, sinks, kv_lengths, skip_threshold, causal_alignment)
    request: tuple[Any, ...] | None = None
    repeats = attn_mask is None and float32_as is None and return_lse is False and recomputes
    if repeats and type(dropout_p) is float and dropout_p == 0.0 and not torch.compiler.is_compiling():
        request = (query, key, value, precision, is_causal, causal_alignment, scale, enable_gqa)
        if options is not NO_OPTIONS:
            limits = (*options.window, options.softcap, options.skip_threshold)
            request = (query, key, value, options.kv_lengths, options.sinks, *request[3:], *limits)
        replayed = replay(SDPA_CACHE, request, query)
        if replayed is not None:
            return replayed[0]  # type: ignore[no-any-return]
    query, key, value = _cast_for_autocast(query, key, value)
    call = parse_call(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, precision, causal_alignment, return_lse,
        float32_as, options, operators_check=True,
    )  # fmt: skip
    if not recomputes:
        check_choice("backward", backward, BACKWARDS)
        chosen, obstacle = choose_backward(backward, call)
        if obstacle and backward != "auto":
            raise NotImplementedError(f'backward="{backward}": {obstacle}{_format_shapes(query, key, value)}')
        if not obstacle and torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            return _attend_kept(call, chosen)
    if precision == "auto":
        if return_lse or not is_in_torch(call):
            call = call._replace(precision="fp8")
        else:
            explanation = explain_call(call)
            if not explanation.taken:
                return _attend_by_torch(call)
            request = None  # the choice depends on more than the arguments
            call = call._replace(precision="int8" if explanation.precision == "int8" else "fp8")
    return _attend(call, request)  # type: ignore[no-any-return]


def _cast_for_autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast the tensors as autocast does, if it is enabled for query's device."""
    if not (isinstance(query, Tensor) and torch.is_autocast_enabled("cuda" if query.is_cuda else "cpu")):
        return query, key, value
    q, k, v = (x.to(torch_ops.get_autocast_dtype(x)) if isinstance(x, Tensor) else x for x in (query, key, value))
    return q, k, v


def _attend_kept(call: SdpaCall, backward: str) -> Tensor:
    """Compute ``sdpa`` and keep its results for the backward pass, "8bit" or "16bit_kept"."""
    query, key, value, form = call.query, call.key, call.value, call.form
    if isinstance(form, Refusal):
        raise _build_error(call, form)
    factor, mask = parse_scale(call.scale, query.shape[3]), None if form is None else form.mask
    spec = make_spec(mask, call.causal, call.options, query.shape[2], key.shape[2], query.shape[0])
    if spec is None:
        bits = 8 if backward == "8bit" else 16
        out, *_ = torch_ops.SDPA_KEPT(query, key, value, call.precision, call.causal, factor, bits)
    else:
        limits = (spec.alignment, spec.left, spec.right)
        out, *_ = MASKED_KEPT(query, key, value, call.precision, spec.kv_lengths, spec.kv_rows, *limits, factor)
    return out  # type: ignore[no-any-return]


def _attend(call: SdpaCall, request: tuple[Any, ...] | None) -> Any:
    """Compute ``sdpa`` by the operators, or raise the refusal of the call.

    request: the key of its launches in SDPA_CACHE; None if the call is not looked up there.
    """
    query, key, value, form = call.query, call.key, call.value, call.form
    if isinstance(form, Refusal):
        raise _build_error(call, form, _ALTERNATIVE if form.error is NotImplementedError else "")
    factor = parse_scale(call.scale, query.shape[-1])
    if form is None:
        return _attend_dense((query, key, value, call.precision, call.causal, factor), call.return_lse, request)
    spec, options = None, call.options
    if not call.jagged:
        spec = make_spec(form.mask, form.causal, options, form.query[2], form.key[2], form.query[0])
    if call.precision == TOKEN and spec is not None:
        raise NotImplementedError(TOKEN_MASKS)
    widened = query.dtype == torch.float32
    if call.float32_as is not None:
        query, key, value = (x.to(get_cast_dtype(x, call.float32_as)) for x in (query, key, value))
    lse: Tensor | None
    if call.jagged:
        left, right = options.window
        window, sinks = (left, 0 if form.causal else right), options.sinks
        sinks = None if sinks is None else sinks.float()
        out, lse = attend_jagged(
            query, key, value, sinks, window, options.softcap, factor, call.precision, call.return_lse
        )
    elif form.empty:
        if spec is not None:
            check_options(form.mask, options, query.new_empty(1).expand(form.query), form.key[2])
        out, lse = _build_empty_result(form, query, key, value)
        if options.sinks is not None:
            lse = lse.maximum(options.sinks.float().unsqueeze(-1))
    else:
        tensors = to_kernel_layout(form, query, key, value)
        if form.causal and form.mask is not None and is_known(form.mask.shape[1] * form.mask.shape[2] == 1):
            tensors = (tensors[0], *clear_padding(form.mask, *tensors[1:]))
        if spec is not None:
            where = (SDPA_CACHE, request) if call.canonical and request is not None else None
            result = compute_masked(*tensors, spec, options, call.precision, factor, call.return_lse, where)
        elif call.precision == TOKEN:
            result = (SDPA_TOKEN_LSE if call.return_lse else SDPA_TOKEN)(*tensors, form.causal, factor)
        else:
            result = _attend_dense((*tensors, call.precision, form.causal, factor), call.return_lse)
        out, lse = result if call.return_lse else (result, None)
        out = from_kernel_layout(form, out)
        lse = None if lse is None else lse.reshape(form.out[:-1])
    out = out.float() if widened else out
    return (out, lse) if call.return_lse else out


def _attend_dense(args: tuple[Any, ...], return_lse: bool, request: tuple[Any, ...] | None = None) -> Any:
    """Compute ``sdpa`` of tensors in the kernels' layout, without masks other than causal ones.

    args: of the operator. request: the key of the launches in SDPA_CACHE if the call was looked up; by default args.
    """
    if return_lse:
        return torch_ops.SDPA_LSE(*args)
    if request is None:
        if torch.compiler.is_compiling():
            return torch_ops.SDPA(*args)
        request = args
        replayed = replay(SDPA_CACHE, request, args[0])
        if replayed is not None:
            return replayed[0]
    if not torch_ops.can_skip_dispatcher(*args[:3]):
        return torch_ops.SDPA(*args)
    out = torch_ops.load_cuda().sdpa(*args)
    store_plan(SDPA_CACHE, request, torch_ops.load_cuda().get_sdpa_plan(*args), args[0])
    return out


def _attend_by_torch(call: SdpaCall) -> Tensor:
    """Compute ``sdpa`` by PyTorch's own attention, as ``explain`` has chosen it for "auto"."""
    query, key, value, form = call.query, call.key, call.value, call.form
    attn_mask, dropout_p, causal, float32_as = call.attn_mask, call.dropout_p, call.causal, call.float32_as
    options: dict[str, Any] = {"scale": call.scale, "enable_gqa": call.enable_gqa}
    if call.jagged:
        with torch._C._EnableTorchFunction():  # nested tensors define PyTorch's attention by it
            jagged: Tensor = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, causal > 0, **options
            )
        return jagged
    if isinstance(form, CanonicalCall):
        if form.mask is None:  # the mask masks nothing, or is a CausalBias
            attn_mask, causal = None, form.causal
    elif form is not None and (
        not all([_can_run_torch(x, causal) for x in (query, key, value)])
        or (isinstance(attn_mask, Tensor) and attn_mask.dim() < 2)
    ):
        raise _build_error(call, form)
    if causal and attn_mask is not None:  # PyTorch takes one of them
        if not isinstance(attn_mask, Tensor) or attn_mask.dtype != torch.bool:
            raise ValueError("attn_mask: only booleans can be combined with is_causal")
        attn_mask, causal = attn_mask & _build_causal_mask(query, key, causal), 0
    widened = float32_as is not None and query.dtype == torch.float32
    q, k, v = (x.to(float32_as) if widened and x.dtype == torch.float32 else x for x in (query, key, value))
    blind = q.shape[-2] - k.shape[-2] if causal == 2 else 0  # rows without keys, NaN in PyTorch
    if not (is_certain(blind > 0) or is_certain(blind <= 0)):
        mask, without_keys = _build_dynamic_lower_right_mask(q, k)
        # PyTorch's fused attention would compare the sizes of the mask.
        out, _ = torch.ops.aten._scaled_dot_product_attention_math(q, k, v, mask, dropout_p, **options)
        masked: Tensor = out.masked_fill(without_keys, 0.0)
        return masked.float() if widened else masked
    if is_certain(blind > 0):
        q, causal = q[..., blind:, :], 1
    if causal == 2:
        attn_mask = _build_lower_right_mask(q, k)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, causal == 1, **options)
    out = torch.nn.functional.pad(out, (0, 0, blind, 0)) if is_certain(blind > 0) else out
    return out.float() if widened else out


def _can_run_torch(x: Any, causal: int) -> bool:
    """Return whether PyTorch's attention may compute a refused call with this tensor."""
    return isinstance(x, Tensor) and x.dim() >= 2 and (causal != 2 or not x.is_nested)


def _build_dynamic_lower_right_mask(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Build the mask aligned at the last key, and the mask of rows without keys, if only the run knows the longer side.

    The first is added to the scores: 0 or -inf. Rows without keys attend to all keys, so that neither they nor their
    gradients are NaN.
    """
    rows, keys = query.shape[-2], key.shape[-2]
    last = torch.arange(rows, device=query.device).unsqueeze(1) + (keys - rows)
    without_keys = last < 0
    attended = (torch.arange(keys, device=query.device) <= last) | without_keys
    scores = torch.zeros_like(attended, dtype=query.dtype).masked_fill(attended.logical_not(), -math.inf)
    return scores, without_keys


def _build_causal_mask(query: Tensor, key: Tensor, causal: int) -> Tensor:
    rows, keys = query.shape[-2], key.shape[-2]
    mask = torch.ones(rows, keys, dtype=torch.bool, device=query.device)
    return mask.tril(keys - rows if causal == 2 else 0)


def _build_lower_right_mask(query: Tensor, key: Tensor) -> Any:
    """Build the causal mask aligned at the last key: a bias that PyTorch has kernels for, or booleans.

    torch.compile cannot trace the import, and a dispatch mode cannot make the bias.
    """
    rows, keys = query.shape[-2], key.shape[-2]
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return _build_causal_mask(query, key, 2)
    return importlib.import_module(BIAS).causal_lower_right(rows, keys)


def _build_empty_result(form: CanonicalCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the results without rows or without keys: zeros with zero gradients, and a log-sum-exp of -inf."""
    out = query.new_zeros(form.out)
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        out = out + sum(x[..., :0].sum() for x in (query, key, value))
    return out, out.new_full(form.out[:-1], -math.inf, dtype=torch.float32)


def _build_error(call: SdpaCall, refusal: Refusal, instead: str = "") -> Exception:
    """Build the error for a refused call. instead: another function that computes it."""
    return refusal.error(f"{refusal.reason}{instead}{_format_shapes(call.query, call.key, call.value)}")


def _format_shapes(*tensors: object) -> str:
    """Format the shapes of a call for an error message; empty unless all three inputs have shapes."""
    if not all(isinstance(x, Tensor) and not x.is_nested for x in tensors):
        return ""
    named = zip(("query", "key", "value"), tensors, strict=True)
    return f" ({', '.join(f'{name} {tuple(x.shape)}' for name, x in named)})"  # type: ignore[attr-defined]


def quantize(
    query: Tensor | Sequence[Tensor],
    key: Tensor | Sequence[Tensor],
    value: Tensor | Sequence[Tensor],
    *,
    precision: Precision = "fp8",
    scales: Literal["block", "head"] = "block",
    value_scales: Literal["block", "head", "channel"] | None = None,
    subtract_key_mean: bool = True,
    rotate: bool = True,
    log_sum_exp: bool = False,
    q_norm: RowNorm | Sequence[RowNorm] = None,
    k_norm: RowNorm | Sequence[RowNorm] = None,
    norm: Norm = "rms",
    q_norm_bias: Biases = None,
    k_norm_bias: Biases = None,
    norm_eps: float = 1e-6,
    rope: Tables | Sequence[Tables | None] | None = None,
    rope_dim: int | None = None,
    rope_interleaved: bool = False,
) -> QuantizedQKV:
    """Quantize the inputs of attention, for callers that use the codes more than once.

    query: (B, H, S, D); key and value: (B, HK, KV, D) with HK a divisor of H. The dtype is float16 or bfloat16, strides
    are arbitrary, D is a multiple of 8 up to 256. precision: "fp8" is E4M3 for Q, K and V, "int8" is int8 for Q and K.
    "int8_fine" is the same with a scale per row of Q and four per 128 rows of K, for ``scales="block"`` only. scales:
    "block" for one per 16 rows of Q and one per 128 rows of K, "head" for one per head. value_scales: of V, "block" for
    one per 128 keys, "head", or "channel" for one per channel of a head; the default is ``scales``. If all scales are
    per block, one kernel quantizes; otherwise PyTorch does, in several passes.
    subtract_key_mean: subtract from every key a mean estimated from 32 keys. This changes no weight, and reduces the
    error if channels are biased (SageAttention, Zhang et al. 2024, with the mean of all keys). rotate: multiply Q and K
    by a Hadamard matrix with signed rows. This changes no score, and spreads outliers over all channels (QuaRot,
    Ashkboos et al. 2024). log_sum_exp: also compute the contribution of the mean that ``attention(...,
    return_lse=True)`` adds back, at one more pass over Q. A gradient that reaches the results raises
    NotImplementedError in the backward pass.
    q_norm, k_norm, norm_eps, rope, rope_dim, rope_interleaved, norm, q_norm_bias, k_norm_bias, and query, key and value
    as lists of parts of a sequence: as for ``attention_block``; rows are normalized and rotated before everything else.

    Raises TypeError for inputs of other types and dtypes, ValueError for shapes, devices and choices that do not fit,
    NotImplementedError for a head dim without a kernel.
    """
    check_choice("precision", precision, PRECISIONS)
    parts = None
    if _has_parts(query, key, value):
        row = RowArguments(
            query, key, value, q_norm, k_norm, norm, q_norm_bias, k_norm_bias, norm_eps, rope, rope_dim,
            rope_interleaved,
        )  # fmt: skip
        listed = list_tensors(row)
        parts = parse_parts(row) if listed is not None and _may_fuse_parts(listed) else None
        if parts is None:
            row = join_parts(row)
            query, key, value, q_norm, k_norm, norm, q_norm_bias, k_norm_bias, norm_eps, rope, rope_dim, _ = row
    if parts is None and has_torch_function_variadic(query, key, value):
        return _call_torch_function(  # type: ignore[no-any-return]
            quantize, (query, key, value), query, key, value, precision=precision, scales=scales,
            value_scales=value_scales, subtract_key_mean=subtract_key_mean, rotate=rotate, log_sum_exp=log_sum_exp,
            q_norm=q_norm, k_norm=k_norm, norm=norm, q_norm_bias=q_norm_bias, k_norm_bias=k_norm_bias,
            norm_eps=norm_eps, rope=rope, rope_dim=rope_dim, rope_interleaved=rope_interleaved,
        )  # fmt: skip
    check_choice("scales", scales, ("block", "head"))
    check_flag("subtract_key_mean", subtract_key_mean)
    check_flag("rotate", rotate)
    check_flag("log_sum_exp", log_sum_exp)
    values = scales if value_scales is None else value_scales
    check_choice("value_scales", values, VALUE_SCALES)
    choices = (precision, scales == "block", values, subtract_key_mean, rotate)
    if parts is not None:
        return _quantize_parts(parts, choices, log_sum_exp)
    query, key, value = cast(Tensor, query), cast(Tensor, key), cast(Tensor, value)
    check_tensors(query, key, value)
    options = parse_transform(
        query, key, q_norm, k_norm, norm, q_norm_bias, k_norm_bias, norm_eps, rope, rope_dim, rope_interleaved
    )
    if options is None:
        tensors = torch_ops.QUANTIZE(query, key, value, *choices)
    else:
        tensors = QUANTIZE_BLOCK(query, key, value, *options, *choices)
    mean_scores = None
    if log_sum_exp and subtract_key_mean:
        transformed = query if options is None else transform(query, options.q_norm, options.q_norm_bias, options)
        mean_scores = torch_ops.MEAN_SCORES(transformed, tensors[-1], rotate)
    return _build_quantized(tensors, choices, query, key.shape[2], mean_scores)


def _build_quantized(
    tensors: Sequence[Tensor], choices: tuple[Any, ...], query: Tensor, key_length: int, mean_scores: Tensor | None
) -> QuantizedQKV:
    """Return the results of the operator ``quantize`` by name. choices: its arguments after the tensors."""
    q, k, v, q_scale, k_scale, v_scale, mean = tensors
    precision, _, _, key_mean, _ = choices
    return QuantizedQKV(
        query=q,
        key=k,
        value=v,
        query_scale=q_scale,
        key_scale=k_scale,
        value_scale=v_scale,
        key_mean=mean if key_mean else None,
        precision=precision,
        head_dim=query.shape[3],
        key_length=key_length,
        dtype=query.dtype,
        mean_scores=mean_scores,
    )


def _quantize_parts(parts: TwoParts, choices: tuple[Any, ...], log_sum_exp: bool) -> QuantizedQKV:
    """Compute ``quantize`` of a sequence in two parts. choices: the arguments of the operator after the tensors."""
    tensors = QUANTIZE_PARTS(*parts.flatten(), *choices)
    _, _, _, key_mean, rotate = choices
    mean_scores = None
    if log_sum_exp and key_mean:
        each = [torch_ops.MEAN_SCORES(query, tensors[-1], rotate) for query in parts.transform_query()]
        mean_scores = torch.cat(each, 2)
    return _build_quantized(tensors, choices, parts.first.query, parts.key_shape[2], mean_scores)


def _may_fuse_parts(listed: tuple[Any, ...]) -> bool:
    """Return whether the operators on parts may take the tensors of ``list_tensors``.

    They do not cast for autocast, and have no rules for functorch transforms, dual numbers and overrides of functions.
    """
    tensors = [x for x in listed if isinstance(x, Tensor)]
    if has_torch_function_variadic(*tensors) or torch_ops.get_autocast_dtype(tensors[0]) != tensors[0].dtype:
        return False
    if torch.compiler.is_compiling():
        return True
    return torch._C._functorch.peek_interpreter_stack() is None and forward_ad._current_level < 0


@overload
def attention_block(
    query: Tensor | Sequence[Tensor], key: Tensor | Sequence[Tensor], value: Tensor | Sequence[Tensor],
    is_causal: bool = ..., scale: float | None = ..., *, precision: Precision = ..., causal_alignment: Alignment = ...,
    q_norm: RowNorm | Sequence[RowNorm] = ..., k_norm: RowNorm | Sequence[RowNorm] = ..., norm: Norm = ...,
    q_norm_bias: Biases = ..., k_norm_bias: Biases = ...,
    norm_eps: float = ..., rope: Tables | Sequence[Tables | None] | None = ..., rope_dim: int | None = ...,
    rope_interleaved: bool = ..., attn_mask: Tensor | BlockMask | None = ..., return_lse: Literal[False] = ...,
    window: Sequence[int] = ..., softcap: float = ..., sinks: Tensor | None = ..., kv_lengths: Tensor | None = ...,
    skip_threshold: float = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attention_block(
    query: Tensor | Sequence[Tensor], key: Tensor | Sequence[Tensor], value: Tensor | Sequence[Tensor],
    is_causal: bool = ..., scale: float | None = ..., *, precision: Precision = ..., causal_alignment: Alignment = ...,
    q_norm: RowNorm | Sequence[RowNorm] = ..., k_norm: RowNorm | Sequence[RowNorm] = ..., norm: Norm = ...,
    q_norm_bias: Biases = ..., k_norm_bias: Biases = ...,
    norm_eps: float = ..., rope: Tables | Sequence[Tables | None] | None = ..., rope_dim: int | None = ...,
    rope_interleaved: bool = ..., attn_mask: Tensor | BlockMask | None = ..., return_lse: Literal[True],
    window: Sequence[int] = ..., softcap: float = ..., sinks: Tensor | None = ..., kv_lengths: Tensor | None = ...,
    skip_threshold: float = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention_block(
    query: Tensor | Sequence[Tensor],
    key: Tensor | Sequence[Tensor],
    value: Tensor | Sequence[Tensor],
    is_causal: bool = False,
    scale: float | None = None,
    *,
    precision: Precision = "fp8",
    causal_alignment: Alignment = "upper_left",
    q_norm: RowNorm | Sequence[RowNorm] = None,
    k_norm: RowNorm | Sequence[RowNorm] = None,
    norm: Norm = "rms",
    q_norm_bias: Biases = None,
    k_norm_bias: Biases = None,
    norm_eps: float = 1e-6,
    rope: Tables | Sequence[Tables | None] | None = None,
    rope_dim: int | None = None,
    rope_interleaved: bool = False,
    attn_mask: Tensor | BlockMask | None = None,
    return_lse: bool = False,
    window: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    skip_threshold: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalize and rotate Q and K, and compute attention: one pass quantizes them, then one kernel attends.

    query: (B, H, S, D); key and value: (B, HK, KV, D) with HK a divisor of H. The dtype is float16 or bfloat16, strides
    are arbitrary, D is a multiple of 8 up to 256. is_causal, scale, precision, causal_alignment, attn_mask,
    return_lse, window, softcap, sinks, kv_lengths, skip_threshold: as for ``sdpa``. (B, S, H, D) and slices of one
    packed projection are read in place: pass ``x.transpose(1, 2)``.
    q_norm, k_norm: a norm of each head of Q and K, before everything else: weights (D,) of float32, bfloat16 or
    float16, True for a norm without weights, or None. With weights (H, D) and (HK, D) each norm is over all heads, at
    one more pass over Q and K. Both are of one kind and dtype. norm: "rms" for RMSNorm, "layer" for LayerNorm.
    q_norm_bias, k_norm_bias: biases of LayerNorm, of the shape and dtype of the weights, or None. norm_eps: added to
    the mean of the squares. rope: (cos, sin), then a rotary embedding of the first ``rope_dim`` columns, by default
    all. The tables are (S, T), (B, S, T), or with tables of each head (B, H, S, T), with a row for each token, in
    float32, bfloat16 or float16; S and KV must be equal, with tables of each head H and HK too. T is rope_dim / 2, the
    angles, or rope_dim: models store each angle twice, and the second copy is not read. Columns i and i + rope_dim / 2
    are rotated by angle i, with rope_interleaved columns 2 i and 2 i + 1. Norm and RoPE are computed in float32, and
    the result of each is rounded to the dtype of the tensors, as in two PyTorch operators.
    Parts of a sequence, such as text and image tokens: query, key and value may each be a list of tensors (B, H, S_i,
    D), joined in this order. Norms and biases are then lists too, or one for all; rope is one pair for the whole
    sequence, or a list of pairs, with None for a part that is not rotated. The pass reads two parts in place, each with
    RMSNorm weights (D,) and tables of its own. PyTorch joins others by a copy, after norms of their own: more than two,
    and two with LayerNorm, with norms over all heads or of different kinds, with tables of each head, or with tables of
    different dtypes or widths.

    Returns (B, H, S, D) of the inputs' dtype, in the memory order of query, and with ``return_lse`` also the
    log-sum-exp, float32 (B, H, S). With a mask or ``return_lse`` the same pass quantizes, and the kernel of masks
    attends. But for calls with gradients, for ``kv_lengths``, and for masks other than booleans (B, H, S, KV) and a
    BlockMask, PyTorch computes norm and RoPE, and ``sdpa`` the rest. These calls join parts by a copy. The gradients of
    Q, K, V and the weights are computed for norm, RoPE and attention on the unquantized tensors; the backward pass
    recomputes them.
    Raises TypeError, ValueError and NotImplementedError as ``quantize`` and ``sdpa`` do, and name the argument.
    """
    if _has_parts(query, key, value):
        row = RowArguments(
            query, key, value, q_norm, k_norm, norm, q_norm_bias, k_norm_bias, norm_eps, rope, rope_dim,
            rope_interleaved,
        )  # fmt: skip
        options_of_scores = (window, softcap, sinks, kv_lengths, skip_threshold)
        result = _attend_two_parts(
            row, is_causal, scale, precision, causal_alignment, attn_mask, return_lse, options_of_scores
        )
        if result is not None:
            return result
        row = join_parts(row)
        query, key, value, q_norm, k_norm, norm, q_norm_bias, k_norm_bias, norm_eps, rope, rope_dim, _ = row
    if has_torch_function_variadic(query, key, value):
        return _call_torch_function(  # type: ignore[no-any-return]
            attention_block, (query, key, value), query, key, value, is_causal, scale, precision=precision,
            causal_alignment=causal_alignment, q_norm=q_norm, k_norm=k_norm, norm=norm, q_norm_bias=q_norm_bias,
            k_norm_bias=k_norm_bias, norm_eps=norm_eps, rope=rope, rope_dim=rope_dim, rope_interleaved=rope_interleaved,
            attn_mask=attn_mask, return_lse=return_lse, window=window, softcap=softcap, sinks=sinks,
            kv_lengths=kv_lengths, skip_threshold=skip_threshold,
        )  # fmt: skip
    scores = parse_options(window, softcap, sinks, kv_lengths, skip_threshold, causal_alignment)
    check_flag("return_lse", return_lse)
    masked = attn_mask is not None or scores is not NO_OPTIONS or return_lse
    repeats = not (ACTIVE or masked or torch.compiler.is_compiling()) and (
        rope is None or (type(rope) is tuple and len(rope) == 2)
    )
    if repeats:
        if not torch.is_grad_enabled():  # the cache takes tensors of one type
            q_norm, k_norm = (x.detach() if isinstance(x, torch.nn.Parameter) else x for x in (q_norm, k_norm))
            q_norm_bias, k_norm_bias = (
                x.detach() if isinstance(x, torch.nn.Parameter) else x for x in (q_norm_bias, k_norm_bias)
            )
        request = (
            query, key, value, q_norm, k_norm, q_norm_bias, k_norm_bias, *(rope or (None, None)), is_causal, scale,
            precision, causal_alignment, norm, norm_eps, rope_dim, rope_interleaved,
        )  # fmt: skip
        replayed = replay(BLOCK_CACHE, request, query)
        if replayed is not None:
            return replayed[0]  # type: ignore[no-any-return]
    check_choice("precision", precision, PRECISIONS)
    causal = parse_causal(is_causal, causal_alignment)
    query, key, value = _cast_for_autocast(cast(Tensor, query), cast(Tensor, key), cast(Tensor, value))
    check_tensors(query, key, value)
    factor = parse_scale(scale, query.shape[3])
    options = parse_transform(
        query, key, q_norm, k_norm, norm, q_norm_bias, k_norm_bias, norm_eps, rope, rope_dim, rope_interleaved
    )
    needs_grad = torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in (query, key, value, q_norm, k_norm, q_norm_bias, k_norm_bias)
    )
    fused = options is not None and not ACTIVE and query.numel() > 0 and key.numel() > 0
    fused = fused and not needs_grad and kv_lengths is None
    if masked and fused and _has_code_form(attn_mask, causal, query.shape, key.shape):
        spec = make_spec(attn_mask, causal, scores, query.shape[2], key.shape[2], query.shape[0])
        codes = quantize(
            query, key, value, precision=precision, subtract_key_mean=has_key_mean(scores.softcap, scores.sinks),
            log_sum_exp=return_lse, q_norm=q_norm, k_norm=k_norm, norm=norm, q_norm_bias=q_norm_bias,
            k_norm_bias=k_norm_bias, norm_eps=norm_eps, rope=rope, rope_dim=rope_dim, rope_interleaved=rope_interleaved,
        )  # fmt: skip
        return _attend_codes(codes, spec, scores, causal, factor, return_lse)  # type: ignore[no-any-return]
    if options is None or ACTIVE or masked:
        if options is not None:
            query, key = transform_both(query, key, options)
        attend: Callable[..., Any] = sdpa
        return attend(  # type: ignore[no-any-return]
            query, key, value, attn_mask, is_causal=is_causal, scale=factor, enable_gqa=True, precision=precision,
            causal_alignment=causal_alignment, return_lse=return_lse, window=window, softcap=softcap, sinks=sinks,
            kv_lengths=kv_lengths, skip_threshold=skip_threshold,
        )  # fmt: skip
    args = (query, key, value, *options, precision, causal, factor)
    if torch_ops.can_skip_dispatcher(query, key, value, *[x for x in options[:4] if x is not None]):
        out, plan = BLOCKS.attend(*args)
        if repeats:
            store_plan(BLOCK_CACHE, request, plan, query, 9)
        return out
    return BLOCK(*args)  # type: ignore[no-any-return]


def _attend_two_parts(
    row: RowArguments, is_causal: bool, scale: float | None, precision: Precision, alignment: Alignment,
    attn_mask: Tensor | BlockMask | None, return_lse: bool, options: tuple[Any, ...],
) -> Tensor | tuple[Tensor, Tensor] | None:  # fmt: skip
    """Compute ``attention_block`` of a sequence in two parts by the pass that reads both in place.

    options: window, softcap, sinks, kv_lengths and skip_threshold. Returns None if ``join_parts`` must join them:
    for gradients, inside a context_parallel, with padding, and for parts that no kernel reads.
    """
    listed = list_tensors(row)
    if listed is None or ACTIVE or options[3] is not None or not _may_fuse_parts(listed):
        return None
    window, softcap, sinks, _, skip_threshold = options
    scores = parse_options(window, softcap, sinks, None, skip_threshold, alignment)
    check_flag("return_lse", return_lse)
    masked = attn_mask is not None or scores is not NO_OPTIONS or return_lse
    if torch.is_grad_enabled():
        if any([isinstance(x, Tensor) and x.requires_grad for x in listed]):
            return None
    else:  # the cache takes tensors of one type
        listed = tuple(x.detach() if isinstance(x, torch.nn.Parameter) else x for x in listed)
    repeats = not (masked or torch.compiler.is_compiling())
    request = (
        *listed, is_causal, scale, precision, alignment, row.norm_eps, row.rope_dim, row.rope_interleaved
    )  # fmt: skip
    if repeats:
        replayed = replay(PARTS_CACHE, request, listed[0])
        if replayed is not None:
            return replayed[0]  # type: ignore[no-any-return]
    check_choice("precision", precision, PRECISIONS)
    causal = parse_causal(is_causal, alignment)
    parts = parse_parts(row)
    if parts is None or is_empty(parts):
        return None
    query_shape, key_shape = parts.query_shape, parts.key_shape
    factor = parse_scale(scale, query_shape[3])
    if masked:
        if not _has_code_form(attn_mask, causal, query_shape, key_shape):
            return None
        spec = make_spec(attn_mask, causal, scores, query_shape[2], key_shape[2], query_shape[0])
        choices = (precision, True, "block", has_key_mean(scores.softcap, scores.sinks), True)
        codes = _quantize_parts(parts, choices, return_lse)
        return _attend_codes(codes, spec, scores, causal, factor, return_lse)  # type: ignore[no-any-return]
    args = (*parts.flatten(), precision, causal, factor)
    if not torch_ops.can_skip_dispatcher(*[x for x in listed if isinstance(x, Tensor)]):
        return BLOCK_PARTS(*args)  # type: ignore[no-any-return]
    out, plan = PARTS.attend(*args)
    if plan is not None:
        allocate = partial(Tensor.new_empty_strided, size=out.shape, stride=plan.out_strides)
        PARTS_CACHE.put(request, CachedLaunch(plan, allocate, 14))
    return out


def _has_parts(query: Any, key: Any, value: Any) -> bool:
    """Return whether one of the inputs is a list of parts of the sequence."""
    return isinstance(query, list | tuple) or isinstance(key, list | tuple) or isinstance(value, list | tuple)


def _has_code_form(mask: Any, causal: int, query_shape: Sequence[int], key_shape: Sequence[int]) -> bool:
    """Return whether attention on codes takes this mask: not padding alone, because codes are of all keys."""
    if mask is None:
        return True
    if isinstance(mask, BlockMask):
        return not causal
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[2] == 1:
        return False
    whole = (*query_shape[:3], key_shape[2])
    return mask.shape[2:] == whole[2:] and all(n in (1, m) for n, m in zip(mask.shape[:2], whole[:2], strict=True))


@overload
def attention(
    quantized: QuantizedQKV, *, is_causal: bool = ..., causal_alignment: Alignment = ..., scale: float | None = ...,
    return_lse: Literal[False] = ...,
    attn_mask: BlockMask | None = ..., window: Sequence[int] = ..., softcap: float = ..., sinks: Tensor | None = ...,
    kv_lengths: Tensor | None = ..., skip_threshold: float = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    quantized: QuantizedQKV, *, is_causal: bool = ..., causal_alignment: Alignment = ..., scale: float | None = ...,
    return_lse: Literal[True],
    attn_mask: BlockMask | None = ..., window: Sequence[int] = ..., softcap: float = ..., sinks: Tensor | None = ...,
    kv_lengths: Tensor | None = ..., skip_threshold: float = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(
    quantized: QuantizedQKV,
    *,
    is_causal: bool = False,
    causal_alignment: Alignment = "upper_left",
    scale: float | None = None,
    return_lse: bool = False,
    attn_mask: BlockMask | None = None,
    window: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    skip_threshold: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(scale * Q K^T) V of quantized inputs; arguments, results and errors as for ``sdpa``.

    attn_mask: a ``greenfast.BlockMask`` or None. It, window, softcap, sinks, kv_lengths and skip_threshold need codes
    with scales of blocks; softcap and sinks also codes that were quantized with ``subtract_key_mean=False``.
    return_lse: raises ValueError for codes that were quantized with ``subtract_key_mean`` but without ``log_sum_exp``.
    Codes have no gradient: one that reaches the results raises NotImplementedError in the backward pass.
    """
    if has_torch_function_variadic(quantized):
        return _call_torch_function(  # type: ignore[no-any-return]
            attention, (quantized,), quantized, is_causal=is_causal, causal_alignment=causal_alignment, scale=scale,
            return_lse=return_lse, attn_mask=attn_mask, window=window, softcap=softcap, sinks=sinks,
            kv_lengths=kv_lengths, skip_threshold=skip_threshold,
        )  # fmt: skip
    if not isinstance(quantized, QuantizedQKV):
        raise TypeError(
            f"quantized: a QuantizedQKV, as greenfast.quantize returns, is needed; got {type(quantized).__name__}"
        )
    quantized.check()
    if return_lse is not False:
        check_flag("return_lse", return_lse)
    factor = parse_scale(scale, quantized.head_dim)
    causal = parse_causal(is_causal, causal_alignment)
    spec, options = None, parse_options(window, softcap, sinks, kv_lengths, skip_threshold, causal_alignment)
    if attn_mask is not None or options is not NO_OPTIONS:
        if attn_mask is not None and not isinstance(attn_mask, BlockMask):
            raise TypeError(f"attn_mask: a {type(attn_mask).__name__}; codes take a BlockMask, as from_bool makes it")
        if attn_mask is not None and causal:
            raise ValueError("attn_mask: a BlockMask holds the whole mask; it cannot be combined with is_causal")
        batch, _, q_len, _ = quantized.query.shape
        spec = make_spec(attn_mask, causal, options, q_len, quantized.key_length, batch)
    return _attend_codes(quantized, spec, options, causal, factor, return_lse)  # type: ignore[no-any-return]


def _attend_codes(
    quantized: QuantizedQKV, spec: MaskSpec | None, options: ScoreOptions, causal: int, factor: float, return_lse: bool
) -> Any:
    """Compute attention of codes. spec: None if the mask is ``causal``."""
    if return_lse and quantized.key_mean is not None and quantized.mean_scores is None:
        raise ValueError(_NO_MEAN_SCORES)
    if spec is not None:
        result = compute_masked_codes(quantized, spec, options, factor, return_lse)
        if not return_lse or quantized.mean_scores is None:
            return result
        return result[0], reference.add_mean_scores(result[1], quantized.mean_scores, 2, factor)
    args = (
        quantized.query, quantized.key, quantized.value, quantized.query_scale, quantized.key_scale,
        quantized.value_scale, quantized.precision, quantized.head_dim, quantized.key_length, quantized.dtype, causal,
        factor,
    )  # fmt: skip
    if not return_lse:
        op: Callable[..., Tensor] = (
            torch_ops.load_cuda().attention if torch_ops.can_skip_dispatcher(*args[:6]) else torch_ops.ATTENTION
        )
        return op(*args)
    out, lse = torch_ops.ATTENTION_LSE(*args)
    if quantized.mean_scores is None:
        return out, lse
    return out, reference.add_mean_scores(lse, quantized.mean_scores, causal, factor)
