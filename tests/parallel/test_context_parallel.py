"""``greenfast.context_parallel`` on ranks of gloo, compared with one process and with float64."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.records import ParallelRecord, read_parallel, write_record
from greenfast.ops.block import parse_transform, transform_both
from greenfast.parallel.group import RankGroup, _ErrorContext
from tests.parallel import cases
from tests.parallel.ranks import MESHES, Ranks, running


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with running(4, tmp_path_factory.mktemp("ranks"), list(MESHES)) as result:
        yield result


def results(found: list[Any]) -> list[Any]:
    """Return the results of the ranks, unless one raised an error."""
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found


def exact(tensors: Any, causal: bool) -> Any:
    q, k, v = tensors
    return torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=causal, enable_gqa=True
    )


def error(found: Any, wanted: Tensor) -> float:
    return float((torch.as_tensor(found).double() - wanted).norm() / wanted.norm())


def given(rows: int, heads: int = 4, kv_heads: int = 4, head_dim: int = 64, **more: Any) -> dict[str, Any]:
    return {"shape": (1, heads, rows, head_dim), "kv_heads": kv_heads, "seed": rows, **more}


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize(
    ("mesh", "sizes", "causal", "balanced"),
    [
        ("2", given(512, bias=5.0), True, True),
        ("2", given(256, heads=3, kv_heads=1), False, True),
        ("3", given(300, heads=4, kv_heads=2, head_dim=72), True, True),  # chunks of 50 rows, heads not divided
        ("3", given(384), True, False),
        ("4", given(1024, kv_heads=2), True, True),  # two ranks share each head of K and V
        ("4", given(512, heads=6, kv_heads=3), False, False),
        ("4", given(60, heads=2, kv_heads=1, keys=36), False, False),  # rows and keys differ; shards are odd
    ],
)
def test_agrees_with_one_process(
    ranks: Ranks, mesh: str, sizes: dict[str, Any], causal: bool, balanced: bool, method: str
) -> None:
    options = {"is_causal": causal, "return_lse": True}
    result = results(ranks(mesh, "attend", method, sizes, options, balanced))
    (out, lse), chosen = result[0]
    assert chosen.startswith(f"{method}: ")
    for (other, _), _ in result[1:]:
        assert np.array_equal(out, other), "all ranks gathered the same"
    tensors = cases.inputs(**sizes)
    alone, lse_alone = cases.sdpa(*tensors, enable_gqa=True, **options)
    wanted = exact(tensors, causal)
    assert error(out, wanted) < 1.03 * error(alone, wanted) + 1e-3
    chunks = len(MESHES[mesh]) * (2 if balanced else 1)
    rows = sizes["shape"][2]
    if method == "ulysses" and rows % (128 * chunks) == 0:
        assert np.array_equal(out, alone.float().numpy()), "the same codes, and so the same bits"
        assert np.allclose(lse, lse_alone.numpy(), atol=1e-4)
    else:
        assert np.abs(lse - lse_alone.numpy()).max() < 0.1


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_a_block_agrees_with_one_process(ranks: Ranks, method: str) -> None:
    """Each rank normalizes and rotates its rows, by its rows of the tables; masks are refused by name."""
    sizes = given(512, kv_heads=2, bias=5.0)
    (out, refusal), (other, _) = results(ranks("2", "block", method, sizes))
    assert np.array_equal(out, other), "all ranks gathered the same"
    assert refusal.startswith("window, softcap, sinks, kv_lengths, skip_threshold: not inside a context_parallel")
    q, k, v = cases.inputs(**sizes)
    rope = cases.angles(sizes["shape"])
    alone = cases.attention_block(q, k, v, is_causal=True, q_norm=True, k_norm=True, rope=rope)
    transform = parse_transform(q, k, True, True, "rms", None, None, 1e-6, rope, None, False)
    assert transform is not None
    wanted = exact((*transform_both(q, k, transform), v), True)
    assert error(out, wanted) < 1.03 * error(alone, wanted) + 1e-3


@pytest.mark.parametrize(("precision", "method"), [("int8", "ring"), ("int8_fine", "ring"), ("int8_fine", "ulysses")])
def test_int8(ranks: Ranks, precision: str, method: str) -> None:
    sizes, options = given(512), {"is_causal": True, "precision": precision, "scale": 0.2}
    (result, _), *_ = results(ranks("2", "attend", method, sizes, options, True))
    tensors = cases.inputs(**sizes)
    alone = cases.sdpa(*tensors, **options)
    assert method == "ring" or np.array_equal(result[0], alone.float().numpy())
    assert error(result[0], alone.double()) < 0.03
    assert not np.array_equal(result[0], cases.sdpa(*tensors, is_causal=True, scale=0.2).float().numpy())


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize(("mesh", "other"), [("2", "2 turned"), ("4", "4 mixed")])
def test_the_result_does_not_depend_on_which_rank_is_where(ranks: Ranks, mesh: str, other: str, method: str) -> None:
    sizes, options = given(512, kv_heads=2), {"is_causal": True}
    (first, _), *_ = results(ranks(mesh, "attend", method, sizes, options, True))
    (again, _), *_ = results(ranks(other, "attend", method, sizes, options, True))
    assert np.array_equal(first[0], again[0])
    assert results(ranks(other, "places"))[0], "the process group has another order than the mesh"


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize(
    ("mesh", "sizes", "causal"),
    [("2", given(128), True), ("3", given(96, heads=4, kv_heads=2), True), ("4", given(64, kv_heads=1), False)],
)
def test_gradients(ranks: Ranks, mesh: str, sizes: dict[str, Any], causal: bool, method: str) -> None:
    result = results(ranks(mesh, "train", method, sizes, causal))[0]
    tensors = [x.double().requires_grad_() for x in cases.inputs(**sizes)]
    grad = cases.inputs(sizes["shape"], 1, 99)[0]
    exact(tensors, causal).backward(grad.double())
    alone = [x.requires_grad_() for x in cases.inputs(**sizes)]
    cases.sdpa(*alone, is_causal=causal, enable_gqa=True).backward(grad)
    for name, mine, wanted, one in zip("qkv", result, tensors, alone, strict=True):
        assert wanted.grad is not None
        assert one.grad is not None
        # Ranks with copies of a head of K and V round their sums, and their sum is rounded again: sqrt(2) as much.
        copies = name != "q" and sizes["kv_heads"] < len(MESHES[mesh])
        assert error(mine, wanted.grad) < (1.5 if copies else 1.001) * error(one.grad, wanted.grad), name


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize(
    ("mesh", "lengths", "causal", "balanced"),
    [("2", [40, 4, 136], True, True), ("3", [60, 12], True, False), ("3", [33, 3, 90], False, False)],
)
def test_sequences_of_several_lengths(
    ranks: Ranks, mesh: str, lengths: list[int], causal: bool, balanced: bool, method: str
) -> None:
    outs, sums, refused = results(ranks(mesh, "varlen", method, lengths, causal, balanced))[-1]
    assert refused.startswith("window_size: it is not computed in a context_parallel")
    for n, out, lse in zip(lengths, outs, sums, strict=True):
        q, k, v = cases.inputs((1, 4, n, 64), 2, n)
        k, v = (x.double().repeat_interleave(2, 1) for x in (k, v))
        scores = 20 * torch.tanh(q.double() @ k.transpose(-1, -2) / 8 / 20)
        if causal:
            scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        wanted = (scores.softmax(-1) @ v)[0].transpose(0, 1)
        assert error(out, wanted) < 0.07
        assert np.abs(lse - scores.logsumexp(-1)[0].numpy()).max() < 0.2


def test_dtensors(ranks: Ranks) -> None:
    sizes = given(256)
    out, placements, grads, refused = results(ranks("2", "as_dtensors", sizes))[1]
    tensors = [x.requires_grad_() for x in cases.inputs(**sizes)]
    alone = cases.sdpa(*tensors, is_causal=True)
    alone.sum().backward()
    assert np.array_equal(out, alone.detach().float().numpy())
    assert placements == "(Shard(dim=2),)"
    for mine, x in zip(grads, tensors, strict=True):
        assert x.grad is not None
        assert np.allclose(mine, x.grad[:, :, 128:].float().numpy(), atol=1e-2)
    assert "query: a DTensor placed (Replicate(),)" in refused
    assert "must be Shard(2)" in refused


@pytest.mark.parametrize("method", [pytest.param("ring", marks=pytest.mark.slow), "auto"])
def test_compiled(ranks: Ranks, method: str) -> None:
    for (eager, graph), alone, local in results(ranks("2", "compiled", method, given(128))):
        for name, mine, wanted in zip(("out", *"qkv"), graph, eager, strict=True):
            assert np.array_equal(mine, wanted), name
        assert np.array_equal(alone, local), "compiled and called outside the context: the rank's rows alone"
        assert not np.array_equal(alone, eager[0])


def test_pytorchs_attention_is_routed_and_checkpointed(ranks: Ranks) -> None:
    for wanted, *result in results(ranks("2", "routed", given(128))):
        for mine in result:
            for one, other in zip(mine, wanted, strict=True):
                assert np.array_equal(one, other)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("rows", ("rank 0: sdpa by ring, query (1, 2, 128, 64)", "rank 1: sdpa by ring, query (1, 2, 64, 64)")),
        ("mask", ("causal False", "causal True")),
        ("scale", ("scale 0.125", "scale 0.25")),
        ("precision", ("fp8", "int8")),
        ("return_lse", ("return_lse False", "return_lse True")),
        ("layout", ("load_balance False", "load_balance True")),
        ("unshard", ("rank 0: unshard along 2, (1, 2, 128, 64)", "rank 1: unshard along 2, (1, 2, 128, 8)")),
        ("varlen lengths", ("cu_seqlens_q [0, 60, 128]", "cu_seqlens_q [0, 40, 128]")),
        ("refused", ("rank 1: query: a shard of 65 rows; two chunks of the same length are needed",)),
        ("varlen refused", ("rank 1: q: torch.bfloat16 (1, 128, 2, 64); (total, heads, head_dim)",)),
    ],
)
def test_calls_that_differ_end_on_all_ranks(ranks: Ranks, kind: str, says: tuple[str, ...]) -> None:
    result = ranks("3", "mismatch", kind)
    for rank, one in enumerate(result):
        assert isinstance(one, ValueError), one
        if "refused" not in kind or rank != 1:
            assert "the ranks of the group make different calls" in str(one)
            assert all(text in str(one) for text in says), one
    results(ranks("3", "attend", "ring", given(96), {}, True))  # they can go on together


def test_a_record_of_the_benchmark(ranks: Ranks, tmp_path: Path) -> None:
    first, second = results(ranks("2", "benchmark"))
    assert [row["contender"] for row in first["rows"]] == ["ring", "ulysses", "alone"]
    assert all(0 < row["error"] < 0.07 for row in first["rows"][:2]), "compared with float64"
    assert [row["error"] for row in first["rows"]] == [row["error"] for row in second["rows"]]
    assert all(row["median_ms"] >= row["least_ms"] > 0 for row in first["rows"])
    assert first["missing"]["torch"] == "it is measured on GPUs only"
    record = msgspec.convert(first, ParallelRecord)
    assert read_parallel(write_record(tmp_path / "results", record)) == record


def test_the_examples_of_the_page(ranks: Ranks) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 16, 64, 128, dtype=torch.bfloat16) for _ in range(3))
    alone = cases.sdpa(q, k, v, is_causal=True)
    result = results(ranks("4", "examples", "docs/parallel.md"))
    for whole, weights, out in result:
        assert error(whole, alone.double()) < 0.05
        assert np.isfinite(weights).all()
        assert (weights == result[0][1]).all(), "a training step gives all ranks the same parameters"
        assert out.shape == ((256 + 64 + 512) // 4, 16, 128)
        assert np.isfinite(out).all()


@pytest.mark.parametrize(
    ("when", "timeout", "says"),
    [
        ("before", 1.0, "did not answer within 1 s"),
        ("ends", 60.0, "has ended"),
        ("hangs", 1.0, "did not answer within 1 s"),
        ("exchanges", 1.0, "did not answer within 1 s"),
    ],
)
def test_a_rank_that_is_lost_is_named(tmp_path: Any, when: str, timeout: float, says: str) -> None:
    with running(3, tmp_path, ["3"]) as ranks:
        began = time.monotonic()
        result = ranks("3", "die", timeout, when, lost=[1])
        assert time.monotonic() - began < 10
    for one in (result[0], result[2]):
        assert isinstance(one, RuntimeError), one
        assert f"rank 1 of the ranks [0, 1, 2] {says}" in str(one)


def test_a_rank_that_catches_its_error_is_named(tmp_path: Any) -> None:
    """On all ranks, it included, at the latest when the time limit of the exchange is over."""
    kinds = {"3": "varlen", "2 turned": "gradient"}
    with running(3, tmp_path, list(kinds)) as ranks:
        for mesh, kind in kinds.items():
            result = results(ranks(mesh, "catches", kind))
            lost = MESHES[mesh][1]
            for (message,) in result:
                assert f"rank {lost} of the ranks {list(MESHES[mesh])} left a call in the middle" in message, kind
                assert "MemoryError: too little" in message


def test_ranks_that_are_out_of_step_compute_nothing(ranks: Ranks) -> None:
    for message in results(ranks("3", "out_of_step")):
        assert len(message) == 2
        assert all("rank 1 of the ranks [0, 1, 2] left a call in the middle" in one for one in message)


def test_a_store_that_is_lost() -> None:
    def find_lost(closed: bool) -> list[int]:
        raise RuntimeError("Broken pipe")

    group: Any = SimpleNamespace(find_lost=find_lost, ranks=[4, 6], rank=1)
    says = r"rank 6 of the ranks \[4, 6\] lost the store .* Rank 0 or the launcher"
    with pytest.raises(RuntimeError, match=says), _ErrorContext(group):
        raise RuntimeError("Connection reset")


@pytest.mark.parametrize(("call", "lost"), [(4, [8]), (5, [8]), (6, [8]), (3, [7, 8])])
@pytest.mark.parametrize("closed", [True, False])
def test_a_roll_call(call: int, lost: list[int], closed: bool) -> None:
    """A rank can have failed in the call before or after this one; its answer to an older call does not count."""
    group = object.__new__(RankGroup)
    group.store, group.ranks, group.rank, group.calls = torch._C._distributed_c10d.HashStore(), [7, 8, 9], 2, 5
    group.timeout, group.since = 0.1, time.monotonic()
    group.store.set("here/0", str(call))
    assert group.find_lost(closed) == lost


def test_the_store_outlives_its_readers() -> None:
    """A rank that has found the lost ranks does not end before the others have found them too."""
    store = torch._C._distributed_c10d.HashStore()
    group = object.__new__(RankGroup)
    group.store, group.ranks, group.rank, group.calls, group.timeout = store, [7, 8, 9], 2, 5, 20.0
    reader = threading.Timer(0.3, lambda: store.set("read/0", "5"))
    reader.start()
    began = time.monotonic()
    group.wait_for_readers([8])
    assert 0.2 < time.monotonic() - began < 2.0
    assert store.get("read/2") == b"5"


@pytest.mark.parametrize(("backend", "limits"), [("gloo", [timedelta(seconds=3)]), ("nccl", [])])
def test_the_host_waits_with_a_limit_where_gloo_exchanges(backend: str, limits: list[timedelta]) -> None:
    """On CUDA tensors too: without one it would wait for half an hour."""
    group = object.__new__(RankGroup)
    group.timeout = 3.0
    group.process_group = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(name=lambda: backend))
    work = Mock()
    group.wait(torch.empty(1, device="meta"), work)
    assert list(work.wait.call_args.args) == limits


def test_nothing_is_left_to_pytorch(ranks: Ranks) -> None:
    """PyTorch would silently attend to one rank's rows."""
    for own, result, taken, refused in results(ranks("2", "left_to_pytorch", given(256))):
        assert np.array_equal(own, result)
        assert taken == 1
        assert [message.partition(":")[0] for message in refused] == ["attn_mask", "dropout_p", "scale", "query"]


def test_placements_of_other_numbers_or_rows_are_refused(ranks: Ranks) -> None:
    for refused in results(ranks("4", "placed")):
        assert len(refused) == 7
        assert all("query: a DTensor placed" in message for message in refused[:4])
        assert all("load_balance=False" in refused[i] for i in (4, 6))
        assert "query (Shard(dim=0), Shard(dim=2)), key (Replicate(), Shard(dim=2))" in refused[5]


def test_dtensors_of_uneven_parts_and_of_other_dimensions(ranks: Ranks) -> None:
    """Outputs, log-sum-exps and gradients have the global shape and the global order of batches and heads."""
    for result in results(ranks("4", "dtensors")):
        assert len(result) == len(cases.PLACED)
        for (shape, kv_shape, *_, shared), (mine, wanted) in zip(cases.PLACED, result, strict=True):
            if shape == (1, 9, 32, 64):
                assert "key: a DTensor of 3 heads, sharded so that some rank has the query heads 0 to 4" in mine
                continue
            assert not isinstance(mine, str), mine
            for name, one, other in zip(("out", "lse", *"qkv"), mine, wanted, strict=True):
                assert one.shape == other.shape, (shape, kv_shape, shared, name)
                assert np.allclose(one, other, atol=0.1, rtol=0.05), (shape, kv_shape, shared, name)


def test_dtensors_of_other_parts_than_the_others_are_refused(ranks: Ranks) -> None:
    says = (
        "the query heads 0 to 5 and the heads 0 to 1 of key, where 4 query heads share one (query 12, key 3, value 3)",
        "the query heads 0 to 2 and the heads 0 to 1 of key, where 2 query heads share one",
        "value: a DTensor of 1 heads, sharded so that some rank has the query heads 0 to 2",
        "sharded along dimension -3, in which their sizes differ (query 4, key 2, value 2)",
        "sharded along dimension -3, in which their sizes differ (query 2, key 1, value 1)",
        "sharded along dimension -4, in which their sizes differ (query 4, key 2, value 2)",
        "query: a DTensor sharded by batch or heads, beside a plain tensor",
        "on the ranks of the context it must be Shard(2)",
        "query: a DTensor of 65 rows on 2 ranks",
        "on the ranks of the context it must be Shard(2)",
        "q: a DTensor; a plain tensor is needed: pass its to_local()",
        "tensor: a DTensor; a plain tensor is needed: distribute_tensor()",
        "tensor: a DTensor; a plain tensor is needed: its full_tensor()",
    )
    for refused in results(ranks("4", "unlike")):
        assert len(refused) == len(says)
        for message, text in zip(refused, says, strict=True):
            assert text in message


def test_an_error_on_all_ranks_leaves_them_in_step(ranks: Ranks) -> None:
    for result in results(ranks("3", "raised_on_all")):
        assert result == ["in attend", "in _attend"]


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_autocast(ranks: Ranks, method: str) -> None:
    for (dtype, *mine), (_, *wanted) in results(ranks("2", "under_autocast", method)):
        assert dtype == "torch.bfloat16", "as outside"
        for one, other in zip(mine, wanted, strict=True):
            assert np.array_equal(one, other)


@pytest.mark.parametrize("mesh", ["1", "3"])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_nothing_to_compute(ranks: Ranks, mesh: str, method: str) -> None:
    for result in results(ranks(mesh, "nothing", method)):
        assert result == [True] * 5, "no queries, keys, batches, heads, tokens"


@pytest.mark.parametrize("mesh", ["2", "3"])
def test_the_layout_is_pytorchs(ranks: Ranks, mesh: str) -> None:
    for result in results(ranks(mesh, "layout")):
        assert result == [True] * 3


def test_a_mesh_of_one(ranks: Ranks) -> None:
    assert results(ranks("1", "alone")) == [[True] * 3]


def test_explanations_and_order(ranks: Ranks) -> None:
    for ring, masked, left, order, functional in results(ranks("2", "other_calls")):
        assert ring == "ring: ring was requested"
        assert masked.startswith("torch: attn_mask:")
        assert left == "context_parallel: left, but not entered"
        assert order
        assert functional


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"timeout": float("nan")}, "timeout: nan; seconds above 0"),
        ({"timeout": -1}, "timeout: -1"),
        ({"timeout": "soon"}, "timeout: 'soon'"),
        ({"method": "tree"}, "method: 'tree'; allowed are 'auto', 'ring', 'ulysses'"),
    ],
)
def test_arguments(ranks: Ranks, options: dict[str, Any], says: str) -> None:
    (result,) = ranks("1", "construct", options)
    assert isinstance(result, TypeError | ValueError)
    assert says in str(result)
