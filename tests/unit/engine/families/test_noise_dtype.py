"""Half-precision models begin with the noise of the pipeline, which draws it in its own dtype: the
same numbers in float32 and in half precision are different ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from maskserve_common.contracts.request import EditKind
from maskserve_engine.families.mmdit.preparation import pack_latents
from tests.support.family_cases import CASES, FamilyModel


class _Seen(Exception):
    """Ends a pipeline at its first call of the denoiser."""


def first_input(model: FamilyModel, edit: Any) -> Tensor:
    """The [n, 4C] tokens that the denoiser of diffusers' pipeline is given first."""
    seen: list[Tensor] = []

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["hidden_states"][0] if kwargs.get("hidden_states") is not None
                    else pack_latents(args[0][0][:, 0]))  # fmt: skip
        raise _Seen

    with model.denoiser.register_forward_pre_hook(look, with_kwargs=True), pytest.raises(_Seen):
        model.oracle(edit)
    return seen[0]


@pytest.mark.parametrize("kind", ["edit", "generate"])
@pytest.mark.parametrize("name", ["flux-base", "klein", "flux3-klein", "z-image"])
def test_the_first_input_in_half_precision_is_the_pipeline_s(
    name: str, kind: EditKind, tmp_path: Path
) -> None:
    model = FamilyModel(CASES[name], tmp_path / "m", dtype="bfloat16")
    model.pipeline.to(torch.bfloat16)
    edit = model.edit(0, kind)
    row: Any = model.adapter.dense_row(model.encoded(edit))
    expected, latents = first_input(model, edit), row.latents.to(torch.bfloat16)
    torch.testing.assert_close(latents, expected[: len(latents)], rtol=0.0, atol=0.05)
