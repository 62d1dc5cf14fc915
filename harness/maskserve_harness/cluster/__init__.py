"""Measuring a router: workers whose steps take modelled time, load, and the comparison."""
