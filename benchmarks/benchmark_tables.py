"""Tables of Markdown from the records of benchmarks/: whole models, and continuous batching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def models_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Milliseconds by model and attention, and the errors of the attention; of benchmarks/models.py."""
    rows = []
    for record in records:
        plain = {run["model"]: run["median_ms"] for run in record["runs"] if run["attention"] == "torch"}
        for run in record["runs"]:
            gain = plain[run["model"]] / run["median_ms"]
            rows.append(
                (run["model"], f"{run['tokens']:,}", run["attention"], f"{run['median_ms']:.2f}", f"{gain:.3f}x",
                 str(run["taken"]), ", ".join(f"{e:.4f}" for e in run["errors"]), f"{run['difference']:.4f}")
            )  # fmt: skip
    header = ("model", "tokens", "attention", "ms", "speed", "calls routed", "errors of attention", "output differs by")
    return _page(header, rows, records)


def batching_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Tokens per second by model and attention; of benchmarks/continuous_batching.py."""
    rows = []
    for record in records:
        for run in record["runs"]:
            rows.append(
                (run["model"], run["attention"], f"{run['requests']} of {run['prompt_tokens']:,} tokens",
                 f"{run['tokens_per_s']:.0f}",
                 f"{run['attention_ms']:.0f} of {run['kernels_ms']:.0f}" if run["kernels_ms"] else "-",
                 f"{run['peak_gib']:.1f}", *(_checked(run) if "agreement" in run else ("-", "-")))
            )  # fmt: skip
    header = (
        "model", "attention", "prompts", "new tokens/s", "ms of attention, of all kernels", "peak GiB",
        "tokens that bf16 would choose", "log-probabilities off by",
    )  # fmt: skip
    return _page(header, rows, records)


def _checked(run: Mapping[str, Any]) -> tuple[str, str]:
    return f"{100 * run['agreement']:.0f} %", f"{run['logprob_error']:.4f}"


def _page(header: Sequence[str], rows: Sequence[Sequence[str]], records: Sequence[Mapping[str, Any]]) -> str:
    """The table, and where each of its records was measured."""
    return "\n\n".join([_table(header, rows), *dict.fromkeys(map(_source, records))])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(x.replace("|", r"\|") for x in row) + " |" for row in rows)])


def _source(record: Mapping[str, Any]) -> str:
    versions = ", ".join(
        f"{name} {record['environment'][name]}"
        for name in ("torch", "diffusers", "transformers")
        if name in record["environment"]
    )
    return f"Measured on {record['device']['name']}; commit {record['git']['sha'][:10]}; {versions}."
