# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Runs pip of the environment that this is started with, with settings that no process list shows.

    python install.py SETTINGS

SETTINGS is a JSON file that root alone can read: ``arguments`` for ``pip install``, ``environment`` variables, and ``options``
of pip's configuration file, which is written beside it, for pip's own children. Standard library only.
"""

from __future__ import annotations

import configparser
import json
import os
import runpy
import sys
from pathlib import Path


def configuration(options: dict[str, str]) -> configparser.RawConfigParser:
    """The options as pip's configuration file has them."""
    parser = configparser.RawConfigParser()
    parser["global"] = options
    return parser


def for_root_alone(path: str, flags: int) -> int:
    """Open a file that nobody else may read from the beginning."""
    return os.open(path, flags, 0o600)


def main(arguments: list[str]) -> None:
    """Entry point; ends with pip's own exit status."""
    path = Path(arguments[0])
    settings = json.loads(path.read_text(encoding="utf-8"))
    target = path.with_name("pip.conf")
    try:
        with open(target, "w", encoding="utf-8", opener=for_root_alone) as file:
            configuration(settings["options"]).write(file)
        os.environ.update({name: str(value) for name, value in settings["environment"].items()})
        os.environ["PIP_CONFIG_FILE"] = str(target)
        sys.argv = ["pip", "install", *settings["arguments"]]
        runpy.run_module("pip", run_name="__main__")
    finally:
        target.unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1:])
