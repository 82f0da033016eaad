"""benchmarks/continuous_batching.py, on the CPU with models of a few thousand weights."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

benchmark: Any = importlib.import_module("benchmarks.continuous_batching")
paged: Any = importlib.import_module("transformers.generation.continuous_batching.cache")


@pytest.fixture(autouse=True)
def no_search_for_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the garbage collection that transformers runs at the end: with many tests it takes most of the time."""
    monkeypatch.setattr("gc.collect", lambda *_: 0)


@pytest.mark.parametrize(("model", "layers"), [("llama", 2), pytest.param("gemma", 6, marks=pytest.mark.slow)])
def test_it_runs_a_model_with_both_attentions(
    model: str, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(paged, "get_device_and_memory_breakdown", lambda: (torch.device("cpu"), 1 << 33, 0, 0))
    file = tmp_path / "runs.json"
    small = "--small --requests 3 --longest 60 --new 3 --profiled-new 1 --batch-tokens 64 --page-size 16 --device cpu"
    options = ["--model", model, "--layers", str(layers), "--json", str(file)]
    runs = benchmark.main([*small.split(), *options])
    assert [(x.model, x.attention) for x in runs] == [(model, "paged|sdpa"), (model, "paged|greenfast")]
    assert all(0 <= x.logprob_error < 0.5 and 0.5 < x.agreement <= 1 and x.same_tokens <= 1 for x in runs)
    assert runs[0].same_tokens == 1
    assert all(x.new_tokens == 9 and x.tokens_per_s == 9 / x.seconds for x in runs)
    record = json.loads(file.read_text())
    assert [x["tokens_per_s"] for x in record["runs"]] == [x.tokens_per_s for x in runs]
    assert (record["settings"]["longest"], record["device"]) == (60, None)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_prompts_are_drawn_alike() -> None:
    few, again = (benchmark.draw_prompts(3, 100, 50) for _ in range(2))
    assert few == again
    assert all(12 <= len(x) <= 100 and set(x) <= set(range(1, 50)) for x in few)
