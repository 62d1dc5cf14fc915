"""The kind of an edit: it follows from the edit's pictures, and each kind has its settings
(docs/adr/0086).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from msgspec.structs import fields, replace

from maskserve_common.contracts.request import EditKind
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import InvalidRequest

MOST_PICTURES: Final = 10
"""Most pictures that a served model takes, with the source."""
_OF_MASKS = (
    "mask_mode",
    "mask_dilate",
    "mask_feather",
    "mask_ring",
    "crop_to_mask",
    "crop_padding",
)
_WITHOUT_EFFECT: dict[EditKind, tuple[str, ...]] = {
    "inpaint": ("size", "region"),
    "edit": _OF_MASKS,
    "generate": (*_OF_MASKS, "strength", "region"),
}
_OF_OTHER_KINDS: dict[EditKind, tuple[str, ...]] = {
    "inpaint": (),
    "edit": ("expand", "mask_from"),
    "generate": ("expand", "mask_from", "template_id", "reference_ids"),
}
"""Settings that would make an edit of another kind."""
_CACHED = ("own", "require")
"""Values of `cache` that ask for cached tokens, which an edit without a mask has not."""
_DEFAULTS = {field.name: field.default for field in fields(EditSettings)}
_PICTURES: dict[EditKind, str] = {
    "inpaint": "IMAGE with MASK",
    "edit": "IMAGE alone",
    "generate": "neither IMAGE nor MASK",
}


def edit_kind(settings: EditSettings, *, image: bool, mask: bool) -> EditKind:
    """Return the kind of an edit.

    Args:
        settings: settings of the edit.
        image: whether IMAGE has bytes.
        mask: whether MASK has bytes.

    Raises:
        InvalidRequest: there is a mask without a source.
    """
    masks = {
        "MASK": mask,
        "SETTINGS.expand": any(settings.expand),
        "SETTINGS.mask_from": settings.mask_from is not None,
    }
    has_source = image or settings.template_id is not None
    for name, is_present in masks.items():
        if is_present and not has_source:
            raise InvalidRequest(
                "IMAGE",
                f"is missing, and {name} needs a source",
                "an image, or SETTINGS.template_id of a registered template",
            )
    return kind_of(source=has_source, masked=any(masks.values()))


def check_references(
    pictures: Sequence[bytes | memoryview], settings: EditSettings, most: int
) -> None:
    """Refuse pictures that a model does not take.

    Args:
        pictures: elements of IMAGE: the source, or nothing for a template, then references. The
            last picture is the IP-Adapter's, if the edit has one.
        settings: settings of the edit.
        most: most pictures that the model sees, with the source.

    Raises:
        InvalidRequest: naming IMAGE or its element, or a setting.
    """
    reference_count, adapts = len(settings.reference_ids), settings.ip_adapter is not None
    if len(pictures) + reference_count < 2:
        if adapts:
            raise InvalidRequest(
                "SETTINGS.ip_adapter",
                "is given, and no picture for it",
                "a picture behind the source in IMAGE, or SETTINGS.reference_ids",
            )
        return
    most += adapts
    is_alone = adapts and len(pictures) == 2 and not reference_count
    if len(pictures) > 1 and not pictures[0] and settings.template_id is None and not is_alone:
        raise InvalidRequest(
            "IMAGE[0]",
            "is empty, and further pictures follow",
            "the picture to edit, or SETTINGS.template_id of a registered template",
        )
    if len(pictures) + reference_count > most:
        accepted = f"up to {most} with this model" if most > 1 else "one with this model"
        if reference_count:
            problem = f"make {len(pictures) + reference_count} pictures with those of IMAGE"
            raise InvalidRequest("SETTINGS.reference_ids", problem, accepted)
        raise InvalidRequest("IMAGE", f"has {len(pictures)} pictures", accepted)
    for index, picture in enumerate(pictures):
        if index and not picture:
            raise InvalidRequest(f"IMAGE[{index}]", "is empty", "a picture")


def kind_of(*, source: bool, masked: bool) -> EditKind:
    """Return the kind of an edit, by whether it has a source and a mask, which needs one."""
    if not source:
        return "generate"
    return "inpaint" if masked else "edit"


def check_kind(
    settings: EditSettings,
    kind: EditKind,
    served: Collection[EditKind],
    *,
    references: bool,
    alpha: bool,
    regions: bool = False,
) -> None:
    """Refuse an edit of a kind that a model does not have, and settings without effect in its kind.

    Args:
        settings: the client's settings.
        kind: kind of the edit.
        served: kinds that the model has.
        references: whether the model sees the source as reference tokens at every step.
        alpha: whether the model draws an alpha channel.
        regions: whether the worker's edits find their regions (`region: auto`).

    Raises:
        InvalidRequest: naming the tensor or `SETTINGS.<key>`.
    """
    if kind not in served:
        raise _not_served(kind, served)
    check_settings_of(settings, kind)
    if kind == "inpaint":
        return
    if settings.background == "transparent" and not alpha:
        problem = "is transparent, and this model draws no transparency"
        raise InvalidRequest("SETTINGS.background", problem, "auto or opaque")
    if kind == "edit":
        _check_strength(settings.strength, references=references)
    if settings.region != "off" and not regions:
        problem = f"is {settings.region}, and this worker's edits find no regions"
        raise InvalidRequest("SETTINGS.region", problem, "off")


def check_settings_of(settings: EditSettings, kind: EditKind) -> None:
    """Refuse settings that have no effect in a kind of edit, whatever the model.

    Raises:
        InvalidRequest: naming `SETTINGS.<key>`.
    """
    for name in (*_WITHOUT_EFFECT[kind], *_OF_OTHER_KINDS[kind]):
        if getattr(settings, name) != _DEFAULTS[name]:
            raise InvalidRequest(f"SETTINGS.{name}", *_no_effect(name))
    if kind != "inpaint" and settings.cache in _CACHED:
        problem = f"is {settings.cache}, and nothing is cached without MASK"
        raise InvalidRequest("SETTINGS.cache", problem, "auto or off")


def settings_for(settings: EditSettings, kind: EditKind) -> EditSettings:
    """Return settings of several edits as one of this kind takes them: without those that have no
    effect in it or would make an edit of another kind.
    """
    names = (*_WITHOUT_EFFECT[kind], *_OF_OTHER_KINDS[kind])
    dropped = {name: _DEFAULTS[name] for name in names}
    if kind != "inpaint" and settings.cache in _CACHED:
        dropped["cache"] = _DEFAULTS["cache"]
    return replace(settings, **dropped)


def _no_effect(name: str) -> tuple[str, str]:
    """Return why a setting has no effect, and the accepted values."""
    if name == "size":
        return "has no effect with MASK", "auto: the answer has IMAGE's size"
    if name == "region":
        return "has an effect only with IMAGE and without MASK", "off"
    if name == "strength":
        return "has no effect without IMAGE", "1"
    if name in _OF_OTHER_KINDS["generate"]:
        return "needs a source, and this picture has none", f"no {name}"
    return "has no effect without MASK", f"no {name}"


def _not_served(kind: EditKind, served: Collection[EditKind]) -> InvalidRequest:
    accepted = " or ".join(pictures for name, pictures in _PICTURES.items() if name in served)
    if kind == "inpaint":
        return InvalidRequest("MASK", "is given, and this model repaints no masks", accepted)
    if set(served) == {"inpaint"}:
        problem = "is missing: this model repaints masks only"
        return InvalidRequest("MASK" if kind == "edit" else "IMAGE", problem, accepted)
    if kind == "edit":
        return InvalidRequest("MASK", "is missing: this model edits no whole pictures", accepted)
    problem = "is missing: this model makes no pictures without a source"
    return InvalidRequest("IMAGE", problem, accepted)


def _check_strength(strength: float, *, references: bool) -> None:
    if references:
        if strength < 1:
            raise InvalidRequest(
                "SETTINGS.strength",
                "has no effect without MASK: this model sees IMAGE at every step",
                "1",
            )
    elif strength == 1:
        raise InvalidRequest(
            "SETTINGS.strength", "is 1, at which IMAGE has no effect without MASK", "below 1"
        )
