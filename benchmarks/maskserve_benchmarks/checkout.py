"""Paths in the checkout."""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
DEMO_MODEL = CHECKOUT / "assets" / "models" / "demo"
DEMO_EDIT = DEMO_MODEL.with_name("demo-edit")
DEMO_UNET = DEMO_MODEL.with_name("demo-unet")
