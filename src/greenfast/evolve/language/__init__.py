"""Candidates from a language model: the protocol, three transports, the prompts, and the parser of answers."""
