"""The quality of edited pictures: systems, metrics, report."""
