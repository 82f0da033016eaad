"""Proposers by name."""

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

#: Options of the strategies around a model and their defaults; empty for what has to be given or may be left out.
_OF_MODELS: dict[str, str] = {
    "model": "",
    "model_name": "",
    "record": "",
    "tokens": "1000000",
    "answer_tokens": "8192",
    "timeout": "",
}
#: Name of a proposer -> its options and their defaults.
OPTIONS: dict[str, dict[str, str]] = {
    "random": {},
    "exhaustive": {},
    "scripted": {"file": ""},
    "tpe": {"startup": str(STARTUP)},
    "evolutionary": {"islands": str(ISLANDS)},
    **{strategy: _OF_MODELS for strategy in STRATEGIES},
}
#: Seconds until an answer has come, by the model's carrier: a mailbox may be a person's.
_TIMEOUTS = {"http": 180.0, "mailbox": 86400.0, "replay": 1.0}


def make_proposer(
    name: str, options: Mapping[str, str] | None = None, log: Callable[[str], None] = lambda _: None
) -> Proposer:
    """A proposer by its name.

    options: texts by name, see OPTIONS. log: is told what a model's answers held. Raises UsageError for an unknown name
    or option, or a value that is wrong, and MachineError where an extra is not installed.
    """
    if name not in OPTIONS:
        raise unknown("proposer", name, OPTIONS)
    given = {key: value for key, value in (options or {}).items() if value}
    for key in given:
        if key not in OPTIONS[name]:
            allowed = ", ".join(OPTIONS[name]) or "none"
            raise UsageError(f"proposer {name}: unknown option {key!r}; allowed: {allowed}")
    chosen = {**OPTIONS[name], **given}
    if name in STRATEGIES:
        return _engineer(name, chosen, log)
    if name == "tpe":
        return TpeProposer(_whole(name, chosen, "startup", least=0))
    if name == "evolutionary":
        return EvolutionaryProposer(_whole(name, chosen, "islands", most=1000))
    if name == "scripted":
        if not chosen["file"]:
            raise UsageError("proposer scripted: give its candidates, one as JSON on each line: file=FILE")
        return ScriptedProposer(chosen["file"])
    return RandomProposer() if name == "random" else ExhaustiveProposer()


def with_whole_paths(options: Mapping[str, str]) -> dict[str, str]:
    """The options with paths that hold in every working directory, as a run may be resumed in another one."""
    found = dict(options)
    for name in ("file", "record"):
        if found.get(name):
            found[name] = str(Path(found[name]).resolve())
    carrier, _, where = found.get("model", "").partition(":")
    if carrier in ("mailbox", "replay") and where:
        found["model"] = f"{carrier}:{Path(where).resolve()}"
    return found


def make_model(spec: str, name: str = "") -> Model:
    """A model by its carrier: http:URL with the model's name, mailbox:FOLDER or replay:FILE.

    Raises UsageError for anything else.
    """
    carrier, _, where = spec.partition(":")
    if not where or carrier not in _TIMEOUTS:
        raise UsageError(f"model {spec!r}: allowed are http:URL (and model_name=NAME), mailbox:FOLDER and replay:FILE")
    if carrier == "http":
        return HttpModel(where, name)
    return FileTransport(Path(where)) if carrier == "mailbox" else Replay(Path(where))


def _engineer(strategy: str, chosen: Mapping[str, str], log: Callable[[str], None]) -> Proposer:
    model = make_model(chosen["model"], chosen["model_name"])
    if chosen["record"]:
        model = Recorder(model, Path(chosen["record"]))
    default = _TIMEOUTS[chosen["model"].partition(":")[0]]
    seconds = _whole(strategy, chosen, "timeout") if chosen["timeout"] else default
    limits = AnswerLimits(tokens=_whole(strategy, chosen, "answer_tokens"), seconds=seconds)
    return EngineerProposer(strategy, model, limits, _whole(strategy, chosen, "tokens"), log)


def _whole(proposer: str, options: Mapping[str, str], key: str, least: int = 1, most: int = 10**12) -> int:
    text = options[key]
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most)) and least <= int(text) <= most):
        allowed = f"a whole number of at least {least} and at most {most}"
        raise UsageError(f"proposer {proposer}: {key}={text[:40]!r}: {allowed} is needed")
    return int(text)
