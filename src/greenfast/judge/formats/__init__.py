"""Importers for problems and solutions of FlashInfer-Trace, SOL-ExecBench, KernelBench and others."""
