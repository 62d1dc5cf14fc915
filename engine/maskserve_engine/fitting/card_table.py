"""Table of the rows and templates that cards of several sizes hold of a model, by form of its
weights. It loads no weights.

`maskserve serve --plan` runs it:

    python -m maskserve_engine.fitting.card_table CONFIG.toml
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from msgspec.structs import replace

from maskserve_common.config import (
    WEIGHT_FORMS,
    Config,
    ConfigError,
    Stage,
    model_name,
    sharing_the_device,
)
from maskserve_common.config_file import load_config
from maskserve_engine.cache.host_cache import bytes_in_use
from maskserve_engine.checkpoints.request import Card
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.families.registry import load_adapter
from maskserve_engine.fitting.entry_store import template_layout
from maskserve_engine.fitting.memory import (
    GPU_SHARE,
    adapter_bytes,
    call_bytes,
    control_bytes,
    default_passes,
    denoiser_bytes,
    is_loaded,
    refresh_bytes,
    service_bytes,
    step_bytes,
    weight_bytes,
)
from maskserve_engine.planning.cost_model import H100, estimate
from maskserve_engine.spec.model_spec import ModelSpec

CARDS = (16, 24, 40, 48, 80)
"""Sizes of cards in GB, as they are sold; nearly GiB."""
_USABLE = 0.98
"""Share of these sizes, in GiB, that a program can use: 23.5 GiB of a card of 24 GB."""
_CONTEXT = 2**29
"""Bytes that CUDA takes for each worker process on the card; assumed."""
_ENOUGH_ROWS, _ENOUGH_TEMPLATES = 4, 8
"""Rows and templates that are enough: no settings that cost more for an edit are then tried."""
_META_DEVICE = "meta"
"""torch's device for shapes without weights."""
_GIB = 2**30
Settings = tuple[tuple[str, str | bool], ...]
"""Keys and values of `[model]`."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Capacity of a device with given settings. All sizes are bytes."""

    form: str
    """Form of the denoiser's weights."""
    settings: Settings
    """Settings beside `weights` that differ from the configured ones."""
    weights: int
    encoder: int
    decoder: int
    rows: int
    step: int
    """Memory of a step of these rows, with LoRAs, ControlNets and placed keys and values."""
    templates: int
    missing: int
    """Bytes that are missing for these rows and, with a cache, one template; 0: they fit."""

    @property
    def enough(self) -> bool:
        return (
            not self.missing and self.rows >= _ENOUGH_ROWS and self.templates >= _ENOUGH_TEMPLATES
        )

    @property
    def worth(self) -> tuple[int, int, int, int]:
        """Sort key of fits that are not enough; the largest is the best."""
        if self.missing:
            return 0, 0, 0, -self.missing
        capacity = min(self.rows, _ENOUGH_ROWS) * min(self.templates, _ENOUGH_TEMPLATES)
        return capacity, self.rows, self.templates, 0

    def settings_text(self, configured: Config) -> str:
        """Return the settings that differ from the configured ones, as in a configuration file."""
        lines = [f"{key} = {json.dumps(value)}" for key, value in self.settings]
        if self.form != configured.model.weights:
            lines.insert(0, f'weights = "{self.form}"')
        if self.rows != configured.engine.max_rows:
            lines.append(f"max_rows = {self.rows}")
        return ", ".join(lines)


class Shapes:
    """A model's sizes, from its folder's config.json and the headers of its files.

    Args:
        config: configuration of a worker, whose device is ignored. Dtype `auto` means bfloat16, as
            on a GPU.

    Raises:
        ConfigError: the folder has no model that can be served, or a part of unknown size.
    """

    def __init__(self, config: Config) -> None:
        self.configured = config
        dtype = "bfloat16" if config.model.dtype == "auto" else config.model.dtype
        plain = replace(config.model, device=_META_DEVICE, dtype=dtype, weights="bf16")
        self.config = replace(config, model=plain)
        self.adapter: Adapter = load_adapter(self.config)
        self.spec: ModelSpec = self.adapter.spec
        self.size = template_layout(self.config, self.adapter, estimate(H100))[1]
        self._needs = cache(self._needs_of)

    @property
    def name(self) -> str:
        return model_name(self.configured)

    @cached_property
    def weights(self) -> dict[str, int]:
        """Bytes of the denoiser in each form that it supports."""
        return denoiser_bytes(self.config, WEIGHT_FORMS)

    def fit(self, form: str, usable: int, *, running: bool = False) -> Fit:
        """Return the first settings with which a device holds enough rows and templates; if there
        are none, those with which it holds most.

        Args:
            form: form of the denoiser's weights.
            usable: bytes of the device.
            running: whether encoder and decoder may already have taken their memory.
        """
        fits = []
        for settings in self._settings():
            for rows in range(self.configured.engine.max_rows, 0, -1):
                fits.append(self.fit_with(form, settings, rows, usable, running=running))
                if fits[-1].enough:
                    return fits[-1]
        return max(fits, key=lambda fit: fit.worth)

    def fit_with(
        self, form: str, settings: Settings, rows: int, usable: int, *, running: bool = False
    ) -> Fit:
        """Return the capacity with these settings; other arguments are those of `fit`."""
        encoder, decoder, pending_bytes = self._needs(settings, usable, running)
        step = self._step(rows)
        free_bytes = usable - self.weights[form] - pending_bytes - step
        return Fit(
            form=form,
            settings=settings,
            weights=self.weights[form],
            encoder=encoder,
            decoder=decoder,
            rows=rows,
            step=step,
            templates=self._templates(free_bytes),
            missing=max(0, self.least - free_bytes),
        )

    def _settings(self) -> Iterator[Settings]:
        """Yield the settings to try beside the weights' form. Those that slow down an edit least
        come first.
        """
        yield ()
        if self.configured.stages.service:
            return  # the service has encoder and decoder
        plain_t5 = self.spec.t5 and self.configured.model.t5_weights == "bf16"
        if plain_t5 and not self.configured.model.t5_offload:
            yield (("t5_weights", "int8"),)
            yield (("t5_offload", True),)
        if not self.configured.model.encoder_device:
            yield (("encoder_device", "cpu"),)
            if not self.configured.model.decoder_device:
                yield ("encoder_device", "cpu"), ("decoder_device", "cpu")

    def _needs_of(self, settings: Settings, usable: int, running: bool) -> tuple[int, int, int]:
        """Return the bytes of the encoder, those of the decoder, and the bytes of both and of CUDA
        that are not taken yet; arguments as in `fit`.
        """
        config = replace(self.config, model=replace(self.config.model, **dict(settings)))
        stage_bytes, pending_bytes = [], 0 if running else _CONTEXT
        stages: tuple[Stage, ...] = ("encoder", "decoder")
        for stage in stages:
            stage_config = sharing_the_device(config, stage)
            if config.stages.service or stage_config.model.device != _META_DEVICE:
                stage_bytes.append(0)
                continue
            work, weights = (
                call_bytes(stage_config, stage, self.spec, "cuda", usable),
                weight_bytes(stage_config, stage, self.spec),
            )
            stage_bytes.append(work + weights)
            is_resident = running and is_loaded(self.configured, stage)
            pending_bytes += work + (0 if is_resident else weights + _CONTEXT)
        return stage_bytes[0], stage_bytes[1], pending_bytes

    def _step(self, rows: int) -> int:
        engine = replace(self.config.engine, max_rows=rows)
        config = replace(self.config, engine=engine)
        total = step_bytes(config, self.adapter) + self.size.step_bytes
        if config.cache.enabled and self.spec.keeps_placed:
            total += config.cache.placed_on("cuda")
        return total + adapter_bytes(config) + control_bytes(config, self.adapter)

    @property
    def least(self) -> int:
        """Return the least bytes of a worker's cache, which hold one template; 0: no cache."""
        cache_config = self.config.cache
        if not cache_config.enabled:
            return 0
        return cache_config.budget_bytes or int(self.size.nbytes / GPU_SHARE) + 1

    def _templates(self, left: int) -> int:
        cache_config = self.config.cache
        if not cache_config.enabled or left < self.least:
            return 0
        return (cache_config.budget_bytes or int(GPU_SHARE * left)) // self.size.nbytes


def check_fits(config: Config, free: int) -> None:
    """Check that a model can run on the denoiser's device, before any part of it is loaded.

    Args:
        config: configuration of the worker.
        free: free bytes of the device.

    Raises:
        ConfigError: it cannot; the text names settings with which it can, if there are any.
    """
    shapes, form, rows = Shapes(config), config.model.weights, config.engine.max_rows
    if form not in shapes.weights:
        return  # the model has no such form, which the load will report
    requested_fit = shapes.fit_with(form, (), rows, free, running=True)
    if requested_fit.missing <= shapes.least:  # it fits, if need be without a template
        return
    needed = ", ".join(
        f"{part} {getattr(requested_fit, part) / _GIB:.1f}"
        for part in ("weights", "encoder", "decoder")
    )
    message = (
        f"[model] path: {shapes.name} does not fit the device, of which {free / _GIB:.1f} GiB are "
        f"free: {needed}, a step of {rows} rows {requested_fit.step / _GIB:.1f} GiB; "
    )
    for other_form in [
        candidate
        for candidate in dict.fromkeys((form, "int8", "nf4"))
        if candidate in shapes.weights
    ]:
        fit = shapes.fit(other_form, free, running=True)
        settings = fit.settings_text(config)
        if not fit.missing:
            raise ConfigError(
                f"{message}{settings} would: rows {fit.rows}, templates {fit.templates}"
            )
    raise ConfigError(f"{message}{fit.missing / _GIB:.1f} GiB are missing with {settings}")


def fits(shapes: Shapes) -> Iterator[tuple[int, str, Fit]]:
    """Yield for each card its size in GB, forms of nearly the same size, and how they fit."""
    by_size: dict[float, list[str]] = {}
    for form, nbytes in shapes.weights.items():
        by_size.setdefault(round(nbytes / _GIB, 1), []).append(form)
    for card in CARDS:
        for forms in by_size.values():
            form_names = "GGUF" if shapes.configured.model.gguf else ", ".join(forms)
            yield card, form_names, shapes.fit(forms[0], int(_USABLE * card * _GIB))


def best_fits(shapes: Shapes) -> tuple[Card, ...]:
    """Return for each card the first form that holds enough, or else the one that holds most."""
    best: dict[int, tuple[str, Fit]] = {}
    for card, forms, fit in fits(shapes):
        _, other = best.get(card, ("", None))
        if other is None or (not other.enough and (fit.enough or fit.worth > other.worth)):
            best[card] = forms, fit
    return tuple(
        Card(
            card, forms, fit.rows, fit.templates, fit.missing,
            _settings_beside_form(shapes.configured, fit),
        )
        for card, (forms, fit) in best.items()
    )  # fmt: skip


def _settings_beside_form(config: Config, fit: Fit) -> str:
    return fit.settings_text(replace(config, model=replace(config.model, weights=fit.form)))


def text(shapes: Shapes) -> str:
    """Return the table in Markdown; forms of nearly the same size share a line."""
    spec, config = shapes.spec, shapes.configured
    size = shapes.size
    lines = [
        f"{shapes.name}: {spec.native_resolution}x{spec.native_resolution}, "
        f"{shapes.config.model.dtype}, cached activations in {config.cache.entry_format}: a "
        f"template takes {size.nbytes / _GIB:.2f} GiB. Sizes in GiB; settings beside the "
        "configured ones.",
        "",
        "| card | weights | denoiser | encoder | decoder | rows | step | templates | settings |",
        "|---" * 9 + "|",
    ]
    for card, forms, fit in fits(shapes):
        sizes = [
            f"{part_bytes / _GIB:.1f}" for part_bytes in (fit.weights, fit.encoder, fit.decoder)
        ]
        columns = ["–", f"{fit.step / _GIB:.1f}", "–", f"{fit.missing / _GIB:.1f} missing"]
        if not fit.missing:
            settings = _settings_beside_form(config, fit)
            columns = [str(fit.rows), columns[1], str(fit.templates), settings]
        cells = [f"{card} GB", forms, *sizes, *columns]
        lines.append(f"| {' | '.join(cells)} |")
    step_cache = refresh_bytes(shapes.config, shapes.adapter, "cuda")
    if config.cache.enabled and step_cache:
        in_use = bytes_in_use(step_cache, shapes.adapter.entry_blocks)
        lines += [
            "",
            f"A pass of an edit with refresh steps keeps {step_cache / _GIB:.2f} GiB at most, in "
            "place of templates. Without room for it on the device it lies in host memory, and the "
            f"device holds {in_use / _GIB:.2f} GiB of it at once."
            + " By default an edit has two."
            * (default_passes(shapes.config, spec) - 1),
        ]
    if config.controls.service and config.controls.folder:
        service_total = service_bytes(shapes.config, shapes.adapter)
        lent, modules = config.controls.ipc_bytes, shapes.adapter.net_module_bytes
        of_model = f", {modules / _GIB:.2f} of modules of the model" * (modules > 0)
        lines += [
            "",
            f"The ControlNet service takes {service_total / _GIB:.2f} GiB of its own device "
            "for one worker "
            f"of {config.engine.max_rows} rows: {config.controls.device_bytes / _GIB:.2f} of "
            f"ControlNets{of_model}, {lent / _GIB:.2f} lent ([controls] ipc_bytes), and what steps "
            "take.",
        ]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    try:
        print(text(Shapes(load_config(Path(argv[1])))))
    except ConfigError as error:
        print(f"maskserve serve: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv))
