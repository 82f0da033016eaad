"""``greenfast completion``: the scripts are valid and complete verbs, options and choices."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from greenfast.cli.options import VERBS
from tests.cli.command_line import run_here

pytestmark = pytest.mark.skipif(
    find_spec("shtab") is None and "CI" not in os.environ, reason="needs shtab, a package of every installation"
)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_has_every_verb_and_the_shell_accepts_it(
    capsys: pytest.CaptureFixture[str], shell: str, tmp_path: Path
) -> None:
    ran = run_here(capsys, "completion", shell)
    assert (ran.code, ran.err) == (0, "")
    assert [verb for verb in VERBS if verb not in ran.out] == []
    as_json = json.loads(run_here(capsys, "completion", shell, "--json").out)
    assert as_json == {"shell": shell, "script": ran.out.removesuffix("\n")}
    if shutil.which(shell):
        script = tmp_path / "script"
        script.write_text(ran.out)
        assert subprocess.run([shell, "-n", script], check=False).returncode == 0


def test_bash_completes_verbs_options_and_choices(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(run_here(capsys, "completion", "bash").out)

    def complete(*words: str) -> list[str]:
        line = " ".join(f"'{word}'" for word in words)
        code = f"""source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}
        $(complete -p greenfast | sed 's/.*-F \\([^ ]*\\).*/\\1/') greenfast '{words[-1]}' '{words[-2]}'
        printf '%s\\n' "${{COMPREPLY[@]}}" """
        return subprocess.check_output(["bash", "-c", code], text=True).split()

    assert complete("greenfast", "ju") == ["judge"]
    assert "--speedup" in complete("greenfast", "judge", "--sp")
    assert complete("greenfast", "init", "--language", "t") == ["triton"]
