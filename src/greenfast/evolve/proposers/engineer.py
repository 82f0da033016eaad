"""EvoEngineer's strategies around a language model (arXiv 2510.03760)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from greenfast.evolve.language.answers import parse_answer
from greenfast.evolve.language.model import AnswerLimits, Model, estimated_tokens, prompt_digest
from greenfast.evolve.language.prompts import prompt
from greenfast.evolve.proposal import Candidate, Context, Evaluation, ProposerError

#: Prompts for one batch before the proposer gives up; the most that is told of one answer's faults.
_TRIES, _FAULTS = 3, 8
_SPENT = re.compile(r"\b(\d+) tokens$")


class EngineerProposer:
    """Asks a model for candidates, within a budget of tokens.

    An answer without a usable candidate is asked for again, with what was wrong. ``counts``: answers, candidates,
    faults and tokens of this process. The tokens that were spent stand in the candidates' ``origin``, so that the
    budget holds for a resumed run too.
    """

    def __init__(
        self,
        strategy: str,
        model: Model,
        limits: AnswerLimits,
        budget: int,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Nothing is asked yet.

        strategy: of prompts.STRATEGIES. limits: of each answer. budget: tokens of prompts and answers in the whole run.
        log: is told of every answer, and why what was refused.
        """
        self._strategy, self._model, self._limits, self._budget, self._log = strategy, model, limits, budget, log
        self._known: set[str] = set()
        self._spent = 0  # as the evaluated candidates say
        self._unobserved = 0  # since then
        self.counts: Counter[str] = Counter()

    def propose(self, context: Context) -> Sequence[Candidate]:
        """Candidates of one answer; none once the budget is spent, which is logged.

        Raises ProposerError where the model does not answer, or three answers hold nothing new.
        """
        faults: list[str] = []
        for _ in range(_TRIES):
            asked = prompt(context, self._strategy, faults)
            left = self._budget - self._spent - self._unobserved - estimated_tokens(asked)
            if left <= 0:
                self._log(f"the budget of {self._budget} tokens is spent")
                return []
            limits = msgspec.structs.replace(self._limits, tokens=min(self._limits.tokens, left))
            answer = self._model.complete(asked, limits)
            self._unobserved += answer.tokens
            found, wrong = self._fresh(answer.text, context)
            self.counts.update(answers=1, tokens=answer.tokens, candidates=len(found), faults=len(wrong))
            self._log(f"prompt {prompt_digest(asked)}: {len(found)} taken, {answer.tokens} tokens, refused: {wrong}")
            if found:
                origin = f"{self._strategy}, {self._unobserved} tokens"
                first = msgspec.structs.replace(found[0], origin=origin)
                return [first, *(msgspec.structs.replace(c, origin=self._strategy) for c in found[1:])]
            faults += wrong[:_FAULTS]
        raise ProposerError(f"{_TRIES} answers of the model held no new candidate; the last: {'; '.join(faults[-2:])}")

    def observe(self, evaluations: Sequence[Evaluation]) -> None:
        """Remember what was asked for, and what it cost."""
        for evaluation in evaluations:
            self._known.add(evaluation.candidate.key)
            if spent := _SPENT.search(evaluation.candidate.origin):
                self._spent += int(spent[1])
                self._unobserved = 0

    def _fresh(self, text: str, context: Context) -> tuple[list[Candidate], list[str]]:
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
