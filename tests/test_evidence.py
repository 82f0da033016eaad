"""What README.md and docs/ say agrees with the records under evidence/ and with the code."""

from __future__ import annotations

import json
import re
import shutil
import sys
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks import backward, backward_speed
from benchmarks.freshness import current_part, freshness
from benchmarks.masks import render_skipping, render_table
from benchmarks.pictures import operator_series
from benchmarks.records import AnyRecord, Benchmark, read_benchmark, read_record
from benchmarks.report import section
from greenfast.cli.options import VERBS
from greenfast.judge.gates.registry import GATES
from greenfast.judge.record_io import FIELD, INDEX, read_content, read_index
from greenfast.judge.record_schema import Record, Side
from greenfast.judge.store import to_json
from greenfast.judge.task import find_task
from greenfast.spec.arch import TARGETS
from greenfast.spec.errors import UsageError
from greenfast.spec.facts import LaunchFacts
from greenfast.spec.freshness import Freshness
from scripts import refresh_hashes, update_results
from scripts.update_results import blocks, evidence, fill, generated, kept_files
from tests.benchmarks.benchmarks import peers_record
from tests.judge.report.records import DIMS, record, side

ROOT = Path(__file__).parents[1]
RESULTS = update_results.RESULTS_PAGE
FOLDERS = [file.parent.relative_to(ROOT).as_posix() for file in sorted((ROOT / "evidence").glob("*/*/record.json"))]
EACH_RECORD = pytest.mark.parametrize(
    "folder", FOLDERS or [pytest.param("", marks=pytest.mark.skip(reason="evidence/ holds no records yet"))]
)


def quoted(text: str) -> set[str]:
    """The folders of the records that a text quotes: a line that links one quotes it, unless it says it is stale."""
    lines = [line for line in text.splitlines() if not re.search(r"\bstale\b", line)]
    return {found for line in lines for found in re.findall(r"evidence/[\w.-]+/[\w-][\w.-]*[\w-]", line)}


def all_quoted() -> set[str]:
    return {found for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")) for found in quoted(page.read_text())}


@cache
def read(folder: str) -> AnyRecord:
    """A record of this repository; checking that its conclusions follow takes long."""
    return read_record(ROOT / folder)


def test_pages_are_those_that_the_records_make_and_comparisons_are_current_or_shown_as_stale() -> None:
    """In one test, thus in one process, as both look at every kernel of every record."""
    files = generated(ROOT)
    names = ("README", "PICTURE", "RESULTS_PAGE", "EMULATOR_PAGE")
    compared = [page for page, _, record in update_results.COMPARED if (ROOT / record).is_file()]
    assert "docs/operator-times.md" in compared
    for page in (ROOT / name for name in (*(getattr(update_results, name) for name in names), *compared)):
        assert page.read_text(encoding="utf-8") == files[page], "run python -m scripts.update_results"
    for page, _, path in update_results.COMPARED:
        if (ROOT / path).is_file():
            record, text = read_benchmark(ROOT / path), (ROOT / page).read_text()
            answer = freshness(record)
            left_out = ", ".join(current_part(record)[1]) if record.comparison == "serving" else ""
            said = (f"({'../' + path}) is stale" in text) or (left_out and f"have changed since: {left_out};" in text)
            if answer.status != "stale" or not said:
                require_current(answer)


def test_every_quoted_record_is_there() -> None:
    runs = [f for name in ("manifest.json", "again.json") for f in (ROOT / "evidence").glob(f"*/*/{name}")]
    searches = {file.parent.relative_to(ROOT).as_posix() for file in runs}
    files = {found for found in all_quoted() if (ROOT / found).is_file()}  # single files, such as those of tilings
    assert all_quoted() <= {*FOLDERS, *searches, *files}


@EACH_RECORD
def test_a_quoted_record_is_current(folder: str) -> None:
    if folder in all_quoted():
        require_current(freshness(read(folder)))


def require_current(answer: Freshness) -> None:
    if answer.other_compiler:
        pytest.skip(str(answer))
    assert answer.status == "current", f"{answer}: measure it again, or quote it no more"


@EACH_RECORD
def test_a_record_with_timings_is_correct(folder: str) -> None:
    one = read(folder)
    sides = [side for _, side in one.sides()]
    if any(s.timing for s in sides):
        assert one.gate_status("CORRECTNESS") == "PASS"
        for s in sides:
            checked = {(row.shape, row.seed) for row in s.correctness if row.passed}
            assert {(row.shape, row.seed) for row in s.timing} <= checked


@EACH_RECORD
def test_a_record_says_what_is_needed_to_repeat_it(folder: str) -> None:
    one = read(folder)
    assert one.command.startswith("greenfast ")
    assert one.git.sha != "unknown"
    assert one.device is None or one.device.kind == "gpu"


def test_the_evidence_is_in_the_form_of_kept_records() -> None:
    files = kept_files(ROOT)
    assert [p for p, text in files.items() if p.read_text(encoding="utf-8") != text] == [], "run update_results.py"


def test_no_identity_is_outside_the_index() -> None:
    files = [file for file in (ROOT / "evidence").rglob("*.json") if file.name != INDEX]
    text = {file: file.read_text(encoding="utf-8") for file in files}
    assert [f"{file}: {name}" for file in files for name in ("kernel_hash", "code_hash") if name in text[file]] == []
    held = {file.relative_to(ROOT / "evidence").as_posix() for file in files if f'"{FIELD}": ' in text[file]}
    assert held == set(read_index(ROOT / "evidence" / INDEX))


def test_the_evidence_is_small() -> None:
    """So that readers and searches of this repository meet its code."""
    content = [file.read_bytes() for file in (ROOT / "evidence").rglob("*") if file.is_file()]
    assert sum(map(len, content)) <= 4_000_000
    assert sum(one.count(b"\n") for one in content) <= 40_000


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("verbs", [f"`greenfast {verb}" for verb in VERBS]),
        (
            "exit codes",
            [
                *(f"| {code} |" for code in (*range(7), 130)),
                *(f"| {one.exit_code} | {name} |" for name, one in GATES.items()),
            ],
        ),
        ("targets", [f"`{target}`" for target in TARGETS]),
        ("toggles", [f"`{name}`" for name in find_task("fp8_sdpa").config.toggles]),
        ("variables", ["`GREENFAST_CACHE_DIR`", "`GREENFAST_TASKS`", "`GREENFAST_GIT_SHA`", "`TORCH_CUDA_ARCH_LIST`"]),
    ],
)
def test_the_reference_names_them_all(what: str, names: list[str]) -> None:
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert [name for name in names if name not in text] == []


def test_the_reference_names_every_variable_that_the_package_reads() -> None:
    found = {
        name
        for file in (ROOT / "src").rglob("*.py")
        for name in re.findall(r'"((?:GREENFAST|CUDA|TORCH|XDG)_[A-Z_]+)"', file.read_text(encoding="utf-8"))
        if not name.startswith("CUDA_ERROR")
    }
    assert "GREENFAST_CACHE_DIR" in found
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert [name for name in sorted(found) if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    "page",
    ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))],
)
def test_every_link_to_a_file_leads_to_one(page: str) -> None:
    text = re.sub(r"(?ms)^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"))  # launches look like links
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []


def test_the_comparison_of_emulator_and_gpu_is_of_todays_kernels() -> None:
    rows = read_content(ROOT / refresh_hashes.EMULATED)["rows"]
    assert {row["variant"] for row in rows} == {rung.name for rung in find_task("fp8_sdpa").config.rungs}
    require_current(refresh_hashes.renew_emulated(rows))


def test_the_readme_states_the_measured_errors() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\n", " ")
    record = read_benchmark(ROOT / update_results.OPERATOR_RECORD)
    rows = [row for row in record.accuracy if row.inputs == "normal"]
    fp8, int8, bf16 = (
        max(row.error or 0.0 for row in rows if row.backend == name)
        for name in ("sdpa_fp8", "sdpa_int8", "torch_cudnn")
    )
    assert f'error of {fp8:.1%} ({int8:.1%} with `precision="int8"`), where bfloat16 has {bf16:.1%}.' == next(
        iter(re.findall(r"error of .*? has [\d.]+ ?%\.", text)), ""
    ).replace(" %", "%")


def table_column(page: str, marker: str, heading: str) -> list[str]:
    """Return a column of the table between the markers of a page; other tests compare the table with its record."""
    block = (ROOT / page).read_text(encoding="utf-8").split(f"<!-- {marker}:begin -->")[1].split("<!-- ")[0]
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines() if line.startswith("|")
    ]
    return [row[header.index(heading)] for row in rows]


def test_sentences_quote_their_tables() -> None:
    ideal = [float(cell) for cell in table_column("docs/masks-times.md", "masks", "of the ideal speedup")]
    thresholds = table_column("docs/masks-times.md", "skipping", "threshold")
    speedups = table_column("docs/masks-times.md", "skipping", "speedup")
    low, high = (sorted(s for s, t in zip(speedups, thresholds, strict=True) if t == at) for at in ("0.001", "0.01"))
    layers = [
        table_column("docs/models.md", "block-models", heading) for heading in ("model", "attention", "tokens", "speed")
    ]
    used = {
        model: (tokens, f"{float(speed[:-1]):.2f}")
        for model, kind, tokens, speed in zip(*layers, strict=True)
        if kind == "fp8"
    }
    (flux, slowest), (llama, fastest) = used["flux, compiled"], used["llama, compiled"]
    assert (slowest, fastest) == (min(s for _, s in used.values()), max(s for _, s in used.values()))
    for page, quoted in (
        ("docs/masks.md", f"from {min(ideal):.2f} to {max(ideal):.2f} of the ideal speedup"),
        ("docs/masks.md", f"at a speedup of {low[0]} to {low[-1]} and"),
        ("docs/masks.md", f"at {high[0]} to {high[-1]} and"),
        ("README.md", f"from {slowest}x (Flux, {flux} tokens) to {fastest}x (Llama, {llama};"),
    ):
        assert quoted in " ".join((ROOT / page).read_text(encoding="utf-8").split()), page


def test_every_rung_has_a_section_in_the_ladder() -> None:
    text = (ROOT / "docs" / "ladder-rungs.md").read_text(encoding="utf-8")
    for rung in find_task("fp8_sdpa").config.rungs:
        assert re.search(rf"^## .*`{rung.name}`", text, re.MULTILINE), rung.name


# The script itself, on records made up here.


def tree(root: Path, *records: tuple[str, AnyRecord]) -> Path:
    for folder, one in records:
        (root / "evidence" / folder).mkdir(parents=True)
        (root / "evidence" / folder / "record.json").write_text(to_json(one))
    (root / "docs").mkdir()
    marked = {RESULTS: ("verdicts", "peers", "example"), "README.md": ("speed",)}
    for page, names in marked.items():
        text = "".join(f"{name}\n<!-- {name}:begin -->\n<!-- {name}:end -->\n" for name in names)
        (root / page).write_text(text)
    return root


def launched(one: Side) -> Side:
    """Return the results with a launch of each kernel, by which a record is found to be stale."""
    facts = LaunchFacts(
        dims=DIMS["mission"],
        grid=(8, 4, 1),
        block=(128, 1, 1),
        dynamic_smem_bytes=0,
        cluster=(1, 1, 1),
        early=False,
        arguments="",
    )
    return replace(one, builds=[replace(build, launches={"mission": facts}) for build in one.builds])


def rung(candidate: str, baseline: str, fmt: str = "e4m3", task: str = "fp8_sdpa") -> Record:
    candidate_side, baseline_side = (
        launched(side(name, p50_us=1, registers=1, smem=1, scale=1, hmma=1)) for name in (candidate, baseline)
    )
    return record(candidate=candidate_side, baseline=baseline_side, format=fmt, task=task)


@pytest.mark.usefixtures("made_up_records")
def test_records_stand_by_task_format_and_rung(tmp_path: Path) -> None:
    made = tree(
        tmp_path,
        ("h100/a", rung("stage3a", "stage2")),
        ("h100/b", rung("stage2", "scalar")),
        ("h100/c", rung("USE_CP_ASYNC=1", "stage2")),
        ("h100/d", rung("stage2", "stage1", "int8")),
        ("h100/e", rung("stage2", "stage1")),
        ("h100/f", rung("quantize_vector", "quantize_scalar", task="fp8_quantize")),
        ("h100/g", rung("some", "thing", task="no_more")),
        ("a100/h", rung("stage3a", "stage2")),
    )
    assert [folder[-1] for folder, _ in evidence(made)] == ["h", "e", "b", "a", "c", "d", "f", "g"]


@pytest.mark.usefixtures("made_up_records")
def test_a_stale_record_is_shown_without_a_number_and_is_no_example(tmp_path: Path) -> None:
    made = blocks(evidence(tree(tmp_path, ("h100/stage2-e4m3", rung("stage2", "stage1")))))
    (line,) = [line for line in made["verdicts"].splitlines() if "(../evidence/h100/stage2-e4m3)" in line]
    assert re.findall(r"\d\.\d", line) == []
    assert "| stale |" in line
    assert quoted(made["verdicts"]) == set()
    assert made["example"] == ""


@pytest.mark.usefixtures("made_up_records")
def test_a_current_record_is_shown_quoted_and_an_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_results, "freshness", lambda record: Freshness())
    made = blocks(evidence(tree(tmp_path, ("h100/stage2-e4m3", rung("stage2", "stage1")))))
    assert "[stage2-e4m3](../evidence/h100/stage2-e4m3)" in made["verdicts"]
    assert quoted(made["verdicts"]) == {"evidence/h100/stage2-e4m3"}
    assert made["example"].startswith("```text\n$ greenfast judge")


@pytest.mark.usefixtures("made_up_records")
def test_the_comparison_with_peers_is_a_section_once_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up = peers_record()
    assert made_up.side is not None
    root = tree(tmp_path, ("h100/peers", replace(made_up, side=launched(made_up.side))))
    assert "stale" in blocks(evidence(root))["peers"]  # its kernel never was
    assert quoted(blocks(evidence(root))["peers"]) == set()
    monkeypatch.setattr(update_results, "freshness", lambda record: Freshness())
    ((_, read),) = evidence(root)
    made = blocks([("evidence/h100/peers", read)])
    assert isinstance(read, Benchmark)
    heading, _, rest = made["peers"].partition("\n\n")
    assert heading == "## Compared with other libraries"
    assert rest == section(read, "../evidence/h100/peers")
    assert quoted(made["peers"]) == {"evidence/h100/peers"}
    assert (made["verdicts"], made["example"]) == ("", "")
    assert made["peers"] in generated(root)[root / RESULTS]


@pytest.mark.usefixtures("made_up_records")
def test_the_readme_gets_its_table_and_its_picture_once_both_records_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree(tmp_path, ("h200/peers", peers_record()))
    page, picture = root / "README.md", root / update_results.PICTURE
    assert not {page, picture} & set(generated(root))
    for name in (update_results.OPERATOR_RECORD, "evidence/index.json"):
        shutil.copy(ROOT / name, root / name)
    (root / update_results.COMPARED[0][0]).write_text("<!-- operator:begin --> <!-- operator:end -->")
    monkeypatch.setattr(update_results, "freshness", lambda record: Freshness())
    files = generated(root)
    assert "| 4096 | 1.27x / 1.12x | " in files[page]
    assert "have changed" not in files[page]
    assert files[picture].startswith("<?xml")
    picture.parent.mkdir()
    picture.write_text(files[picture] + "<!-- of another matplotlib -->")
    assert generated(root)[picture] == picture.read_text()  # its numbers are those
    monkeypatch.setattr(update_results, "freshness", lambda record: Freshness("stale", ("other code",)))
    assert "have changed since these numbers, or the ones in the picture, were measured" in generated(root)[page]
    monkeypatch.setattr("benchmarks.pictures._HEAD_DIM", 64)
    assert generated(root)[picture] != picture.read_text()


def test_the_picture_is_small_and_says_where_it_was_measured() -> None:
    text = (ROOT / update_results.PICTURE).read_text()
    assert len(text) < 100_000
    operator = read_benchmark(ROOT / update_results.OPERATOR_RECORD)
    assert operator_series(operator)["greenfast FP8"].keys() == {512, 1024, 2048, 4096, 16384}
    assert "quantization included" in text  # matplotlib keeps each text as a comment


def test_the_page_of_the_emulator_gets_the_table_of_its_record(tmp_path: Path) -> None:
    root = tree(tmp_path)
    page, measured = root / update_results.EMULATOR_PAGE, root / update_results.EMULATOR_RECORD
    page.write_text("before <!-- counts:begin --> <!-- counts:end --> after")
    assert page not in generated(root)
    measured.parent.mkdir()
    row = {"variant": "v", "shape": "s", "emulated": {}, "hardware": {"smsp__inst_executed.sum": "7"}}
    measured.write_text(json.dumps({"device": {"name": "GPU"}, "rows": [row]}))
    assert "| v | s | warp instructions: PTX, machine code | - | 7 | - |" in generated(root)[page]
    page.write_text("")
    with pytest.raises(UsageError, match=r"docs/emulator-details\.md: .*must each occur once"):
        generated(root)


def test_no_records_leave_the_blocks_empty(tmp_path: Path) -> None:
    root = tree(tmp_path)
    assert generated(root) == {root / RESULTS: (root / RESULTS).read_text()}


@pytest.mark.usefixtures("made_up_records")
def test_check_changes_nothing_and_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tree(tmp_path, ("h100/one", rung("stage2", "stage1")))
    monkeypatch.setattr(update_results, "ROOT", root)

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["update_results.py", *arguments])
        return update_results.main()

    before = (root / RESULTS).read_text()
    assert run("--check") == 1
    told = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in told] == ["evidence/h100/one/record.json", "evidence/index.json", RESULTS]
    assert (root / RESULTS).read_text() == before
    assert run() == 0
    assert "| stage2 | stage1 |" in (root / RESULTS).read_text()
    assert (root / "evidence/index.json").read_text().startswith('{\n "h100/one/record.json": {')
    assert run("--check") == 0
    (root / "evidence/h100/one/record.json").write_text("{}")
    assert run("--check") == 2
    assert "record.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "<!-- a:begin -->", "<!-- a:end --><!-- a:begin -->", "<!-- a:begin --><!-- a:begin --><!-- a:end -->"]
)
def test_markers_that_do_not_stand_there_once_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="must each occur once"):
        fill(text, "a", "b", "page.md")


def test_filling_twice_is_filling_once() -> None:
    once = fill("x <!-- a:begin --> old <!-- a:end --> y", "a", "new", "page.md")
    assert once == "x <!-- a:begin -->\n\nnew\n\n<!-- a:end --> y"
    assert fill(once, "a", "new", "page.md") == once


def test_the_table_of_masks_is_the_records() -> None:
    record = read_content(ROOT / "evidence/masks-h200.json")
    page = (ROOT / "docs/masks-times.md").read_text(encoding="utf-8")
    for name, render in (("masks", render_table), ("skipping", render_skipping)):
        block = page.split(f"<!-- {name}:begin -->")[1].split(f"<!-- {name}:end -->")[0]
        assert block.strip() == render(record["times"])


def test_the_tables_of_backward_passes_are_the_records() -> None:
    record = read_content(ROOT / "evidence/backward-errors.json")
    page = (ROOT / "docs/training-errors.md").read_text(encoding="utf-8")
    errors = [backward.GradientErrors(**row) for row in record["errors"]]
    losses = backward.render_losses([backward.TrainingLoss(**row) for row in record["losses"]])
    tables = {
        "products": backward.render_products(errors), "recipes": backward.render_recipes(errors), "losses": losses,
    }  # fmt: skip
    for name, rendered in tables.items():
        assert page.split(f"<!-- {name}:begin -->")[1].split(f"<!-- {name}:end -->")[0].strip() == rendered


def test_the_table_of_the_backward_pass_is_its_record() -> None:
    record = read_content(ROOT / "evidence/backward-speed-h200.json")
    pages = [(ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("training", "training-kernels")]
    rows, masked = record["rows"], record["masked"]
    tables = {
        "speed": backward_speed.render_times(rows), "modes": backward_speed.render_modes(rows),
        "masked": backward_speed.render_masked_times(masked),
    }  # fmt: skip
    for name, rendered in tables.items():
        _, *found = "".join(pages).split(f"<!-- {name}:begin -->")
        assert [x.split(f"<!-- {name}:end -->")[0].strip() for x in found] == [rendered]


def test_the_table_of_packed_sequences_is_its_record() -> None:
    record = read_content(ROOT / "evidence/varlen-h100.json")
    page = (ROOT / "docs/operator-times.md").read_text(encoding="utf-8")
    block = page.split("<!-- varlen:begin -->")[1].split("<!-- varlen:end -->")[0]
    found = [line.strip("| ").split(" | ") for line in block.splitlines() if line[:1] == "|" and line[2:3].isdigit()]
    expected = []
    for row in record["times"]:
        us, (heads, kv_heads, head_dim) = row["us"], row["heads"]
        mask = "causal" if row["causal"] else "full"
        own = us["varlen_attn"]
        compared = [
            f"{us[name] / own:.2f}x" if name in us else "-" for name in ("sdpa", "FA3 bf16", "torch flash bf16")
        ]
        expected.append([f"{heads}:{kv_heads}, {head_dim}", row["lengths"], mask, f"{own:.0f}", *compared])
    for row, error in zip(record["windows"], record["errors"], strict=True):
        us, (heads, kv_heads, head_dim) = row["us"], row["heads"]
        numbers = [f"{us[name]:.0f}" for name in ("causal", "4096", "1024")]
        expected.append([f"{heads}:{kv_heads}, {head_dim}", *numbers, f"{error['error']:.3f}"])
    assert found == expected


def test_the_table_of_token_scales_is_its_record() -> None:
    record = read_content(ROOT / "evidence/token-scales-h100.json")
    page = (ROOT / "docs/operator-times.md").read_text()
    block = page.split("<!-- token-scales:begin -->")[1].split("<!-- token-scales:end -->")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines() if line.startswith("|")
    ]
    expected = []
    for row in record["times"]:
        (batch, heads, kv_heads, length, head_dim), us = row["shape"], row["us"]
        torch_us = min(us["torch cuDNN bf16"], us["torch flash bf16"])
        numbers = [f"{us[name]:.0f}" for name in ("fp8", "fp8_token")]
        ratios = [f"{us['fp8_token'] / us['fp8']:.2f}x", f"{torch_us / us['fp8_token']:.2f}x"]
        expected.append([f"{batch}, {heads}:{kv_heads}, {length}, {head_dim}", *numbers, f"{torch_us:.0f}", *ratios])
    for row in record["errors"]:
        if row["head_dim"] == 128:
            errors = row["errors"]
            expected.append([row["inputs"], *(f"{errors[name]:.3f}" for name in ("fp8", "int8_fine", "fp8_token"))])
    assert [row for row in rows if row in expected] == expected
