"""Masks by name: CLIPSeg, from a folder saved by transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from msgspec import Meta
from PIL import Image
from transformers import CLIPSegForImageSegmentation, CLIPSegProcessor

from maskserve_common.errors import InvalidRequest
from maskserve_engine.stages.loader import device_of
from maskserve_workflows.node_request import ModelSetup, NodeRequest, one_by_one
from maskserve_workflows.node_types import node, node_model
from maskserve_workflows.pictures import Grey, Pixels, mask_pixels, read_mask, read_picture
from maskserve_workflows.ports import Mask, Picture, Verdict, Words
from maskserve_workflows.values import Judgement

Share = Annotated[float, Meta(ge=0, le=1)]


@node(model="find", price_s=0.1)
def find(picture: Picture, name: Words | str, *, threshold: Share = 0.5) -> Mask:
    """Find the object of this name in the picture. If there is none, the run ends with an error."""
    raise NotImplementedError


@node(model="find", price_s=0.1)
def shows(
    picture: Picture, mask: Mask, name: Words | str, *, threshold: Share = 0.5, enough: Share = 0.2
) -> Verdict:
    """Check that the object of this name is in the mask, and fills at least the share `enough` of
    it.
    """
    raise NotImplementedError


@node_model("find", source="find", kinds=("clipseg",))
class FindNodes:
    """CLIPSeg model: masks by name."""

    def __init__(self, setup: ModelSetup) -> None:
        self._limits, self._device = setup.config.limits, device_of(setup.config)
        self._processor: Any = CLIPSegProcessor.from_pretrained(setup.source)
        model: Any = CLIPSegForImageSegmentation.from_pretrained(setup.source)
        self._model = model.to(self._device).eval()

    def run(self, calls: Sequence[NodeRequest]) -> Iterable[dict[str, Any] | Exception]:
        """Yield each call's outputs; each picture is encoded once."""
        features_by_picture: dict[bytes, Any] = {}
        return one_by_one(lambda call: self._run(call, features_by_picture), calls)

    def _run(self, request: NodeRequest, features: dict[bytes, Any]) -> dict[str, Any]:
        name, encoded = request.inputs["name"], request.inputs["picture"]
        pixels = read_picture(encoded, self._limits)
        if encoded not in features:
            features[encoded] = self.features(pixels)
        matched = self.find_mask(
            features[encoded], pixels.shape[:2], name, request.settings["threshold"]
        )
        if request.node == "find":
            if not matched.any():
                raise InvalidRequest("name", f"{name[:60]!r} is not found in the picture")
            return {"mask": mask_pixels(matched)}
        mask = read_mask(request.inputs["mask"], self._limits, pixels.shape[:2])
        score = float(matched[mask].mean()) if mask.any() else 0.0
        return {"verdict": Judgement(round(score, 4), score >= request.settings["enough"])}

    @torch.inference_mode()
    def features(self, pixels: Pixels) -> Any:
        """Return the decoder's input for a picture [H, W, 3]: activations of some layers."""
        picture = Image.fromarray(pixels)  # of an array three rows would be taken for channels
        processed = self._processor.image_processor(images=[picture], return_tensors="pt")
        states = self._model.clip.vision_model(
            processed["pixel_values"].to(self._device), output_hidden_states=True
        ).hidden_states
        return [states[layer + 1] for layer in self._model.extract_layers]

    @torch.inference_mode()
    def find_mask(self, features: Any, size: tuple[int, ...], name: str, threshold: float) -> Grey:
        """Return the mask [H, W] of the named thing."""
        # The tokenizer's own limit of words; what is beyond it is left out.
        words = self._processor.tokenizer(
            [name], return_tensors="pt", padding=True, truncation=True
        ).to(self._device)
        named = self._model.clip.get_text_features(**words).pooler_output
        logits = self._model.decoder(features, named).logits
        sized = torch.nn.functional.interpolate(
            logits.reshape(1, 1, *logits.shape[-2:]), (size[0], size[1]), mode="bilinear"
        )
        above_threshold: Grey = (torch.sigmoid(sized[0, 0]) > threshold).cpu().numpy()
        return np.ascontiguousarray(above_threshold)
