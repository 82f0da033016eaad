"""Models backed by files: prompts that a person or a tool answers in a folder, and recorded answers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from greenfast.evolve.jsonl import read_lines
from greenfast.evolve.language.model import AnswerLimits, Model, ModelAnswer, estimate_tokens, prompt_digest
from greenfast.evolve.proposal import ProposerError
from greenfast.judge.store import check_writable, write_whole
from greenfast.spec.errors import MachineError

_POLL = 0.5  # seconds


class FileTransport:
    """Writes prompts as ``NUMBER-DIGEST.prompt.md`` and reads answers from ``NUMBER-DIGEST.answer.md`` in one folder.

    An answer should be moved into the folder atomically; a file that still grows is waited for. An existing prompt, as
    after an interrupted run, is not written again.
    """

    def __init__(self, folder: Path, sleep: Callable[[float], None] = time.sleep) -> None:
        """sleep: waits between polls. Raises MachineError if the folder cannot be written."""
        check_writable(folder, "mailbox:FOLDER")
        self._folder, self._sleep = folder, sleep

    def complete(self, prompt: str, limits: AnswerLimits) -> ModelAnswer:
        """Write the prompt and wait for its answer."""
        prompt_file = self._prompt_file(prompt)
        file = prompt_file.with_name(prompt_file.name.replace(".prompt.md", ".answer.md"))
        end = time.monotonic() + limits.seconds
        size = -1
        while True:
            new_size = file.stat().st_size if file.is_file() else -1
            if new_size > limits.max_bytes:
                raise ProposerError(f"{file}: {new_size} bytes; an answer has at most {limits.max_bytes}")
            if new_size > 0 and new_size == size:
                try:
                    text = file.read_bytes().decode("utf-8", "replace")
                except OSError as e:
                    raise ProposerError(f"{file}: cannot be read ({e.strerror})") from e
                return ModelAnswer(text=text, tokens=estimate_tokens(prompt, text))
            if time.monotonic() > end:
                raise ProposerError(
                    f"{prompt_file}: no {file.name} after {limits.seconds:g} s; write it and resume the run"
                )
            size = new_size
            self._sleep(_POLL)

    def _prompt_file(self, prompt: str) -> Path:
        digest = prompt_digest(prompt)
        for existing in sorted(self._folder.glob(f"*-{digest}.prompt.md")):
            return existing
        number = len(list(self._folder.glob("*.prompt.md"))) + 1
        path = self._folder / f"{number:04}-{digest}.prompt.md"
        write_whole(path, prompt)
        return path


class RecordedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded answer. prompt: digest of its prompt; empty for an answer to any prompt."""

    answer: str
    prompt: str = ""
    tokens: int = 0


class Replay:
    """Returns recorded answers: by prompt if the prompt was recorded, else the next answer without a prompt.

    A recording by ``Recorder`` also works for a resumed run. Answers without a prompt start over then.
    """

    def __init__(self, file: Path) -> None:
        """Read the file, one RecordedAnswer per line. Raises UsageError with the number of an invalid line."""
        self._file = file
        rows = read_lines(file, RecordedAnswer, "recorded answer")
        self._known: dict[str, deque[RecordedAnswer]] = {}
        for row in rows:
            self._known.setdefault(row.prompt, deque()).append(row)

    def complete(self, prompt: str, limits: AnswerLimits) -> ModelAnswer:
        """Return the recorded answer. Raises ProposerError if none is left."""
        rows = self._known.get(prompt_digest(prompt)) or self._known.get("")
        if not rows:
            raise ProposerError(f"{self._file}: no answer to prompt {prompt_digest(prompt)} is left in it")
        row = rows.popleft()
        return ModelAnswer(text=row.answer, tokens=row.tokens or estimate_tokens(prompt, row.answer))


class Recorder:
    """Wraps a model and appends its answers to a file for ``Replay``."""

    def __init__(self, model: Model, file: Path) -> None:
        """Raises MachineError if the file's folder cannot be written."""
        check_writable(file.parent, "record=FILE")
        self._model, self._file = model, file

    def complete(self, prompt: str, limits: AnswerLimits) -> ModelAnswer:
        """Return the model's answer, and record it."""
        answer = self._model.complete(prompt, limits)
        row = RecordedAnswer(prompt=prompt_digest(prompt), answer=answer.text, tokens=answer.tokens)
        try:
            with self._file.open("ab") as file:
                file.write(msgspec.json.encode(row) + b"\n")
        except OSError as e:
            raise MachineError(f"{self._file} cannot be written ({e.strerror})") from e
        return answer
