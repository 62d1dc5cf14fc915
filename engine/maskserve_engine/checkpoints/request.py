"""A checkpoint to read, and what its header says: values between processes."""

from __future__ import annotations

import msgspec


class CheckpointRequest(msgspec.Struct, frozen=True):
    """A checkpoint and what stands beside it, as files and folders of this host."""

    file: str
    base: str = ""
    """Folder in diffusers format, with the configs and the parts that the file lacks."""
    text_encoders: tuple[str, ...] = ()
    vae: str = ""
    folder: str = ""
    """Folder to write. Empty: describe the file alone."""
    weights: bool = True
    """Whether to write weights; otherwise the folder has only the model's sizes."""


class Description(msgspec.Struct, frozen=True):
    """A checkpoint by its header."""

    cls: str
    """Class of the denoiser; empty: its names are those of diffusers, or unknown."""
    base: str
    """Hub id of diffusers' folder for it; empty: several fit."""
    form: str
    nbytes: int
    vae: bool
    text_encoders: int
    """Number of text encoders in the file."""


class Card(msgspec.Struct, frozen=True):
    """Rows and templates that a card holds of a model with one form of its weights."""

    gigabytes: int
    """Size of the card, as it is sold."""
    weights: str
    """Forms of the denoiser's weights that take about the same memory."""
    rows: int
    templates: int
    missing: int
    """Bytes that are missing for one row and, with a cache, one template; 0: they fit."""
    settings: str
    """Settings beside the form of the weights, as in a configuration file."""


class ModelReport(msgspec.Struct, frozen=True):
    """A model as a process of its own reads it, without weights."""

    description: Description | None = None
    """None: the model is a folder."""
    missing: tuple[str, ...] = ()
    """A sentence for each part without weights, with the flag that names them."""
    cards: tuple[Card, ...] = ()
