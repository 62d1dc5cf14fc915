"""Where the checkout lies that this code belongs to."""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
