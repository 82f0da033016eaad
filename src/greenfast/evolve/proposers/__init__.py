"""Make a proposer by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from greenfast.evolve.language.file_transport import FileTransport, Recorder, Replay
from greenfast.evolve.language.model import AnswerLimits, Model
from greenfast.evolve.language.openai_endpoint import HttpModel
from greenfast.evolve.language.prompts import STRATEGIES
from greenfast.evolve.proposal import Proposer
from greenfast.evolve.proposers.engineer import EngineerProposer
from greenfast.evolve.proposers.evolutionary import ISLANDS, EvolutionaryProposer
from greenfast.evolve.proposers.plain import ExhaustiveProposer, RandomProposer, ScriptedProposer
from greenfast.evolve.proposers.tpe import STARTUP, TpeProposer
from greenfast.spec.errors import UsageError, unknown

#: Options of the strategies with a language model and their defaults; empty for a required option or no default.
_OF_MODELS: dict[str, str] = {
    "model": "",
    "model_name": "",
    "record": "",
    "tokens": "1000000",
    "answer_tokens": "8192",
    "timeout": "",
}
#: Proposer -> its options and their defaults.
OPTIONS: dict[str, dict[str, str]] = {
    "random": {},
    "exhaustive": {},
    "scripted": {"file": ""},
    "tpe": {"startup": str(STARTUP)},
    "evolutionary": {"islands": str(ISLANDS)},
    **{strategy: _OF_MODELS for strategy in STRATEGIES},
}
#: Default time limit of an answer in seconds, by transport: a person may answer a mailbox.
_TIMEOUTS = {"http": 180.0, "mailbox": 86400.0, "replay": 1.0}


def make_proposer(
    name: str, options: Mapping[str, str] | None = None, log: Callable[[str], None] = lambda _: None
) -> Proposer:
    """Make a proposer by its name.

    options: texts by name, see OPTIONS. log: receives one line per answer of a model. Raises UsageError for an unknown
    name or option or a wrong value, and MachineError if an extra is not installed.
    """
    if name not in OPTIONS:
        raise unknown("proposer", name, OPTIONS)
    set_options = {key: value for key, value in (options or {}).items() if value}
    for key in set_options:
        if key not in OPTIONS[name]:
            allowed = ", ".join(OPTIONS[name]) or "none"
            raise UsageError(f"proposer {name}: unknown option {key!r}; allowed: {allowed}")
    chosen = {**OPTIONS[name], **set_options}
    if name in STRATEGIES:
        return _make_engineer(name, chosen, log)
    if name == "tpe":
        return TpeProposer(_read_whole_number(name, chosen, "startup", minimum=0))
    if name == "evolutionary":
        return EvolutionaryProposer(_read_whole_number(name, chosen, "islands", maximum=1000))
    if name == "scripted":
        if not chosen["file"]:
            raise UsageError("proposer scripted: give its candidates, one as JSON on each line: file=FILE")
        return ScriptedProposer(chosen["file"])
    return RandomProposer() if name == "random" else ExhaustiveProposer()


def make_paths_absolute(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options with absolute paths, because a run may be resumed in another working directory."""
    resolved = dict(options)
    for name in ("file", "record"):
        if resolved.get(name):
            resolved[name] = str(Path(resolved[name]).resolve())
    carrier, _, where = resolved.get("model", "").partition(":")
    if carrier in ("mailbox", "replay") and where:
        resolved["model"] = f"{carrier}:{Path(where).resolve()}"
    return resolved


def make_model(spec: str, name: str = "") -> Model:
    """Make a model from http:URL (with the model's name), mailbox:FOLDER or replay:FILE.

    Raises UsageError for any other text.
    """
    carrier, _, where = spec.partition(":")
    if not where or carrier not in _TIMEOUTS:
        raise UsageError(f"model {spec!r}: allowed are http:URL (and model_name=NAME), mailbox:FOLDER and replay:FILE")
    if carrier == "http":
        return HttpModel(where, name)
    return FileTransport(Path(where)) if carrier == "mailbox" else Replay(Path(where))


def _make_engineer(strategy: str, chosen: Mapping[str, str], log: Callable[[str], None]) -> Proposer:
    model = make_model(chosen["model"], chosen["model_name"])
    if chosen["record"]:
        model = Recorder(model, Path(chosen["record"]))
    default = _TIMEOUTS[chosen["model"].partition(":")[0]]
    seconds = _read_whole_number(strategy, chosen, "timeout") if chosen["timeout"] else default
    limits = AnswerLimits(tokens=_read_whole_number(strategy, chosen, "answer_tokens"), seconds=seconds)
    return EngineerProposer(strategy, model, limits, _read_whole_number(strategy, chosen, "tokens"), log)


def _read_whole_number(
    proposer: str, options: Mapping[str, str], key: str, minimum: int = 1, maximum: int = 10**12
) -> int:
    text = options[key]
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(maximum)) and minimum <= int(text) <= maximum):
        allowed = f"a whole number of at least {minimum} and at most {maximum}"
        raise UsageError(f"proposer {proposer}: {key}={text[:40]!r}: {allowed} is needed")
    return int(text)
