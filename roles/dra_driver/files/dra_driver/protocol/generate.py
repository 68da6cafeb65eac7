# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Generate the Python modules of the kubelet's protocols from the .proto files in this folder.

    python -m dra_driver.protocol.generate [FOLDER]

writes ``*_pb2.py``, ``*_pb2.pyi`` and ``*_pb2_grpc.py`` beside the .proto files, or into FOLDER. It needs grpcio-tools,
which is a tool of development and not on any node, and ruff, which lays the generated code out as the project's own is:
Ansible's sanity tests read it too. The generated code asks at run time for at least the grpcio and
protobuf that it was generated with, so the pin of grpcio-tools and the ranges on the nodes are raised together.

Every .proto file has a path of its own (``dra_driver/protocol/...``) because protobuf keys its descriptor pool by path,
and the public files, all called ``api.proto``, would collide there.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HEADER = "# SPDX-License-Identifier: Apache-2.0\n# Copyright (c) 2026 The dra.accelerators authors\n"
SOURCES = Path(__file__).resolve().parent
DESCRIPTOR = re.compile(r"AddSerializedFile\((b'.*')\)")
DESCRIPTOR_BYTES_PER_LINE = 24


def laid_out(code: str) -> str:
    """Return generated ``code`` with the serialized descriptor over many lines, formatted by ruff, no import unused.

    Raises CalledProcessError when ruff refuses the code.
    """

    def split(match: re.Match[str]) -> str:
        content: bytes = ast.literal_eval(match.group(1))
        parts = (
            content[start : start + DESCRIPTOR_BYTES_PER_LINE]
            for start in range(0, len(content), DESCRIPTOR_BYTES_PER_LINE)
        )
        return "AddSerializedFile(\n" + "\n".join(repr(part) for part in parts) + "\n)"

    code = DESCRIPTOR.sub(split, code)
    for verb in (("check", "--select=F401,I", "--fix", "--quiet"), ("format", "--line-length=120")):
        command = [sys.executable, "-m", "ruff", *verb, "--isolated", "-"]
        code = subprocess.run(command, input=code, check=True, capture_output=True, text=True).stdout
    return code


def generate(target: Path) -> tuple[str, ...]:
    """Generate the modules of every .proto file into ``target`` and return their file names.

    Raises RuntimeError when the compiler refuses a file; it has then printed why.
    """
    from grpc_tools import protoc

    written: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        package = root / "dra_driver" / "protocol"
        package.mkdir(parents=True)
        names = sorted(path.name for path in SOURCES.glob("*.proto"))
        for name in names:
            (package / name).write_bytes((SOURCES / name).read_bytes())
        arguments = [
            "protoc",
            f"--proto_path={root}",
            f"--python_out={root}",
            f"--pyi_out={root}",
            f"--grpc_python_out={root}",
            *(f"dra_driver/protocol/{name}" for name in names),
        ]
        if protoc.main(arguments) != 0:
            raise RuntimeError(f"the protocol compiler refused one of {', '.join(names)}; its message is above")
        for path in sorted(package.glob("*_pb2*")):
            (target / path.name).write_text(HEADER + laid_out(path.read_text(encoding="utf-8")), encoding="utf-8")
            written.append(path.name)
    return tuple(written)


if __name__ == "__main__":
    for written_name in generate(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCES):
        sys.stdout.write(f"{written_name}\n")
