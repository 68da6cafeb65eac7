# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run pip of this Python environment with settings that the process list does not show.

    python install.py SETTINGS

SETTINGS is a JSON file that only root can read. It holds ``arguments`` for ``pip install``, ``environment`` variables,
and ``options`` for pip's configuration file. The configuration file is written to the same directory, for the child
processes of pip. The script uses the standard library only.
"""

from __future__ import annotations

import configparser
import json
import os
import runpy
import sys
from pathlib import Path


def configuration(options: dict[str, str]) -> configparser.RawConfigParser:
    """Return the options in the form of pip's configuration file."""
    parser = configparser.RawConfigParser()
    parser["global"] = options
    return parser


def for_root_alone(path: str, flags: int) -> int:
    """Open a file with mode 0600, so that other users cannot read it at any time."""
    return os.open(path, flags, 0o600)


def main(arguments: list[str]) -> None:
    """Run pip install; exits with pip's exit status."""
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
