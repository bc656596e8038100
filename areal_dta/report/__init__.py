"""What the user sees of a run: metrics.jsonl, a live table, the reward curve."""

from areal_dta.report.step_metrics import MetricsWriter, StepMetrics, read_metrics

__all__ = ["MetricsWriter", "StepMetrics", "read_metrics"]
