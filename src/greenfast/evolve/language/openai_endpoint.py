"""A language model behind an OpenAI-compatible endpoint.

The client is httpx2, the maintained continuation of httpx, which huggingface_hub brings already: one POST needs no
vendor's package with its models of every message. What is tried again and for how long is said here, as neither a
client's retries nor a retry library's know the deadline over a whole answer or the limit of its size.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NoReturn
from urllib.parse import urlsplit

import msgspec

from greenfast.evolve.language.model import AnswerLimits, ModelAnswer, estimated_tokens
from greenfast.evolve.proposal import ProposerError
from greenfast.judge.strict_json import decode
from greenfast.spec.errors import UsageError
from greenfast.spec.extras import require

#: The environment variable that holds the key; without it none is sent.
KEY = "GREENFAST_MODEL_KEY"
_ATTEMPTS = 6
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0  # seconds; each wait is twice the one before
_AGAIN = (408, 409, 425, 429)  # and every 5xx
_SHOWN = 300  # characters of a server's words in a message


class _PassingError(Exception):
    """What may pass when it is tried again. wait: seconds that the server asked for, or None."""

    def __init__(self, why: str, wait: float | None = None) -> None:
        super().__init__(why)
        self.wait = wait


class HttpModel:
    """``POST URL/chat/completions``, tried again after timeouts, lost connections, 429, 5xx and garbage."""

    def __init__(self, url: str, name: str, sleep: Callable[[float], None] = time.sleep) -> None:
        """Set up the client; nothing is sent.

        url: up to and with the version, such as http://localhost:8000/v1. name: of the model. sleep: between attempts.
        Raises UsageError for a url that is none or no name, MachineError without httpx2.
        """
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"model http:{url}: a URL is needed, such as http:http://localhost:8000/v1")
        if "@" in urlsplit(url).netloc or "?" in url or "#" in url:  # it would stand in the run's manifest
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
        """The first choice of a completion. Raises ProposerError after the last attempt, or at once for other 4xx."""
        wait = _FIRST_WAIT
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                answer = _read(self._post(prompt, limits), prompt)
                return msgspec.structs.replace(answer, text=self._without_key(answer.text))
            except _PassingError as e:
                if attempt == _ATTEMPTS:
                    self._fail(f"{e}; asked {attempt} times")
                self._sleep(min(wait if e.wait is None else e.wait, _LONGEST_WAIT))
                wait *= 2
        raise AssertionError("the last attempt returns or raises")

    def _fail(self, why: str) -> NoReturn:
        raise ProposerError(self._without_key(f"model {self._name} at {self._url}: {why}")) from None

    def _without_key(self, text: str) -> str:
        """A server may send the key back, and what it sends is shown and kept."""
        return text.replace(self._key, "***") if self._key else text

    def _post(self, prompt: str, limits: AnswerLimits) -> bytes:
        """The body of a 200. A client's timeout is for each read, so the whole is timed here."""
        body = {"model": self._name, "messages": [{"role": "user", "content": prompt}], "max_tokens": limits.tokens}
        end = time.monotonic() + limits.seconds
        received = bytearray()
        try:
            with self._client.stream("POST", self._url, json=body, timeout=limits.seconds) as response:
                for part in response.iter_bytes():
                    received += part
                    if len(received) > limits.most_bytes:
                        raise _PassingError(f"more than {limits.most_bytes} bytes")
                    if time.monotonic() > end:
                        raise _PassingError(f"not done after {limits.seconds:g} s")
        except self._http.TimeoutException as e:
            raise _PassingError(f"nothing for {limits.seconds:g} s") from e
        except self._http.InvalidURL as e:
            self._fail(f"no URL: {e}")
        except self._http.HTTPError as e:
            raise _PassingError(f"{type(e).__name__}: {e}") from e
        status = response.status_code
        if status == 200:
            return bytes(received)
        said = f"status {status}: {received[:_SHOWN].decode('utf-8', 'replace').strip()}"
        if status in _AGAIN or status >= 500:
            raise _PassingError(said, _seconds(response.headers.get("retry-after", "")))
        hint = f"; the key is read from {KEY}" if status in (401, 403) else ""
        if where := response.headers.get("location"):
            hint = (
                f"; redirects are not followed, since the key goes to the named server alone: it names {where[:_SHOWN]}"
            )
        self._fail(f"{said}{hint}")


class _ChatMessage(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    message: _ChatMessage


class _Usage(msgspec.Struct):
    total_tokens: int | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


def _read(body: bytes, prompt: str) -> ModelAnswer:
    try:
        found = decode(body, _Completion)
        text = found.choices[0].message.content
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError, RecursionError) as e:
        raise _PassingError(f"no completion: {e}: {body[:_SHOWN].decode('utf-8', 'replace')}") from e
    counted = (found.usage.total_tokens if found.usage else 0) or 0
    return ModelAnswer(text=text, tokens=counted if counted > 0 else estimated_tokens(prompt, text))


def _seconds(header: str) -> float | None:
    """Retry-After in seconds; its other form, a date, is not read."""
    return float(header) if header.isascii() and header.isdigit() else None
