"""Problems and solutions in the formats of others: FlashInfer-Trace, SOL-ExecBench and KernelBench."""
