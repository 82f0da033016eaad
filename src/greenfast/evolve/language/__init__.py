"""A language model as the author of candidates: the protocol, its three carriers, prompts, and what answers hold."""
