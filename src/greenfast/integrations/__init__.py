"""Integrations: PyTorch through a switch, Hugging Face transformers, and its continuous batching."""
