"""benchmarks/models.py, on the CPU with a narrow model."""

from __future__ import annotations

import importlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import greenfast
from greenfast.spec.errors import UsageError

benchmark: Any = importlib.import_module("benchmarks.models")


@pytest.mark.parametrize("model", ["llama", "vit"])
def test_a_model_is_run_with_each_attention(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(benchmark.ATTENTIONS, "fp8", lambda: greenfast.use("fp8", min_length=0))
    file = tmp_path / "models.json"
    command = f"--small --rounds 1 --device cpu --model {model} --attention torch fp8 int8"
    plain, fp8, int8 = benchmark.main([*command.split(), "--json", str(file)])
    assert (plain.taken, fp8.taken, int8.taken) == (0, 2, 0), "short sequences are routed only where that is asked for"
    assert plain.difference == 0.0
    # any mode turns off the fast path of PyTorch's layers; it rounds at other points
    assert 0 < int8.difference < 0.004 if model == "vit" else int8.difference == 0.0
    assert 0.001 < fp8.difference < 0.1
    assert fp8.torch_errors == plain.errors == int8.errors
    assert all(e < 0.005 for e in plain.errors)
    assert all(0.01 < e < 0.08 for e in fp8.errors)
    assert [run["attention"] for run in json.loads(file.read_text())["runs"]] == ["torch", "fp8", "int8"]


def test_the_block_is_a_copy_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    integration = importlib.import_module("greenfast.integrations.transformers")
    monkeypatch.setattr(integration, "accelerate", partial(integration.accelerate, min_length=0))
    command = "--small --rounds 1 --device cpu --model llama --attention torch block"
    plain, block = benchmark.main(command.split())
    assert plain.difference == 0.0
    assert 0.001 < block.difference < 0.1
    assert block.errors == []
    with pytest.raises(UsageError, match="leave out vit"):
        benchmark.main(command.replace("llama", "vit").split())


def test_pytorch_is_what_others_are_compared_with(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(["--attention", "fp8"])
    assert "name it too" in capsys.readouterr().err
