"""Registers the engines with verl and this package's YAML files with Hydra; importing it is all that is needed.

verl imports it by the entry point group ``verl.plugins``. Without installed entry points (a checkout on PYTHONPATH),
``VERL_USE_EXTERNAL_MODULES=megatron_dta.integrations.verl.plugin`` does the same.
"""

from __future__ import annotations

import logging

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

try:
    from megatron_dta.integrations.verl import engine as engine  # registers the engines
except Exception as error:
    # verl hides why a plugin cannot be loaded.
    logging.getLogger(__name__).warning("the engine megatron_dta cannot be loaded: %s: %s", type(error).__name__, error)
    raise


class MegatronDtaSearchPath(SearchPathPlugin):
    """Adds ``hydra/`` to the places where Hydra looks for ``actor/megatron_dta_actor.yaml`` and its siblings."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """See ``SearchPathPlugin``."""
        search_path.append(provider="megatron_dta", path="pkg://megatron_dta.integrations.verl.hydra")


Plugins.instance().register(MegatronDtaSearchPath)
