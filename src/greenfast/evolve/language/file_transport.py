"""Models that are files: a mailbox that a person or any tool answers, and recorded answers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from greenfast.evolve.jsonl import read_lines
from greenfast.evolve.language.model import AnswerLimits, Model, ModelAnswer, estimated_tokens, prompt_digest
from greenfast.evolve.proposal import ProposerError
from greenfast.judge.store import check_writable, write_whole
from greenfast.spec.errors import MachineError

_POLL = 0.5  # seconds


class FileTransport:
    """Prompts as ``NUMBER-DIGEST.prompt.md`` in a folder, answers as ``NUMBER-DIGEST.answer.md`` beside them.

    An answer should be moved into the folder whole; one that is still growing is waited for. A prompt that lies there
    already, as after an interrupted run, is not written again.
    """

    def __init__(self, folder: Path, sleep: Callable[[float], None] = time.sleep) -> None:
        """Raises MachineError where the folder cannot be written. sleep: between looks, seconds."""
        check_writable(folder, "mailbox:FOLDER")
        self._folder, self._sleep = folder, sleep

    def complete(self, prompt: str, limits: AnswerLimits) -> ModelAnswer:
        """Write the prompt and wait for its answer."""
        asked = self._prompt_file(prompt)
        file = asked.with_name(asked.name.replace(".prompt.md", ".answer.md"))
        end = time.monotonic() + limits.seconds
        size = -1
        while True:
            found = file.stat().st_size if file.is_file() else -1
            if found > limits.most_bytes:
                raise ProposerError(f"{file}: {found} bytes; an answer has at most {limits.most_bytes}")
            if found > 0 and found == size:
                try:
                    text = file.read_bytes().decode("utf-8", "replace")
                except OSError as e:
                    raise ProposerError(f"{file}: cannot be read ({e.strerror})") from e
                return ModelAnswer(text=text, tokens=estimated_tokens(prompt, text))
            if time.monotonic() > end:
                raise ProposerError(f"{asked}: no {file.name} after {limits.seconds:g} s; write it and resume the run")
            size = found
            self._sleep(_POLL)

    def _prompt_file(self, prompt: str) -> Path:
        digest = prompt_digest(prompt)
        for known in sorted(self._folder.glob(f"*-{digest}.prompt.md")):
            return known
        number = len(list(self._folder.glob("*.prompt.md"))) + 1
        path = self._folder / f"{number:04}-{digest}.prompt.md"
        write_whole(path, prompt)
        return path


class RecordedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded answer. prompt: its digest; empty where it answers whatever comes next."""

    answer: str
    prompt: str = ""
    tokens: int = 0


class Replay:
    """Recorded answers: to a prompt that was recorded its own, to any other the next of those without a prompt.

    A recording by ``Recorder`` survives that a run is resumed; answers without a prompt begin again then.
    """

    def __init__(self, file: Path) -> None:
        """Read the file, an Exchange on each line. Raises UsageError that names the line that holds none."""
        self._file = file
        rows = read_lines(file, RecordedAnswer, "recorded answer")
        self._known: dict[str, deque[RecordedAnswer]] = {}
        for row in rows:
            self._known.setdefault(row.prompt, deque()).append(row)

    def complete(self, prompt: str, limits: AnswerLimits) -> ModelAnswer:
        """The recorded answer. Raises ProposerError where there is none."""
        rows = self._known.get(prompt_digest(prompt)) or self._known.get("")
        if not rows:
            raise ProposerError(f"{self._file}: no answer to prompt {prompt_digest(prompt)} is left in it")
        row = rows.popleft()
        return ModelAnswer(text=row.answer, tokens=row.tokens or estimated_tokens(prompt, row.answer))


class Recorder:
    """Another model whose answers are appended to a file that ``Replay`` reads."""

    def __init__(self, model: Model, file: Path) -> None:
        """Raises MachineError where the file's folder cannot be written."""
        check_writable(file.parent, "record=FILE")
        self._model, self._file = model, file

    def complete(self, prompt: str, limits: AnswerLimits) -> ModelAnswer:
        """The other model's answer."""
        answer = self._model.complete(prompt, limits)
        row = RecordedAnswer(prompt=prompt_digest(prompt), answer=answer.text, tokens=answer.tokens)
        try:
            with self._file.open("ab") as file:
                file.write(msgspec.json.encode(row) + b"\n")
        except OSError as e:
            raise MachineError(f"{self._file} cannot be written ({e.strerror})") from e
        return answer
