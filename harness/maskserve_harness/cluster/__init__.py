"""Measuring a router: workers whose steps take modelled time, and harm under load."""
