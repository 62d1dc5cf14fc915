"""Every default may stand in the file: it is within the range that its key accepts."""

from __future__ import annotations

import msgspec

from maskserve_common.config import Config
from maskserve_common.config_file import config_of
from maskserve_router.config import RouterConfig, router_config_of


def test_the_workers() -> None:
    assert config_of(msgspec.to_builtins(Config())) == Config()


def test_the_routers() -> None:
    assert router_config_of(msgspec.to_builtins(RouterConfig())) == RouterConfig()
