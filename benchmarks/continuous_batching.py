"""Tokens per second of transformers' continuous batching, and where the GPU's time goes.

python -m benchmarks continuous_batching [--model llama] [--attention 'paged|sdpa' 'paged|greenfast'] [--json FILE]
    [--fa3-library _vllm_fa3_C.abi3.so --attention 'paged|greenfast' flash_attention_3]

Models have random weights: llama, 4096 wide, 32 heads over 8 of K and V of head dim 128, and gemma (Gemma 3's shape),
16 heads over 8 of head dim 256, windows of 1,024 tokens in five layers of six. Prompts of drawn lengths are generated
from greedily, after a few that warm up; seconds are those of the call. A further run with fewer new tokens is profiled,
and its kernels' times are split into attention and the rest by their names: transformers' "sdpa" gathers the keys and
values of all requests in each layer, and these copies count as attention. transformers 5.20 or later is needed.

The generated tokens are compared with the model's own attention in bfloat16 over the same tokens, without a cache: how
often it chooses the same token (in the timed run), and the error of log-probabilities (in the warm-up run).

FlashAttention-3, in bfloat16 over transformers' own cache, takes part as flash_attention_3 where its package is
installed, or with --fa3-library, vLLM's build of it (fa3_of_vllm.py).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import greenfast
from benchmarks.fa3_of_vllm import install_package
from benchmarks.options import make_parser
from benchmarks.records import write_run

ATTENTIONS = ("paged|sdpa", "paged|greenfast")
#: Parts of names of kernels of attention: greenfast's, PyTorch's, and those of PyTorch that gather the cache.
KERNELS = (
    "attention", "append", "plan", "fmha", "flash", "sdpa", "softmax", "indexselect", "index_copy", "gather", "scatter",
)  # fmt: skip
SMALL = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 256}


@dataclass(frozen=True)
class BatchingRun:
    """A measured combination. Seconds of the host; times of kernels in milliseconds of the profiled run.

    agreement: share of the checked requests' new tokens that the model's own attention also chooses. logprob_error:
    error of the chosen tokens' log-probabilities, relative to their deviation from a uniform distribution.
    same_tokens: share of a request's new tokens before the first difference from the first attention's. blocks: of the
    cache; None if transformers chose the number, as the blocks for all requests did not fit.
    """

    model: str
    attention: str
    requests: int
    prompt_tokens: int
    new_tokens: int
    seconds: float
    tokens_per_s: float
    kernels_ms: float
    attention_ms: float
    attention_share: float
    profiled_s: float
    peak_gib: float
    top_kernels_ms: dict[str, float]
    agreement: float
    logprob_error: float
    same_tokens: float
    blocks: int | None


def make_model(name: str, layers: int, device: str, small: bool) -> Any:
    """Make a model with random weights in bfloat16."""
    library: Any = importlib.import_module("transformers")
    if name == "llama":
        sizes = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000}
        heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
        config = library.LlamaConfig(num_hidden_layers=layers, max_position_embeddings=131072, **heads, **sizes)
    else:
        sizes = {"hidden_size": 3072, "intermediate_size": 12288, "vocab_size": 32000}
        heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256}
        kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)]
        config = library.Gemma3TextConfig(
            num_hidden_layers=layers, layer_types=kinds, sliding_window=1024, max_position_embeddings=131072, **heads,
            **sizes,
        )  # fmt: skip
    if small:
        config = type(config)(**{**config.to_dict(), **SMALL, "num_attention_heads": 4, "num_key_value_heads": 2})
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            torch.manual_seed(0)
            kind = library.LlamaForCausalLM if name == "llama" else library.Gemma3ForCausalLM
            return kind(config).eval()
    finally:
        torch.set_default_dtype(before)


def draw_prompts(requests: int, longest: int, vocabulary: int) -> list[list[int]]:
    """Draw prompts with lengths from an eighth of ``longest`` to ``longest`` tokens."""
    draw = random.Random(0)
    lengths = [draw.randint(max(1, longest // 8), longest) for _ in range(requests)]
    return [[draw.randrange(1, vocabulary) for _ in range(n)] for n in lengths]


def generate(
    model: Any, prompts: list[list[int]], new: int, options: dict[str, Any], **more: Any
) -> tuple[float, list[Any]]:
    """Return the seconds of a call, and the outputs in the prompts' order. Raises RuntimeError if a request failed."""
    library: Any = importlib.import_module("transformers")
    settings: Any = importlib.import_module("transformers.generation.configuration_utils")
    start = time.perf_counter()
    results = model.generate_batch(
        inputs=prompts,
        generation_config=library.GenerationConfig(
            max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=settings.ContinuousBatchingConfig(auto_switch_to_flash=False, **options, **more),
    )
    seconds = time.perf_counter() - start
    outputs = sorted(results.values(), key=lambda x: int(x.request_id.rsplit("_", 1)[-1]))
    errors = {x.error for x in outputs if x.error}
    if errors or [len(x.generated_tokens) for x in outputs] != [new] * len(prompts):
        raise RuntimeError(f"{len(outputs)} of {len(prompts)} requests; errors: {errors}")
    return seconds, outputs


def check_outputs(model: Any, outputs: list[Any]) -> tuple[float, float]:
    """Return ``agreement`` and ``logprob_error`` of outputs; the second is 0 without log-probabilities."""
    attention = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    same, off, size = [], 0.0, 0.0
    for x in outputs:
        tokens = torch.tensor([x.prompt_ids + x.generated_tokens], device=model.device)
        new = tokens[0, len(x.prompt_ids) :]
        with torch.no_grad():
            logits = model(tokens, logits_to_keep=len(new) + 1, use_cache=False).logits[0, :-1].float()
        same.append((logits.argmax(-1) == new).float().mean())
        if x.logprobs:
            wanted = logits.log_softmax(-1).gather(1, new.unsqueeze(1)).squeeze(1)
            off += float((torch.tensor(x.logprobs, device=new.device) - wanted).square().sum())
            size += float((wanted + math.log(logits.shape[1])).square().sum())
    model.set_attn_implementation(attention)
    return float(torch.stack(same).mean()), math.sqrt(off / size) if size else 0.0


def compare_tokens(outputs: list[Any], first: list[Any]) -> float:
    """Return ``same_tokens``."""
    shares = []
    for x, y in zip(outputs, first, strict=True):
        pairs = [*zip(x.generated_tokens, y.generated_tokens, strict=True)]
        shares.append(next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs)) / len(pairs))
    return sum(shares) / len(shares)


def profile_kernels(work: Any) -> Counter[str]:
    """Return the milliseconds on the GPU by kernel name; empty without a GPU."""
    times: Counter[str] = Counter()
    if not torch.cuda.is_available():
        work()
        return times
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    for event in profile.key_averages():
        if event.self_device_time_total:
            times[event.key] += event.self_device_time_total / 1e3
    return times


def measure(
    model: Any, name: str, attention: str, prompts: list[list[int]], args: argparse.Namespace, first: list[Any]
) -> BatchingRun:
    """Measure one attention. first: the outputs of the first attention; empty for the first one, which fills it."""
    model.set_attn_implementation(attention)
    page = args.page_size if attention == "paged|greenfast" else 256
    options: dict[str, Any] = {
        "max_batch_tokens": args.batch_tokens, "allow_block_sharing": False, "page_size": page,
        "num_blocks": args.blocks or sum(-(-(len(x) + args.new) // page) + 1 for x in prompts),
        "use_cuda_graph": args.cuda_graphs, "use_async_batching": args.asynchronous,
    }  # fmt: skip
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        _, few = generate(model, prompts[: args.checked], min(args.new, 8), options, return_logprobs=True)
    except MemoryError as error:
        print(f"{name} {attention}: {error}; as many blocks as fit, so some requests wait", flush=True)
        options["num_blocks"] = None
        _, few = generate(model, prompts[: args.checked], min(args.new, 8), options, return_logprobs=True)
    seconds, outputs = generate(model, prompts, args.new, options)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    start = time.perf_counter()
    times: Counter[str] = Counter()
    if args.profiled_new:
        times = profile_kernels(lambda: generate(model, prompts, args.profiled_new, options))
    profiled = time.perf_counter() - start
    first += [] if first else outputs
    total = sum(times.values())
    ours = sum(ms for key, ms in times.items() if any(part in key.lower() for part in KERNELS))
    return BatchingRun(
        model=name, attention=attention, requests=len(prompts), prompt_tokens=sum(map(len, prompts)),
        new_tokens=args.new * len(prompts), seconds=seconds,
        tokens_per_s=args.new * len(prompts) / seconds, kernels_ms=total, attention_ms=ours,
        attention_share=ours / total if total else 0.0, profiled_s=profiled,
        peak_gib=peak, top_kernels_ms={key[:120]: round(ms, 3) for key, ms in times.most_common(12)},
        agreement=check_outputs(model, outputs[: args.checked])[0], logprob_error=check_outputs(model, few)[1],
        same_tokens=compare_tokens(outputs, first), blocks=options["num_blocks"],
    )  # fmt: skip


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser("continuous_batching", __doc__)
    parser.add_argument("--model", nargs="+", default=["llama", "gemma"], choices=("llama", "gemma"))
    parser.add_argument("--attention", nargs="+", default=list(ATTENTIONS), help="names of transformers or greenfast")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--longest", type=int, default=3072, help="tokens of a prompt at most")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate for each request")
    parser.add_argument("--profiled-new", type=int, default=4, help="the same where kernels are profiled; 0: none are")
    parser.add_argument("--checked", type=int, default=4, help="requests whose outputs are checked, which also warm up")
    parser.add_argument("--fa3-library", help="vLLM's FlashAttention-3, for --attention flash_attention_3")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens of a step at most")
    parser.add_argument("--page-size", type=int, default=64, help="of greenfast's cache")
    parser.add_argument("--blocks", type=int, help="of transformers' cache; by default all requests fit")
    parser.add_argument("--cuda-graphs", action=argparse.BooleanOptionalAction, help="by default transformers decides")
    parser.add_argument("--asynchronous", action=argparse.BooleanOptionalAction, help="by default transformers decides")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="models of a few thousand weights, for a try on the CPU")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[BatchingRun]:
    """Measure, print and write the record."""
    args = parse_options(argv)
    if args.fa3_library:
        install_package(args.fa3_library)
    greenfast.register_continuous_batching()
    runs = []
    for name in args.model:
        model = make_model(name, args.layers, args.device, args.small)
        prompts = draw_prompts(args.requests, args.longest, model.config.vocab_size)
        first: list[Any] = []
        for attention in args.attention:
            run = measure(model, name, attention, prompts, args, first)
            runs.append(run)
            print(
                f"{name:6} {attention:16} {run.tokens_per_s:8.1f} tokens/s ({run.seconds:.2f} s)  kernels "
                f"{run.kernels_ms:.0f} ms, of attention {run.attention_ms:.0f} ms ({run.attention_share:.0%})  "
                f"agrees {run.agreement:.1%}, log-probabilities off {run.logprob_error:.4f}, same "
                f"{run.same_tokens:.1%}",
                flush=True,
            )
            write_run(args, "continuous_batching", ("transformers",), runs)  # after each, as one may fail
        del model
    return runs
