"""Chooses the model of an edit among those that the workers serve."""

from __future__ import annotations

from collections import Counter

from maskserve_common.contracts.request import EditKind
from maskserve_common.errors import InvalidRequest
from maskserve_router.workers.pool import Pool


def model_of(pool: Pool, default: str, name: str | None, kind: EditKind, pictures: int) -> str:
    """Return the model of the edit: the requested one, the configured one, or the one that more
    than half of the workers serve. If only some models make edits of this kind, or see so many
    pictures, only these count.

    Half, so that a single worker with another model does not change the default.

    Args:
        pool: the workers.
        default: the configured model; empty: none.
        name: the requested model; None: none.
        kind: kind of the edit.
        pictures: number of its pictures.

    Raises:
        InvalidRequest: naming the model.
    """
    models = pool.models()
    able_models = _makers(pool, models, kind, pictures) or models
    model = name or default
    if not name and model in models and model not in able_models:
        model = ""
    if not model and models:
        common, workers = able_models.most_common(1)[0]
        model = common if 2 * workers > able_models.total() else ""
    if not model and models:
        able = ", ".join(sorted(able_models))
        raise InvalidRequest("SETTINGS.model", "is needed where several are served", able)
    if model and models and model not in models:
        raise InvalidRequest("SETTINGS.model", "is not served here", ", ".join(sorted(models)))
    return model


def _makers(pool: Pool, models: Counter[str], kind: EditKind, pictures: int) -> Counter[str]:
    """Return the models that make edits of a kind, of so many pictures."""
    makers = {
        worker.model
        for worker in pool.workers.values()
        if worker.served
        and kind in worker.served.edit_kinds
        and pictures <= worker.served.most_pictures
    }
    return Counter({model: count for model, count in models.items() if model in makers})
