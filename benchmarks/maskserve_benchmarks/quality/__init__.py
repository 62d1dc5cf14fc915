"""What caching costs in picture quality: systems, metrics, report."""
