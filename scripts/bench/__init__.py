"""Parts of the benchmarks: workloads, variants, measuring, tables."""
