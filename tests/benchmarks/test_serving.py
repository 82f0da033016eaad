"""The serving comparison: its cases, its contenders on CPU tensors, what checks them, and who is left out."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import serving as serving_module
from benchmarks import serving_inputs, timing
from benchmarks.comparison import BenchCell, Facts
from benchmarks.records import HostRow
from benchmarks.registry import KERNEL
from benchmarks.serving import ServingSession, load_library, serving, timed_launches
from benchmarks.serving_backends import BACKENDS
from benchmarks.serving_cases import (
    PAGE,
    ServingCase,
    append_bytes,
    bytes_moved,
    cases,
    copies,
    find_lengths,
    flops,
    host_case,
    kv_bytes,
)
from benchmarks.serving_inputs import AppendInputs, PagedInputs, append_inputs, paged_inputs
from benchmarks.session import BenchSession
from greenfast.device.identity import launch_facts
from greenfast.judge.task import Shape
from greenfast.serving import cuda as serving_cuda
from greenfast.serving import torch_ops as serving_ops
from greenfast.spec.errors import UsageError

LENGTHS = (70, 129, 5)
SIZES = {"B": 3, "H": 4, "HK": 2, "D": 64, "S": 129, "KEYS": sum(LENGTHS)}
DECODE = Shape(name="decode_small", dims=SIZES)
PREFILL = Shape(name="prefill_small", dims=SIZES | {"SQUARES": sum(n * n for n in LENGTHS)})
APPEND = {"TOKENS": 100, "H": 4, "HK": 2, "D": 64}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[[Shape], PagedInputs]:
    monkeypatch.setattr(serving_inputs, "find_lengths", lambda name: LENGTHS)
    monkeypatch.setattr(serving_inputs, "copies", lambda dims: 1 if "SQUARES" in dims else 3)
    return lambda shape: paged_inputs(shape, 0, "cpu")


def error_of(inputs: PagedInputs | AppendInputs, out: Tensor) -> float:
    found = inputs.reference.check(out.float().flatten(0, -2), False)
    assert found.error is not None
    return found.error


def test_the_cases_are_the_table() -> None:
    found = {case.shape.name: case for case in cases()}
    of_group = {group: [n for n in found if n.startswith(group)] for group in ("decode", "prefill", "append", "read")}
    assert [len(names) for names in of_group.values()] == [22, 15, 4, 1]
    dims = found["decode_16x8_d256_8x32768"].shape.dims
    assert dims == {"B": 8, "H": 16, "HK": 8, "D": 256, "S": 32768, "KEYS": 8 * 32768}
    assert kv_bytes(dims) == 2 * 8 * 32768 * 8 * 256
    assert found["decode_32x8_d128_skewed"].shape.dims["KEYS"] == 131072 + 63 * 1024
    ragged = found["prefill_64x8_d64_ragged"]
    assert (ragged.shape.dims["KEYS"], find_lengths(ragged.shape.name)) == (16384, ragged.lengths)
    assert sum(case.token_scales for case in found.values()) == 7
    assert {case.group for case in cases(["append"])} == {"append", "read"}
    assert len(cases(quick=True)) < len(cases()) / 1.5
    with pytest.raises(UsageError, match=r"unknown case of benchmarks serving 'chunks'; allowed: append, decode"):
        cases(["chunks"])


def test_operations_and_bytes_are_those_of_the_table() -> None:
    by_name = {case.shape.name: case.shape.dims for case in cases()}
    # serving.md: 664 TFLOP/s at 1 x 32k are 3.3 ms, 1.00 TB/s at 1 x 8k are 16.9 us
    assert flops(by_name["prefill_32x8_d128_1x32768"]) / 664e12 == pytest.approx(13.25e-3, rel=0.01)
    assert kv_bytes(by_name["decode_32x8_d128_1x8192"]) / 16.9e-6 == pytest.approx(1.0e12, rel=0.01)
    assert flops(by_name["append_64"]) == 0
    assert append_bytes(by_name["append_64"]) == 64 * (2 * 48 * 128 + 2 * 32 * 128 + 2 * 8 * 128 + 2 * 8 * 4)
    for name, dims in by_name.items():
        if name.startswith("decode"):
            assert bytes_moved(dims) >= 4 * 60e6, name  # of an H200's L2
            assert copies(dims) == 1 or bytes_moved(dims) < 2 * 300e6
    assert copies(by_name["prefill_32x8_d128_16x1024"]) == 1


def test_the_comparison_names_its_groups_and_travels_to_a_process() -> None:
    found = serving(["decode", "host"], quick=True, fa3_library="/some/library.so")
    assert {cell.shape.name.split("_")[0] for cell in found.timed} == {"decode", "read"}
    assert [versus.title for versus in found.versus] == [
        "decode: greenfast / FA3 FP8", "decode: greenfast / best FA3"
    ]  # fmt: skip
    assert found.host is not None
    assert found.host.backends[:2] == ("kvcache", "kvcache_unplanned")
    session = pickle.loads(pickle.dumps(found.session))
    assert session.func is ServingSession
    assert session.keywords["fa3_library"] == "/some/library.so"
    assert len(session.keywords["cases"]) == len(found.timed) + 1
    whole = serving()
    assert set(whole.contenders) == set(BACKENDS)
    assert all(BACKENDS[name].own for name in whole.own)
    assert "copy" not in whole.own
    assert {cell.shape.name.split("_")[0] for cell in whole.timed if cell.grid} == {"decode", "prefill"}
    assert serving(["append"]).host is None


def test_pages_lie_in_random_order_and_each_copy_has_its_own(small: Callable[[Shape], PagedInputs]) -> None:
    inputs = small(DECODE)
    assert inputs.k.shape == (3 * 6, PAGE, 2, 64)
    assert inputs.starts.tolist() == [0, 1, 2, 3]
    assert inputs.used.tolist() == list(LENGTHS)
    pages = [sorted({*t[0, :2].tolist(), *t[1].tolist(), int(t[2, 0])}) for t in inputs.tables]
    assert pages == [list(range(n, n + 6)) for n in (0, 6, 12)]
    first = [inputs.k[table[1].long()] for table in inputs.tables]
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[0], first[2])
    assert small(PREFILL).starts.tolist() == [0, 70, 199, 204]


@pytest.mark.parametrize("shape", [DECODE, PREFILL], ids=lambda shape: shape.name)
def test_the_reference_is_what_pytorch_computes(shape: Shape, small: Callable[[Shape], PagedInputs]) -> None:
    inputs = small(shape)
    reference = inputs.reference
    at = 0
    right = []
    for b, length in enumerate(LENGTHS):
        count = length if inputs.prefill else 1
        q = inputs.q[at : at + count].double().transpose(0, 1)
        k, v = (inputs.keys(b, x).double().transpose(0, 1).repeat_interleave(2, 0) for x in (inputs.k, inputs.v))
        mask = torch.arange(length) <= torch.arange(length - count, length).unsqueeze(1)
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        right.append(found.transpose(0, 1))
        at += count
    whole = torch.cat(right).flatten(0, 1)
    torch.testing.assert_close(reference.right, whole[reference.rows])
    assert len(reference.rows) >= 3 * 2 * 2
    assert error_of(inputs, whole) < 1e-6
    assert error_of(inputs, torch.zeros_like(whole)) == pytest.approx(1.0)
    whole[1] = float("nan")
    assert not reference.check(whole.float(), False).finite


@pytest.mark.parametrize(
    ("name", "shape"),
    [(KERNEL, DECODE), ("token_scales", DECODE), ("kvcache", DECODE), ("kvcache_unplanned", DECODE),
     ("kvcache_appending", DECODE), ("varlen_decode", DECODE), (KERNEL, PREFILL), ("varlen", PREFILL)],
)  # fmt: skip
def test_greenfast_computes_attention_and_every_copy_has_the_same_bits(
    name: str, shape: Shape, small: Callable[[Shape], PagedInputs]
) -> None:
    inputs = small(shape)
    ready = BACKENDS[name].bind(inputs)
    outs = [ready.call() for _ in range(max(2, ready.copies))]
    assert ready.copies == (3 if shape is DECODE and name in (KERNEL, "token_scales") else 1)
    assert 0.01 < error_of(inputs, outs[0]) < 0.08
    for out in outs[1:]:
        assert torch.equal(out, outs[0])


@pytest.mark.parametrize("name", ["kvcache_appending", "append_last"])
def test_what_is_appended_again_is_what_was_there(name: str, small: Callable[[Shape], PagedInputs]) -> None:
    inputs = small(DECODE)
    caches = [x.view(torch.uint8) for x in (inputs.k_codes, inputs.v_groups)]
    before = [x.clone() for x in caches]
    page, place = inputs.tables[0][1, 2], 128 % PAGE  # of the sequence of 129 keys
    caches[0][page, place] = 0
    BACKENDS[name].bind(inputs).call()
    assert all(torch.equal(x, y) for x, y in zip(caches, before, strict=True))


def test_a_call_on_the_wrong_pages_is_found(small: Callable[[Shape], PagedInputs]) -> None:
    inputs = small(DECODE)
    wrong = replace(inputs, tables=[inputs.tables[0].flip(0)])
    assert error_of(inputs, BACKENDS[KERNEL].bind(wrong).call()) > 0.1


@pytest.mark.parametrize("norm", [0, 1])
def test_an_append_is_checked_in_its_pages(norm: int) -> None:
    shape = Shape(name="append_100", dims=APPEND | ({"NORM": 1} if norm else {}))
    inputs = append_inputs(shape, 0, "cpu", 1000)
    out = BACKENDS["append"].bind(inputs).call()
    assert 0.005 < error_of(inputs, out) < 0.04
    assert error_of(inputs, inputs.q) > 0.2  # not rotated
    inputs.pages.v_scale.mul_(2)
    assert error_of(inputs, out) > 0.2
    assert BACKENDS["copy"].bind(inputs).call().numel() == 500


def test_a_plan_is_made_anew() -> None:
    inputs = SimpleNamespace(
        starts=torch.tensor([0, 1], dtype=torch.int32), used=torch.tensor([9], dtype=torch.int32), max_queries=1,
        heads=4, kv_heads=2, head_dim=64, q=torch.zeros(1, 4, 64),
    )  # fmt: skip
    ready = BACKENDS["plan"].bind(inputs)
    assert ready.call() is not ready.call()
    ready = BACKENDS["plan_update"].bind(inputs)
    plan = ready.call()
    inputs.used += 1
    assert ready.call() is plan
    assert plan.tolist() == [0, 1, 10]


class Library:
    """Stands for vLLM's operators: keeps what they were called with, and computes in float32."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def get_scheduler_metadata(self, *args: Any) -> Tensor:
        self.calls.append(args)
        return torch.zeros(1, dtype=torch.int32)

    def fwd(self, *args: Any) -> list[Any]:
        self.calls.append(args)
        return [torch.zeros_like(args[0], dtype=torch.float32)]


@pytest.mark.parametrize(("name", "dtype"), [("vllm_fa3", torch.float8_e4m3fn), ("vllm_fa3_bf16", torch.bfloat16)])
def test_vllms_library_is_called_by_its_schema(
    name: str, dtype: torch.dtype, small: Callable[[Shape], PagedInputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library()
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", library, raising=False)
    inputs = small(DECODE)
    ready = BACKENDS[name].bind(inputs)
    assert ready.copies == 3
    assert ready.call().shape == inputs.q.shape
    ready.call()
    metadata, first, second = library.calls
    assert metadata[:9] == (3, 1, 129, 4, 2, 64, 64, dtype, inputs.used)
    assert metadata[14] == PAGE
    q, k, v = first[:3]
    assert (q.dtype, k.dtype, v.shape) == (dtype, dtype, inputs.v.shape)
    assert first[7] is inputs.starts
    assert (first[8], first[11], first[12], first[13]) == (None, inputs.used, 1, 129)
    assert first[14] is inputs.tables[0]
    assert second[14] is inputs.tables[1]
    assert [x is not None for x in first[20:23]] == [dtype != torch.bfloat16] * 3
    assert first[24] is True
    library.calls.clear()
    inputs = small(PREFILL)
    ready = BACKENDS[name].bind(inputs)
    ready.call()
    (args,) = library.calls  # no plan
    assert [x.shape for x in args[:3]] == [(204, 4, 64), (204, 2, 64), (204, 2, 64)]
    assert args[7] is args[8] is inputs.starts
    assert (args[11], args[12], args[13], args[14]) == (None, 129, 129, None)
    assert len(args) == len(first)


def test_the_package_is_called_as_it_is_documented(
    small: Callable[[Shape], PagedInputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def function(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls.append((name, args, options))
            return torch.zeros(1), torch.zeros(2)

        return call

    names = ("get_scheduler_metadata", "flash_attn_with_kvcache", "flash_attn_varlen_func")
    module = SimpleNamespace(**{name: function(name) for name in names})
    monkeypatch.setattr("benchmarks.serving_backends.importlib.import_module", lambda name: module)
    inputs = small(DECODE)
    assert BACKENDS["fa3"].bind(inputs).call().shape == (1,)  # the output, without the log-sum-exp
    assert [name for name, _, _ in calls] == list(names[:2])
    options = calls[1][2]
    assert options["page_table"] is inputs.tables[0]
    assert options["k_descale"].shape == (3, 2)
    assert isinstance(options["scheduler_metadata"], tuple)
    BACKENDS["fa3"].bind(small(PREFILL)).call()
    assert calls[-1][0] == names[2]
    assert calls[-1][1][5:] == (129, 129)


def test_a_library_that_cannot_be_loaded_is_a_reason(tmp_path: Any) -> None:
    assert load_library("")[1].startswith("no library was given: --fa3-library takes")
    broken = tmp_path / "fa3.so"
    broken.write_bytes(b"not ELF")
    version, missing = load_library(str(broken))
    assert version == ""
    assert missing.startswith(f"{broken} cannot be loaded: OSError")


def test_a_library_is_named_by_its_hash(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    file = tmp_path / "fa3.so"
    file.write_bytes(b"abc")
    assert load_library(str(file)) == ("FlashAttention-3 of vLLM (fa3.so, SHA-256 ba7816bf8f01cfea)", "")


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> ServingSession:
    made = ServingSession.__new__(ServingSession)
    made._version, made._missing, made._cases = "", "no library", [host_case()]
    compiled: list[Any] = []
    monkeypatch.setattr(serving_module, "warm", lambda sources, target: compiled.extend(sources))
    monkeypatch.setattr(made, "compiled", compiled, raising=False)
    return made


def test_kernels_are_compiled_first_and_a_missing_library_is_described(session: Any) -> None:
    found = {c.name: c for c in session.facts([KERNEL, "vllm_fa3", "copy"]).backends}
    assert [kernel.entry for kernel in session.compiled] == ["plan_attention", "paged_attention"]
    assert found["vllm_fa3"].missing == "no library"
    assert found[KERNEL].missing == found["copy"].missing == ""
    assert found["copy"].version == f"torch {torch.__version__}"


class Graph:
    """A graph that makes its calls anew, and leaves the last one's output in place."""

    def __init__(self, call: Callable[[], Any], calls: int) -> None:
        self.call, self.calls, self.out = call, calls, call()

    def replay(self) -> None:
        outs = [self.call() for _ in range(self.calls)]
        if isinstance(self.out, Tensor) and self.out.shape == outs[-1].shape:
            self.out.copy_(outs[-1])


def test_a_cell_is_drawn_checked_and_timed(
    session: Any, small: Callable[[Shape], PagedInputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture_graph(call: Callable[[], Any], calls: int) -> tuple[Graph, Any]:
        held.append(calls)
        made = Graph(call, calls)
        return made, made.out

    held: list[int] = []
    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda end: 1.0)
    monkeypatch.setattr(timing, "capture_graph", capture_graph)
    monkeypatch.setattr(timing, "replay_us", lambda graph: 1000.0)
    monkeypatch.setattr(timing, "event", lambda: event)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(session, "device", "cpu", raising=False)
    session._entries, session._clocks = {}, dict
    for shape, names in (
        (DECODE, (KERNEL, "token_scales", "plan")),
        (PREFILL, (KERNEL, "varlen")),
        (Shape(name="append_100", dims=APPEND), ("append", "copy")),
        (Shape(name="read_1GiB", dims={"BYTES": 4096}), ("read_sum", "read_max", "read_norm")),
    ):
        session.open(BenchCell(shape, names), None)
        for name in names:
            held.clear()
            found = session.add(name, True)
            assert (found.reason, found.finite) == ("", True)
            assert (found.error is None) == (not BACKENDS[name].attention)
            assert held == [1, 3 if shape is DECODE and name != "plan" else 2]  # 1 ms a call, three copies
        timed = session.time(2)
        assert timed.changed == []
        assert set(timed.samples_us) == set(names)
    assert session.add("vllm_fa3", True).reason.startswith("AttributeError")


def test_host_times_leave_out_who_is_missing(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[BenchCell] = []

    def host(self: Any, cell: BenchCell) -> list[HostRow]:
        asked.append(cell)
        return []

    monkeypatch.setattr(BenchSession, "host", host)
    session.host(BenchCell(host_case().shape, ("kvcache", "vllm_fa3")))
    assert asked[0].backends == ("kvcache",)


def test_kernels_of_all_cases_are_known_without_a_gpu() -> None:
    found = timed_launches(cases())
    assert len(found) == 22 * 2 + 7 + 15 * 4 + 4
    assert {kernel.entry for kernel, _ in found.values()} == {"paged_attention", "plan_attention", "append_kv"}


@pytest.mark.parametrize(
    ("name", "shape", "step"),
    [(KERNEL, DECODE, "attention"), ("token_scales", DECODE, "attention, a scale per token"),
     (KERNEL, PREFILL, "attention"), ("varlen", PREFILL, "attention on bf16"), ("varlen", PREFILL, "quantization"),
     ("append", Shape(name="append_100", dims=APPEND | {"NORM": 1}), "append")],
)  # fmt: skip
def test_the_recorded_launches_are_those_of_the_calls(
    name: str, shape: Shape, step: str, small: Callable[[Shape], PagedInputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a contender's call hands to the operators makes the launch that was known from the shape."""
    monkeypatch.setattr(serving_module, "copies", lambda dims: 1 if "SQUARES" in dims else 3)
    case = ServingCase(shape, () if "TOKENS" in shape.dims else LENGTHS, token_scales=True)
    expected = timed_launches([case])[f"{step}, {shape.name}"]
    made: list[Any] = []

    def attention(*args: Any, lse: bool) -> tuple[Tensor, Tensor]:
        made.append(serving_cuda.build_attention_steps(*args[:10], None, args[11], tuple(args[12:15]), *args[15:])[1])
        return args[0], args[0]

    def append(*args: Any) -> Tensor:
        made.append(serving_cuda.build_append_step(args[:13], *args[13:]))
        return torch.empty(0)

    monkeypatch.setattr(serving_ops, "paged_attention", attention)
    monkeypatch.setattr(serving_ops, "append_kv", append)
    BACKENDS[name].bind(append_inputs(shape, 0, "cpu", 0) if name == "append" else small(shape)).call()
    found = [(one.source, launch_facts(one.source, one.launch, shape.dims)) for one in made]
    assert expected in found


def test_facts_are_those_of_a_session() -> None:
    assert isinstance(BenchSession.facts(ServingSession.__new__(ServingSession), ["copy"]), Facts)
