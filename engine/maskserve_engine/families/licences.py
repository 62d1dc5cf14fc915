"""Licences under which publishers give the weights of the models that are served.

A folder or a file may say another: then it decides. Nothing here is advice; read the licence.
"""

from __future__ import annotations

from types import MappingProxyType

_NON_COMMERCIAL = "non-commercial"
_APACHE = "Apache 2.0"
_KLEIN = "4B Apache 2.0, 9B non-commercial"
_STABILITY = "Stability AI Community"
_OPEN_RAIL = "CreativeML Open RAIL++-M"
_FLUX1 = f"dev {_NON_COMMERCIAL}, schnell {_APACHE}"
LICENCES = MappingProxyType(
    {
        "FluxFillPipeline": _NON_COMMERCIAL,
        "FluxPipeline": _FLUX1,
        "FluxImg2ImgPipeline": _FLUX1,
        "FluxInpaintPipeline": _FLUX1,
        "FluxKontextPipeline": _NON_COMMERCIAL,
        "FluxKontextInpaintPipeline": _NON_COMMERCIAL,
        "Flux2KleinPipeline": _KLEIN,
        "Flux2KleinInpaintPipeline": _KLEIN,
        "Flux2KleinKVPipeline": _NON_COMMERCIAL,
        "Flux2Pipeline": _NON_COMMERCIAL,
        "Flux3DistilledModularPipeline": _NON_COMMERCIAL,
        "Flux3ModularPipeline": _NON_COMMERCIAL,
        "QwenImage21Pipeline": "Qwen research",
    }
)
"""Licences by the class in a folder's index."""
_BY_FAMILY = MappingProxyType(
    {
        "chroma": _APACHE,
        "joyimage": _APACHE,
        "longcat": _APACHE,
        "qwen_image": _APACHE,
        "z_image": _APACHE,
        "sd3": _STABILITY,
        "unet": _OPEN_RAIL,
    }
)


def published_licence(family: str, pipeline: str) -> str:
    """Return the licence of published weights; empty: none is known."""
    return LICENCES.get(pipeline) or _BY_FAMILY.get(family, "")
