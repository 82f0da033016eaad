"""EvoEngineer's strategies with a language model (arXiv 2510.03760)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from greenfast.evolve.language.answers import parse_answer
from greenfast.evolve.language.model import AnswerLimits, Model, estimate_tokens, prompt_digest
from greenfast.evolve.language.prompts import prompt
from greenfast.evolve.proposal import Candidate, Context, Evaluation, ProposerError

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
