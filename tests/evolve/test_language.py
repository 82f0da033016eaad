"""Models: an endpoint that fails in every way, a mailbox, and what answers hold."""

from __future__ import annotations

import json
import random
import threading
import time
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from greenfast.evolve.language import (
    KEY,
    MAX_EDIT,
    MAX_TEXT,
    AnswerLimits,
    EngineerProposer,
    HttpModel,
    Mailbox,
    Model,
    ModelAnswer,
    parse_answer,
    prompt,
    prompt_digest,
)
from greenfast.evolve.proposal import Candidate, Context, Descriptor, Evaluation, Insight, ProposerError
from greenfast.evolve.proposers import make_proposer
from greenfast.evolve.space import Parameter, Region, Space
from greenfast.spec.errors import MachineError, UsageError

LIMITS = AnswerLimits(tokens=100, seconds=0.5)
SPACE = Space(
    name="tiles",
    parameters={"BLOCK": Parameter(values=(64, 128), help="keys of a tile"), "STAGES": Parameter(values=(2, 3, 4))},
    constraints=("BLOCK * STAGES <= 384",),
    regions={"loop": Region(file="kernel.cu", text="for (;;) {}")},
)
GOOD = '{"candidates": [{"parameters": {"BLOCK": 128}, "rationale": "wider", "prediction": "+5 %"}]}'


def completion(text: str, **more: Any) -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}}], **more}).encode()


class Endpoint:
    """A server that gives the listed replies in turn: (status, headers, body), a body or how long to be silent."""

    def __init__(self) -> None:
        self.replies: list[Any] = []
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.asked.append((self.path, {n.lower(): v for n, v in self.headers.items()}, json.loads(body)))
                reply = outer.replies.pop(0)
                if isinstance(reply, float):
                    time.sleep(reply)
                    return
                status, headers, content = reply if isinstance(reply, tuple) else (200, {}, reply)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                try:
                    for part in [content] if isinstance(content, bytes) else content:
                        self.wfile.write(part)
                        self.wfile.flush()
                except OSError:  # the client has had enough
                    pass

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture(scope="module")
def server() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    yield endpoint
    endpoint.server.shutdown()
    endpoint.server.server_close()


@pytest.fixture
def endpoint(server: Endpoint) -> Endpoint:
    server.replies, server.asked = [], []
    return server


def model(endpoint: Endpoint, waits: list[float] | None = None) -> HttpModel:
    kept: list[float] = [] if waits is None else waits
    return HttpModel(endpoint.url, "some-model", sleep=kept.append)


def test_an_endpoint_is_asked_as_its_interface_says(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret")
    endpoint.replies = [completion("yes", usage={"total_tokens": 17, "prompt_tokens": 9})]
    assert model(endpoint).complete("question?", LIMITS) == ModelAnswer(text="yes", tokens=17)
    ((path, headers, body),) = endpoint.asked
    assert path == "/v1/chat/completions"
    assert headers["authorization"] == "Bearer secret"
    assert body == {"model": "some-model", "messages": [{"role": "user", "content": "question?"}], "max_tokens": 100}


def test_without_a_key_none_is_sent_and_without_a_count_tokens_are_estimated(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY, raising=False)
    usages: list[dict[str, Any]] = [
        {},
        *({"usage": u} for u in (None, {}, {"total_tokens": None}, {"total_tokens": -5})),
    ]
    for usage in usages:
        endpoint.replies = [completion("12345678", **usage)]
        assert model(endpoint).complete("question", LIMITS).tokens == 4
    assert all("authorization" not in headers for _, headers, _ in endpoint.asked)


def test_what_may_pass_is_tried_again_with_growing_waits(endpoint: Endpoint) -> None:
    endpoint.replies = [
        (503, {}, b"busy"),
        (429, {"Retry-After": "7"}, b"slow down"),
        (429, {"Retry-After": "86400"}, b"slow down"),
        b"<html>garbage</html>",
        b'{"choices": []}',
        completion("at last"),
    ]
    waits: list[float] = []
    assert model(endpoint, waits).complete("q", LIMITS).text == "at last"
    assert waits == [1.0, 7.0, 60.0, 8.0, 16.0]


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ((429, {}, b"slow down"), "status 429: slow down; asked 6 times"),
        (b"\xff\xfe garbage", "no completion"),
        (b"[" * 20_000, "no completion"),
        (b'{"choices": [{"message": {"content": null}}]}', "no completion"),
        ([b"x" * 10_000] * 20, "more than 68736 bytes"),
    ],
)
def test_what_does_not_pass_is_given_up(endpoint: Endpoint, reply: Any, said: str) -> None:
    endpoint.replies = [reply] * 6
    with pytest.raises(ProposerError, match=said):
        model(endpoint).complete("q", LIMITS)


def test_silence_ends_at_the_timeout(endpoint: Endpoint) -> None:
    endpoint.replies = [0.4, completion("awake")]
    assert model(endpoint).complete("q", AnswerLimits(tokens=9, seconds=0.2)).text == "awake"


def test_an_answer_that_trickles_ends_at_the_deadline(endpoint: Endpoint) -> None:
    def drops() -> Iterator[bytes]:
        for _ in range(100):
            time.sleep(0.02)
            yield b" "

    endpoint.replies = [drops(), completion("whole")]
    start = time.monotonic()
    assert model(endpoint).complete("q", AnswerLimits(tokens=9, seconds=0.2)).text == "whole"
    assert time.monotonic() - start < 1


@pytest.mark.parametrize("status", [400, 401, 404])
def test_a_refusal_is_not_asked_again(endpoint: Endpoint, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "a-secret")
    endpoint.replies = [(status, {}, b"no such model")]
    with pytest.raises(ProposerError, match=f"some-model at .*: status {status}: no such model") as error:
        model(endpoint).complete("q", LIMITS)
    assert (KEY in str(error.value)) == (status == 401)
    assert "a-secret" not in str(error.value)
    assert len(endpoint.asked) == 1


@pytest.mark.parametrize("status", [401, 302, 429])
def test_a_key_that_the_server_sends_back_is_shown_nowhere(
    endpoint: Endpoint, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, "sk-a-secret\n")  # as a file has it
    where = {"Location": "http://elsewhere/v1?key=sk-a-secret"} if status == 302 else {}
    endpoint.replies = [(status, where, b"wrong key sk-a-secret")] * 6
    with pytest.raises(ProposerError, match=r"wrong key \*\*\*") as error:
        model(endpoint).complete("q", LIMITS)
    assert "a-secret" not in "".join(traceback.format_exception(error.value))
    assert all(headers["authorization"] == "Bearer sk-a-secret" for _, headers, _ in endpoint.asked)
    assert (status == 302) == ("redirects are not followed" in str(error.value))
    endpoint.replies = [completion("your key is sk-a-secret")]
    assert model(endpoint).complete("q", LIMITS).text == "your key is ***"


def test_a_key_that_is_no_header_is_refused_and_not_shown(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("sk-a\nsecret", "sk-\u00e4-secret", "sk\0secret"):
        monkeypatch.setattr("greenfast.evolve.language.os.environ", {KEY: key})
        with pytest.raises(UsageError, match=f"{KEY} holds characters that no header can") as error:
            model(endpoint)
        assert "secret" not in str(error.value)


@pytest.mark.parametrize("url", ["http://me:secret@host/v1", "http://host/v1?key=secret", "http://host/v1#secret"])
def test_a_url_holds_no_secret(url: str) -> None:
    with pytest.raises(UsageError, match=f"the key is read from {KEY} alone") as error:
        HttpModel(url, "m")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("wait", ["\u00b2", "-1", "1e9", "Wed, 21 Oct 2026 07:28:00 GMT", "9" * 400, ""])
def test_a_wait_that_is_no_number_of_seconds_is_not_read(endpoint: Endpoint, wait: str) -> None:
    endpoint.replies = [(429, {"Retry-After": wait}, b"slow down"), completion("at last")]
    waits: list[float] = []
    assert model(endpoint, waits).complete("q", LIMITS).text == "at last"
    assert waits == [60.0 if wait.startswith("9") else 1.0]


def test_nobody_listens(endpoint: Endpoint) -> None:
    absent = HttpModel("http://127.0.0.1:9/v1", "m", sleep=lambda _: None)
    with pytest.raises(ProposerError, match=r"ConnectError.*asked 6 times"):
        absent.complete("q", LIMITS)


def test_without_httpx2_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("greenfast.spec.extras._installed", lambda module: module != "httpx2")
    with pytest.raises(MachineError, match=r"pip install '\.\[evolve\]' in a clone of greenfast"):
        HttpModel("http://host/v1", "m")


# The mailbox.


def test_a_mailbox_waits_for_an_answer_that_does_not_grow_any_more(tmp_path: Path) -> None:
    looks = 0

    def sleep(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks in (2, 3, 4):
            (asked,) = tmp_path.glob("*.prompt.md")
            assert asked.read_text() == "question"
            answer = asked.with_name(asked.name.replace("prompt", "answer"))
            answer.write_text("an answer"[: 3 * (looks - 1)])

    assert Mailbox(tmp_path, sleep).complete("question", AnswerLimits(tokens=9, seconds=9)).text == "an answer"
    assert looks == 5


def test_a_prompt_that_was_asked_before_keeps_its_file(tmp_path: Path) -> None:
    for text in ("one", "two", "one"):
        with pytest.raises(ProposerError, match="resume the run"):
            Mailbox(tmp_path, lambda _: None).complete(text, AnswerLimits(tokens=9, seconds=0))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        f"0001-{prompt_digest('one')}.prompt.md",
        f"0002-{prompt_digest('two')}.prompt.md",
    ]


def test_an_endless_answer_in_a_mailbox_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"0001-{prompt_digest('q')}.prompt.md").write_text("q")
    (tmp_path / f"0001-{prompt_digest('q')}.answer.md").write_bytes(b"x" * 100_000)
    with pytest.raises(ProposerError, match="100000 bytes; an answer has at most 68736"):
        Mailbox(tmp_path, lambda _: None).complete("q", LIMITS)


def test_a_mailbox_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="mailbox:FOLDER"):
        Mailbox(tmp_path / "file")


class Listed:
    """A model that gives the listed answers in turn, and keeps the prompts."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.prompts, self.limits = list(answers), list[str](), list[AnswerLimits]()

    def complete(self, prompt: str, limits: AnswerLimits) -> ModelAnswer:
        self.prompts.append(prompt)
        self.limits.append(limits)
        return ModelAnswer(text=self.answers.pop(0), tokens=100)


# What answers hold.


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        f"Sure!\n```json\n{GOOD}\n```\nGood luck.",
        f'<think>{{"candidates": [{{"parameters": {{"STAGES": 2}}}}]}} or [1, 2]?</think> {GOOD} done {{',
        f"```\nint x;\n```\nand\n```json\n{GOOD}\n```",
        GOOD.replace("128", '"128"'),
        GOOD.replace("128", "128.0"),
        '[{"parameters": {"BLOCK": 128}, "rationale": "wider", "prediction": "+5 %"}]',
        '{"parameters": {"BLOCK": 128}, "rationale": "wider", "prediction": "+5 %"}',
    ],
)
def test_candidates_are_found_in_what_surrounds_them(text: str) -> None:
    parsed = parse_answer(text, SPACE)
    expected = Candidate(parameters={"BLOCK": 128, "STAGES": 2}, rationale="wider", prediction="+5 %")
    assert parsed.candidates == (expected,)
    assert parsed.faults == ()
    assert type(parsed.candidates[0].parameters["BLOCK"]) is int


def one(row: str) -> str:
    return f'{{"candidates": [{row}]}}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the answer is empty"),
        ("I cannot help with that.", "no JSON object with `candidates` in 'I cannot help with that.'"),
        (GOOD[:-3], "no JSON object"),
        ("[" * 300_000, "no JSON object"),
        ('{"a":' * 100_000, "no JSON object"),
        ("9" * 10_000, "no JSON object"),
        ("x" * (MAX_TEXT + 1), "characters; at most"),
        ('{"candidates": []}', "the list of candidates is empty"),
        (one("3"), "candidate 1: 3 is no object"),
        (one("null"), "candidate 1: None is no object"),
        (one('{"parameters": []}'), "`parameters` is an object"),
        (one('{"parameters": {"BLOCK": 100}}'), "BLOCK=100: allowed values are 64, 128"),
        (one('{"parameters": {"BLOCK": NaN}}'), "BLOCK=nan"),
        (one('{"parameters": {"BLOCK": [64]}}'), "allowed values are 64, 128"),
        (one('{"parameters": {"WARPS": 4}}'), "'WARPS'; allowed: BLOCK, STAGES"),
        (one('{"parameters": {"BLOCK": 128, "STAGES": 4}}'), "breaks the constraint 'BLOCK * STAGES <= 384'"),
        (one('{"edits": [{"region": "main", "text": ""}]}'), "region 'main'; allowed: loop"),
        (one('{"edits": [{"region": ["loop"], "text": ""}]}'), "allowed: loop"),
        (one('{"edits": [{"region": "loop"}]}'), "an edit has the form"),
        (one('{"edits": [{"region": "loop", "text": "a"}, {"region": "loop", "text": "b"}]}'), "edited twice"),
        (one(json.dumps({"edits": [{"region": "loop", "text": "x" * (MAX_EDIT + 1)}]})), "at most 200000"),
    ],
)
def test_what_is_no_candidate_is_named_and_nothing_is_raised(text: str, said: str) -> None:
    parsed = parse_answer(text, SPACE)
    assert parsed.candidates == ()
    assert said in parsed.faults[0]


def test_a_bad_candidate_costs_itself_alone() -> None:
    rows = ['{"parameters": {"BLOCK": 1}}', '{"edits": [{"region": "loop", "text": "a\\ud800b"}], "prediction": 1.05}']
    parsed = parse_answer(one(", ".join([*rows, rows[1]])), SPACE)
    (kept,) = parsed.candidates
    assert kept.edits[0].text == "a?b"
    assert kept.prediction == "1.05"
    assert [fault.split(":")[0] for fault in parsed.faults] == ["candidate 1", "candidate 3"]
    assert kept.key


def test_random_bytes_never_raise() -> None:
    rng = random.Random(0)
    alphabet = '{}[]",:\\u0d8\n`json candidates parameters edits region text BLOCK 128 \x00\ud800'
    for _ in range(300):
        text = "".join(rng.choice(alphabet) for _ in range(200))
        mixed = list(GOOD)
        for _ in range(6):
            mixed[rng.randrange(len(mixed))] = rng.choice(alphabet)
        for answer in (text, "".join(mixed), GOOD + text):
            msgspec.json.encode(parse_answer(answer, SPACE))


# Prompts, and the proposer around them.


def evaluated(block: int, fitness: float | None, stage: Any = "race", **more: Any) -> Evaluation:
    return Evaluation(
        candidate=Candidate(parameters={"BLOCK": block, "STAGES": 2}),
        stage=stage,
        valid=fitness is not None,
        fitness=fitness,
        fitness_kind="seconds" if fitness else "",
        **more,
    )


HISTORY = (
    evaluated(64, 2e-6, behaviour=Descriptor(pipe="fma", smem_bytes=1024, registers=40)),
    evaluated(128, None, "BUILD", feedback="error: expected\n a ';'"),
)
CONTEXT = Context(
    space=SPACE,
    task="Attention on an H100.",
    wanted=2,
    seed=1,
    baseline=evaluated(64, 3e-6),
    history=HISTORY,
    archive=HISTORY[:1],
    insights=(
        Insight(change="Three stages", prediction="faster", outcome="1.02x", record="ab12"),
        Insight(change="Six stages", prediction="faster", outcome="surely", record=""),
    ),
)


@pytest.mark.parametrize(("strategy", "told"), [("free", 0), ("insight", 1), ("full", 3)])
def test_a_strategy_decides_what_is_told(strategy: str, told: int) -> None:
    text = prompt(CONTEXT, strategy)
    for part in ("Attention on an H100.", "BLOCK: 64, 128 (default 64); keys of a tile", "BLOCK * STAGES <= 384",
                 "for (;;) {}", "# To beat", "3 µs", "# Best so far", "2 µs", "Up to 2 candidates"):  # fmt: skip
        assert part in text
    parts = ["Three stages. Predicted: faster. Came: 1.02x", "fma busiest, 40 registers", "error: expected a ';'"]
    assert ["# Insights" in text, "# The best of each" in text, "# Evaluated so far" in text].count(True) == told
    assert (parts[0] in text, parts[2] in text) == (told > 0, told > 1)
    assert "Six stages" not in text  # was never measured


def test_an_estimate_is_never_told_as_a_speed() -> None:
    history = (Evaluation(candidate=Candidate(parameters={}), stage="screen", valid=True, fitness=5.0,
                          fitness_kind="estimate"),)  # fmt: skip
    text = prompt(msgspec.structs.replace(CONTEXT, baseline=None, history=history, archive=()), "full")
    assert "estimated 5, not measured" in text
    assert "µs" not in text


def engineer(answers: Model, budget: int = 10_000, log: list[str] | None = None) -> EngineerProposer:
    told: list[str] = [] if log is None else log
    return EngineerProposer("full", answers, AnswerLimits(tokens=500, seconds=1), budget, told.append)


def test_a_useless_answer_is_asked_for_again_counted_and_logged() -> None:
    answers, log = Listed("garbage", one('{"parameters": {"BLOCK": 1}}'), GOOD), list[str]()
    proposer = engineer(answers, log=log)
    (candidate,) = proposer.propose(CONTEXT)
    assert candidate.parameters == {"BLOCK": 128, "STAGES": 2}
    assert candidate.parents == (HISTORY[0].candidate.key,)
    assert proposer.counts == {"answers": 3, "candidates": 1, "faults": 2, "tokens": 300}
    assert "Refused in your answers" not in answers.prompts[0]
    assert "no JSON object" in answers.prompts[1]
    assert "BLOCK=1: allowed values are 64, 128" in answers.prompts[2]
    assert ["1 taken" in line for line in log] == [False, False, True]


def test_three_useless_answers_end_the_batch() -> None:
    with pytest.raises(ProposerError, match=r"3 answers of the model held no new candidate; the last: .*no JSON"):
        engineer(Listed("a", "b", "c")).propose(CONTEXT)


def test_what_was_evaluated_is_not_proposed_again_and_no_more_than_wanted() -> None:
    rows = ", ".join(f'{{"parameters": {{"STAGES": {n}}}}}' for n in (2, 3, 4))
    proposer = engineer(Listed(one(rows)))
    proposer.observe([evaluated(64, 1e-6)])
    found = proposer.propose(msgspec.structs.replace(CONTEXT, wanted=1))
    assert [c.parameters["STAGES"] for c in found] == [3]
    assert proposer.counts["faults"] == 2


def test_the_budget_of_tokens_holds_over_a_resume() -> None:
    def proposed(proposer: EngineerProposer) -> list[Evaluation]:
        return [Evaluation(candidate=c, stage="race", valid=False) for c in proposer.propose(CONTEXT)]

    size = len(prompt(CONTEXT, "full").encode()) // 4 + 1
    first = engineer(Listed("garbage", GOOD), budget=size + 600)
    batch = proposed(first)
    assert batch[0].candidate.origin == "full, 200 tokens"
    log: list[str] = []
    answers = Listed(one('{"parameters": {"STAGES": 3}}'), "never asked")
    resumed = engineer(answers, budget=size + 600, log=log)
    resumed.observe(batch)
    assert proposed(resumed)
    assert answers.limits[0].tokens in range(395, 405)  # of the budget, less what was spent and the prompt
    spent = engineer(Listed("never asked"), budget=200, log=log)
    spent.observe(batch)
    assert spent.propose(CONTEXT) == []
    assert log[-1] == "the budget of 200 tokens is spent"


def test_a_proposer_over_http_gets_through_an_endpoint_that_fails(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("greenfast.evolve.language._FIRST_WAIT", 0.01)
    endpoint.replies = [(429, {"Retry-After": "0"}, b""), 0.05, b"garbage", completion("no"), completion(GOOD)]
    log: list[str] = []
    options = {"model": f"http:{endpoint.url}", "model_name": "m", "timeout": "1"}
    (candidate,) = make_proposer("free", options, log.append).propose(CONTEXT)
    assert candidate.rationale == "wider"
    assert len(endpoint.asked) == 5
    assert len(log) == 2
