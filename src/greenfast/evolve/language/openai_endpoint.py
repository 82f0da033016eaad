"""A language model behind an OpenAI-compatible endpoint.

The client is httpx2, the maintained continuation of httpx; huggingface_hub already depends on it. One POST needs no
vendor package. Retries are implemented here, because neither a client's retries nor a retry library supports a deadline
over the whole answer and a limit of its size.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NoReturn
from urllib.parse import urlsplit

import msgspec

from greenfast.evolve.language.model import AnswerLimits, ModelAnswer, estimate_tokens
from greenfast.evolve.proposal import ProposerError
from greenfast.judge.strict_json import decode
from greenfast.spec.errors import UsageError
from greenfast.spec.extras import require

#: Environment variable with the key; without it no key is sent.
KEY = "GREENFAST_MODEL_KEY"
_ATTEMPTS = 6
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0  # seconds; each wait doubles
_RETRIED_STATUSES = (408, 409, 425, 429)  # and every 5xx
_MAX_SHOWN = 300  # characters of a server's response in a message


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
