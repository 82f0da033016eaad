"""Importers for problems and solutions of FlashInfer-Trace, SOL-ExecBench and KernelBench."""
