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
