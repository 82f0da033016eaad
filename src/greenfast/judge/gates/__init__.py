"""The five gates."""
