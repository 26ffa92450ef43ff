"""Tox loads it by this name: an environment whose programs the machine lacks is skipped, and says so."""

from __future__ import annotations

import shutil

from tox.config.sets import EnvConfigSet
from tox.plugin import impl
from tox.session.state import State
from tox.tox_env.api import ToxEnv
from tox.tox_env.errors import Skip


@impl
def tox_add_env_config(env_conf: EnvConfigSet, state: State) -> None:
    """Adds the setting."""
    env_conf.add_config("programs", of_type=list[str], default=[], desc="without these it is skipped")


@impl
def tox_on_install(tox_env: ToxEnv, arguments: object, section: str, of_type: str) -> None:
    """Called before anything is installed."""
    missing = [program for program in tox_env.conf["programs"] if shutil.which(program) is None]
    if missing:
        raise Skip(f"the machine has no {', '.join(missing)}")
