"""What scripts/bench_executor.py is made of: workloads, variants, measuring, table."""
