"""The proposer with a language model: its transports (an endpoint, a folder), prompts of strategies, and answers.

The strategies are EvoEngineer's (arXiv 2510.03760). They differ in how much a model is given. Free: the task and the
best so far. Insight: also the insights. Full: also the archive and the history.

The client is httpx2, the maintained continuation of httpx; huggingface_hub already depends on it. One POST needs no
vendor package. Retries are implemented here, because neither a client's retries nor a retry library supports a deadline
over the whole answer and a limit of its size.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol
from urllib.parse import urlsplit

import msgspec

from greenfast.evolve.proposal import Candidate, Context, Descriptor, Edit, Evaluation, ProposerError
from greenfast.evolve.space import Space, Value
from greenfast.judge.store import check_writable, decode, once, write_whole
from greenfast.spec.errors import UsageError
from greenfast.spec.extras import require

#: Environment variable with the key; without it no key is sent.
KEY = "GREENFAST_MODEL_KEY"
#: Default time limit of an answer in seconds, by transport: a person may answer a mailbox.
DEFAULT_TIMEOUTS = {"http": 180.0, "mailbox": 86400.0}
_ATTEMPTS = 6
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0  # seconds; each wait doubles
_RETRIED_STATUSES = (408, 409, 425, 429)  # and every 5xx
_SHOWN_REPLY = 300  # characters of a server's response in a message
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
        failure = f"status {status}: {received[:_SHOWN_REPLY].decode('utf-8', 'replace').strip()}"
        if status in _RETRIED_STATUSES or status >= 500:
            raise _RetryableError(failure, _parse_retry_after(response.headers.get("retry-after", "")))
        hint = f"; the key is read from {KEY}" if status in (401, 403) else ""
        if where := response.headers.get("location"):
            hint = f"; redirects are not followed, as the key is for this server alone; it names {where[:_SHOWN_REPLY]}"
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
    except (msgspec.DecodeError, IndexError) as e:
        raise _RetryableError(f"no completion: {e}: {body[:_SHOWN_REPLY].decode('utf-8', 'replace')}") from e
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


#: Strategy -> the sections that it adds to the task and the best so far.
STRATEGIES: dict[str, tuple[str, ...]] = {
    "free": (),
    "insight": ("insights",),
    "full": ("insights", "elites", "history"),
}
#: Most entries of history, archive and insights in a prompt; characters of a feedback.
_HISTORY, _ELITES, _INSIGHTS, _FEEDBACK = 40, 12, 60, 400
_FORM = """Answer with one JSON object in a ```json fence:
{"candidates": [{"parameters": {NAME: VALUE}, "edits": [{"region": NAME, "text": TEXT}], "rationale": TEXT, \
"prediction": TEXT}]}
`parameters`: the values that differ from the defaults. `edits`: the whole new text of a region; may be left out.
`rationale`: why it should be faster. `prediction`: by how much."""


def prompt(context: Context, strategy: str, faults: Sequence[str] = ()) -> str:
    """Write the prompt of a strategy. faults: of earlier answers to this prompt."""
    sections = [f"# Task\n\n{context.task}", *_space(context.space)]
    if context.baseline is not None:
        sections.append(f"# To beat\n\n{_line(context.baseline)}")
    if context.best is not None:
        regions = (f"Its region {e.region}:\n\n```text\n{e.text}\n```" for e in context.best.candidate.edits)
        sections.append("\n\n".join(["# Best so far", _line(context.best), *regions]))
    for name in STRATEGIES[strategy]:
        title, lines = _section(name, context)
        if lines:
            sections.append(f"# {title}\n\n" + "\n".join(f"- {line}" for line in lines))
    if faults:
        sections.append("# Refused in your answers so far\n\n" + "\n".join(f"- {fault}" for fault in faults))
    many = "One candidate" if context.wanted == 1 else f"Up to {context.wanted} candidates"
    sections.append(f"# Answer\n\n{many} that the history does not hold.\n{_FORM}")
    return "\n\n".join(sections) + "\n"


def _space(space: Space) -> Iterator[str]:
    if space.parameters:
        rows = (
            f"- {name}: {', '.join(map(str, p.values))} (default {p.start}){f'; {p.help}' if p.help else ''}"
            for name, p in space.parameters.items()
        )
        yield "# Parameters\n\n" + "\n".join(rows)
    if space.constraints:
        yield "# Constraints (none may be 0)\n\n" + "\n".join(f"- {c}" for c in space.constraints)
    for name, region in space.regions.items():
        about = f": {region.help}" if region.help else ""
        yield f"# Region {name} of {region.file}{about}\n\n```text\n{region.text}\n```"


def _section(name: str, context: Context) -> tuple[str, list[str]]:
    """Return the title and the lines of a section."""
    if name == "elites":
        return "The best of each kind of behaviour", [_line(e) for e in context.archive[:_ELITES]]
    if name == "history":
        return "Evaluated so far, the latest last", [_line(e) for e in context.history[-_HISTORY:]]
    measured = [insight for insight in context.insights if insight.record]  # the others were not measured
    lines = [f"{i.change}. Predicted: {i.prediction or 'nothing'}. Came: {i.outcome}" for i in measured[-_INSIGHTS:]]
    return "Insights, each of them measured", lines


def _line(e: Evaluation) -> str:
    """Describe an evaluation in one line: settings, stage or time, behaviour, feedback."""
    parts = [json.dumps(e.candidate.parameters, ensure_ascii=False)]
    if e.candidate.edits:
        parts.append("edits of " + ", ".join(edit.region for edit in e.candidate.edits))
    parts.append(_fitness(e) if e.valid else f"failed at {e.stage}")
    if e.behaviour is not None:
        parts.append(_behaviour(e.behaviour))
    feedback = " ".join(e.feedback.split())[:_FEEDBACK]
    return "; ".join([*parts, feedback] if feedback else parts)


def _fitness(e: Evaluation) -> str:
    if e.fitness is None:
        return f"passed {e.stage}"
    return f"{e.fitness * 1e6:.4g} µs" if e.fitness_kind == "seconds" else f"estimated {e.fitness:.4g}, not measured"


def _behaviour(b: Descriptor) -> str:
    busiest = f"{b.pipe} busiest, " if b.pipe else ""
    return f"{busiest}{b.registers} registers, {b.smem_bytes} bytes of shared memory"


#: Limits of an answer: its characters, positions tried as the start of JSON, candidates, and characters of an edit.
MAX_TEXT, _MAX_STARTS, _MAX_CANDIDATES, MAX_EDIT = 1_000_000, 2_000, 64, 200_000
_MAX_SHOWN = 120
_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
_START = re.compile(r"[{\[]")


class Parsed(msgspec.Struct, frozen=True):
    """The result of parsing. candidates: without duplicates. faults: one line per refused part."""

    candidates: tuple[Candidate, ...]
    faults: tuple[str, ...]


def parse_answer(text: str, space: Space) -> Parsed:
    """Parse the last object in an answer that lists candidates.

    The form: {"candidates": [{"parameters": {...}, "edits": [{"region", "text"}], "rationale", "prediction"}]}. It may
    be in a fence and surrounded by other text.
    """
    if len(text) > MAX_TEXT:
        return Parsed((), (f"{len(text)} characters; at most {MAX_TEXT} are read",))
    listed = _find_candidates(text)
    if listed is None:
        shown = " ".join(text.split())[:_MAX_SHOWN]
        return Parsed((), (f"no JSON object with `candidates` in {shown!r}" if shown else "the answer is empty",))
    candidates: dict[str, Candidate] = {}
    faults = []
    if len(listed) > _MAX_CANDIDATES:
        faults.append(f"{len(listed)} candidates; the first {_MAX_CANDIDATES} are read")
    for number, row in enumerate(listed[:_MAX_CANDIDATES], 1):
        try:
            candidate = _parse_candidate(row, space)
        except (UsageError, RecursionError) as e:
            faults.append(f"candidate {number}: {str(e)[: 4 * _MAX_SHOWN]}")
            continue
        if candidate.key in candidates:
            faults.append(f"candidate {number}: the same as another")
        candidates.setdefault(candidate.key, candidate)
    if not listed:
        faults.append("the list of candidates is empty")
    return Parsed(tuple(candidates.values()), tuple(map(_replace_surrogates, faults)))


def _find_candidates(text: str) -> list[Any] | None:
    """Return the last list of candidates in the text. Fenced blocks are tried first, then every opening bracket."""
    for part in [*reversed(_FENCE.findall(text)), text]:
        lists = [rows for value in _find_json_values(part) if (rows := _candidate_rows(value)) is not None]
        if lists:
            return lists[-1]
    return None


def _find_json_values(text: str) -> list[Any]:
    """Return the JSON objects and lists in a text, in order."""
    decoder, values, position = json.JSONDecoder(object_pairs_hook=_parse_object), [], 0
    for _ in range(_MAX_STARTS):
        start = _START.search(text, position)
        if start is None:
            break
        try:
            value, position = decoder.raw_decode(text, start.start())
            values.append(value)
        except (ValueError, RecursionError):
            position = start.end()
    return values


def _parse_object(pairs: list[tuple[str, Any]]) -> Any:
    """Return an object, or its error as a text, so that the other parts of the answer are still parsed."""
    try:
        return once(pairs)
    except msgspec.DecodeError as e:
        return str(e)


def _candidate_rows(value: Any) -> list[Any] | None:
    if isinstance(value, dict) and isinstance(value.get("candidates"), list):
        rows: list[Any] = value["candidates"]
        return rows
    listed = value if isinstance(value, list) else [value]
    known = [row for row in listed if isinstance(row, dict) and ("parameters" in row or "edits" in row)]
    return listed if known else None


def _parse_candidate(row: Any, space: Space) -> Candidate:
    if not isinstance(row, dict):
        raise UsageError(f"{_shorten(row)} is no object")
    parameters, edits = row.get("parameters", {}), row.get("edits", [])
    if not isinstance(parameters, dict) or not isinstance(edits, list):
        raise UsageError("`parameters` is an object and `edits` a list")
    point = space.decode({name: _match_value(name, value, space) for name, value in parameters.items()})
    parsed_edits = tuple(_parse_edit(edit, space) for edit in edits)
    if len({edit.region for edit in parsed_edits}) < len(parsed_edits):
        raise UsageError("a region is edited twice")
    return Candidate(
        parameters=point,
        edits=parsed_edits,
        rationale=_parse_text(row.get("rationale")),
        prediction=_parse_text(row.get("prediction")),
    )


def _match_value(name: str, value: Any, space: Space) -> Value:
    """Return the allowed value that equals a value: 128 for "128" or 128.0, 1 for true."""
    parameter = space.parameters.get(name)
    for allowed in parameter.values if parameter else ():
        if value == allowed or (isinstance(value, str) and value.strip() == str(allowed)):
            return allowed
    return value if isinstance(value, (int, float, str)) else _shorten(value)


def _parse_edit(edit: Any, space: Space) -> Edit:
    if not isinstance(edit, dict) or not isinstance(edit.get("text"), str):
        raise UsageError(f'an edit has the form {{"region": NAME, "text": TEXT}}; got {_shorten(edit)}')
    region, text = edit.get("region"), edit["text"]
    if not isinstance(region, str) or region not in space.regions:
        raise UsageError(f"region {_shorten(region)}; allowed: {', '.join(sorted(space.regions)) or 'none'}")
    if len(text) > MAX_EDIT:
        raise UsageError(f"an edit of {len(text)} characters; at most {MAX_EDIT} are allowed")
    return Edit(region=region, text=_replace_surrogates(text))


def _parse_text(value: Any) -> str:
    return _replace_surrogates(value[:MAX_EDIT]) if isinstance(value, str) else "" if value is None else _shorten(value)


def _replace_surrogates(text: str) -> str:
    """Replace lone surrogates: JSON can spell them, but a UTF-8 file cannot store them."""
    return text.encode("utf-8", "replace").decode()


def _shorten(value: Any) -> str:
    return repr(value)[:_MAX_SHOWN]


#: Most prompts per batch, and most faults of one answer in the next prompt.
_TRIES, _FAULTS = 3, 8
_SPENT = re.compile(r"\b(\d+) tokens$")


class EngineerProposer:
    """Requests candidates from a model, within a budget of tokens.

    After an answer without a usable candidate, the next prompt includes its faults. ``counts``: answers, candidates,
    faults and tokens of this process. The tokens used are stored in the candidates' ``origin``, so the budget also
    holds for a resumed run.
    """

    def __init__(
        self,
        strategy: str,
        model: Model,
        limits: AnswerLimits,
        budget: int,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Send nothing yet.

        strategy: one of prompts.STRATEGIES. limits: per answer. budget: tokens of prompts and answers in the whole run.
        log: receives one line per answer, with the refused parts.
        """
        self._strategy, self._model, self._limits, self._budget, self._log = strategy, model, limits, budget, log
        self._known: set[str] = set()
        self._spent = 0  # tokens recorded in evaluated candidates
        self._unobserved = 0  # tokens since then
        self.counts: Counter[str] = Counter()

    def propose(self, context: Context) -> Sequence[Candidate]:
        """Return the candidates of one answer; none (and a line in the log) if the budget is spent.

        Raises ProposerError if the model does not answer, or if three answers hold no new candidate.
        """
        faults: list[str] = []
        for _ in range(_TRIES):
            text = prompt(context, self._strategy, faults)
            left = self._budget - self._spent - self._unobserved - estimate_tokens(text)
            if left <= 0:
                self._log(f"the budget of {self._budget} tokens is spent")
                return []
            limits = msgspec.structs.replace(self._limits, tokens=min(self._limits.tokens, left))
            answer = self._model.complete(text, limits)
            self._unobserved += answer.tokens
            candidates, refused = self._select_new(answer.text, context)
            self.counts.update(answers=1, tokens=answer.tokens, candidates=len(candidates), faults=len(refused))
            self._log(
                f"prompt {prompt_digest(text)}: {len(candidates)} taken, {answer.tokens} tokens, refused: {refused}"
            )
            if candidates:
                origin = f"{self._strategy}, {self._unobserved} tokens"
                first = msgspec.structs.replace(candidates[0], origin=origin)
                return [first, *(msgspec.structs.replace(c, origin=self._strategy) for c in candidates[1:])]
            faults += refused[:_FAULTS]
        raise ProposerError(f"{_TRIES} answers of the model held no new candidate; the last: {'; '.join(faults[-2:])}")

    def observe(self, evaluations: Sequence[Evaluation]) -> None:
        """Record the evaluated candidates and their tokens."""
        for evaluation in evaluations:
            self._known.add(evaluation.candidate.key)
            if spent := _SPENT.search(evaluation.candidate.origin):
                self._spent += int(spent[1])
                self._unobserved = 0

    def _select_new(self, text: str, context: Context) -> tuple[list[Candidate], list[str]]:
        parsed = parse_answer(text, context.space)
        fresh = [c for c in parsed.candidates if c.key not in self._known]
        faults = list(parsed.faults)
        if len(fresh) < len(parsed.candidates):
            faults.append(f"{len(parsed.candidates) - len(fresh)} candidates were evaluated before")
        if len(fresh) > context.wanted:
            faults.append(f"{len(fresh)} candidates; the first {context.wanted} are taken")
        best = context.best
        parents = (best.candidate.key,) if best else ()
        return [msgspec.structs.replace(c, parents=parents) for c in fresh[: context.wanted]], faults
