"""Language models: text in, text out, within limits. One is behind an endpoint, the other is a folder of files.

The client is httpx2, the maintained continuation of httpx; huggingface_hub already depends on it. One POST needs no
vendor package. Retries are implemented here, because neither a client's retries nor a retry library supports a deadline
over the whole answer and a limit of its size.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Protocol
from urllib.parse import urlsplit

import msgspec

from greenfast.evolve.proposal import ProposerError
from greenfast.judge.store import check_writable, decode, write_whole
from greenfast.spec.errors import UsageError
from greenfast.spec.extras import require

#: Environment variable with the key; without it no key is sent.
KEY = "GREENFAST_MODEL_KEY"
#: Default time limit of an answer in seconds, by transport: a person may answer a mailbox.
DEFAULT_TIMEOUTS = {"http": 180.0, "mailbox": 86400.0}
_ATTEMPTS = 6
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0  # seconds; each wait doubles
_RETRIED_STATUSES = (408, 409, 425, 429)  # and every 5xx
_MAX_SHOWN = 300  # characters of a server's response in a message
_POLL = 0.5  # seconds between looks into a mailbox


class AnswerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one answer. tokens: of its text. seconds: per attempt."""

    tokens: int
    seconds: float

    @property
    def max_bytes(self) -> int:
        """Most bytes to read; a longer answer is refused."""
        return 64 * 1024 + 32 * self.tokens


class ModelAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer. tokens: of prompt and answer together, from the server, else by ``estimate_tokens``."""

    text: str
    tokens: int


class Model(Protocol):
    """The interface of a model."""

    def complete(self, prompt: str, limits: AnswerLimits) -> ModelAnswer:
        """Return the answer to a prompt. Raises ProposerError if there is none within the limits."""


def make_model(spec: str, name: str = "") -> Model:
    """Make a model from http:URL (with the model's name) or mailbox:FOLDER. Raises UsageError for any other text."""
    carrier, _, address = spec.partition(":")
    if not address or carrier not in DEFAULT_TIMEOUTS:
        raise UsageError(f"model {spec!r}: allowed are http:URL (and model_name=NAME) and mailbox:FOLDER")
    return HttpModel(address, name) if carrier == "http" else Mailbox(Path(address))


def estimate_tokens(*texts: str) -> int:
    """Estimate tokens as bytes / 4, rounded up per text."""
    return sum(-(-len(text.encode("utf-8", "replace")) // 4) for text in texts)


def prompt_digest(prompt: str) -> str:
    """Return 16 hexadecimal digits that identify a prompt."""
    return hashlib.sha256(prompt.encode("utf-8", "replace")).hexdigest()[:16]


class _RetryableError(Exception):
    """A failure that may succeed when retried. wait: seconds requested by the server, or None."""

    def __init__(self, why: str, wait: float | None = None) -> None:
        super().__init__(why)
        self.wait = wait


class HttpModel:
    """Sends ``POST URL/chat/completions``; retries after timeouts, lost connections, 429, 5xx and invalid answers."""

    def __init__(self, url: str, name: str, sleep: Callable[[float], None] = time.sleep) -> None:
        """Create the client; nothing is sent.

        url: including the version, such as http://localhost:8000/v1. name: of the model. sleep: waits between attempts.
        Raises UsageError for an invalid url or an empty name, MachineError without httpx2.
        """
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"model http:{url}: a URL is needed, such as http:http://localhost:8000/v1")
        if "@" in urlsplit(url).netloc or "?" in url or "#" in url:  # it would be written to the run's manifest
            raise UsageError(f"model http: the URL holds a name, a key or options; the key is read from {KEY} alone")
        if not name:
            raise UsageError(f"model http:{url}: give the model's name too (model_name=NAME)")
        require("a model behind http", "evolve")
        import httpx2

        self._http: Any = httpx2
        self._url, self._name, self._sleep = f"{url.rstrip('/')}/chat/completions", name, sleep
        self._key = key = os.environ.get(KEY, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise UsageError(f"{KEY} holds characters that no header can; give the key alone")
        self._client: Any = httpx2.Client(headers={"Authorization": f"Bearer {key}"} if key else {})

    def complete(self, prompt: str, limits: AnswerLimits) -> ModelAnswer:
        """Return the first choice of a completion. Raises ProposerError after the last attempt, or for other 4xx."""
        wait = _FIRST_WAIT
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                answer = _parse_completion(self._post(prompt, limits), prompt)
                return msgspec.structs.replace(answer, text=self._without_key(answer.text))
            except _RetryableError as e:
                if attempt == _ATTEMPTS:
                    self._fail(f"{e}; asked {attempt} times")
                self._sleep(min(wait if e.wait is None else e.wait, _LONGEST_WAIT))
                wait *= 2
        raise AssertionError("the last attempt returns or raises")

    def _fail(self, why: str) -> NoReturn:
        raise ProposerError(self._without_key(f"model {self._name} at {self._url}: {why}")) from None

    def _without_key(self, text: str) -> str:
        """Remove the key from a text: a server may echo it, and its responses are shown and stored."""
        return text.replace(self._key, "***") if self._key else text

    def _post(self, prompt: str, limits: AnswerLimits) -> bytes:
        """Return the body of a 200. The deadline is checked here: a client's timeout applies to each single read."""
        body = {"model": self._name, "messages": [{"role": "user", "content": prompt}], "max_tokens": limits.tokens}
        end = time.monotonic() + limits.seconds
        received = bytearray()
        try:
            with self._client.stream("POST", self._url, json=body, timeout=limits.seconds) as response:
                for part in response.iter_bytes():
                    received += part
                    if len(received) > limits.max_bytes:
                        raise _RetryableError(f"more than {limits.max_bytes} bytes")
                    if time.monotonic() > end:
                        raise _RetryableError(f"not done after {limits.seconds:g} s")
        except self._http.TimeoutException as e:
            raise _RetryableError(f"nothing for {limits.seconds:g} s") from e
        except self._http.InvalidURL as e:
            self._fail(f"no URL: {e}")
        except self._http.HTTPError as e:
            raise _RetryableError(f"{type(e).__name__}: {e}") from e
        status = response.status_code
        if status == 200:
            return bytes(received)
        failure = f"status {status}: {received[:_MAX_SHOWN].decode('utf-8', 'replace').strip()}"
        if status in _RETRIED_STATUSES or status >= 500:
            raise _RetryableError(failure, _parse_retry_after(response.headers.get("retry-after", "")))
        hint = f"; the key is read from {KEY}" if status in (401, 403) else ""
        if where := response.headers.get("location"):
            hint = f"; redirects are not followed, as the key is for this server alone; it names {where[:_MAX_SHOWN]}"
        self._fail(f"{failure}{hint}")


class _ChatMessage(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    message: _ChatMessage


class _Usage(msgspec.Struct):
    total_tokens: int | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


def _parse_completion(body: bytes, prompt: str) -> ModelAnswer:
    try:
        completion = decode(body, _Completion)
        text = completion.choices[0].message.content
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError, RecursionError) as e:
        raise _RetryableError(f"no completion: {e}: {body[:_MAX_SHOWN].decode('utf-8', 'replace')}") from e
    counted = (completion.usage.total_tokens if completion.usage else 0) or 0
    return ModelAnswer(text=text, tokens=counted if counted > 0 else estimate_tokens(prompt, text))


def _parse_retry_after(header: str) -> float | None:
    """Parse Retry-After in seconds; a date gives None."""
    return float(header) if header.isascii() and header.isdigit() else None


class Mailbox:
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
