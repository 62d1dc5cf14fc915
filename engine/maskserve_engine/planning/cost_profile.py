"""Times of steps and exchanges, measured before a worker serves: `scripts/bench profile_costs`
writes the file, and a worker starts with it (`[engine] costs`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from maskserve_common.config import ConfigError
from maskserve_engine.planning.cost_model import CostModel, from_json
from maskserve_engine.planning.degree_costs import ExchangeCosts


@dataclass(frozen=True, slots=True)
class CostProfile:
    """Measured costs of one kind of device, and of the links between several."""

    costs: CostModel
    """Costs of one device while the others are busy too."""
    exchange: ExchangeCosts

    def text(self) -> str:
        """Return the profile as JSON; `read_profile` reads it back."""
        return json.dumps(
            {"costs": self.costs.to_json(), "exchange": asdict(self.exchange)}, indent=1
        )


def read_profile(file: str) -> CostProfile:
    """Read the text of a `CostProfile`.

    Raises:
        ConfigError: the file cannot be read, or is no profile.
    """
    try:
        raw = json.loads(Path(file).read_text(encoding="utf-8"))
        exchange = ExchangeCosts(**raw["exchange"])
        if not (exchange.bytes_per_second > 0 and exchange.call_seconds >= 0):
            raise ValueError(f"no such exchange: {exchange}")
        return CostProfile(from_json(raw["costs"]), exchange)
    except OSError as error:
        raise ConfigError(f"[engine] costs: {file} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"[engine] costs: {file} is nothing that scripts/bench profile_costs has written: "
            f"{error!r}"
        ) from error
