# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Generate the Python modules of the kubelet's protocols from the .proto files in this directory.

    python -m dra_driver.protocol.generate [DIRECTORY]

This writes ``*_pb2.py``, ``*_pb2.pyi``, and ``*_pb2_grpc.py`` next to the .proto files, or into DIRECTORY. It needs two
development tools that are not installed on nodes. grpcio-tools generates the code. ruff formats it like the project's
code, because Ansible's sanity tests also read it. At run time the generated code requires at least the grpcio and
protobuf versions that generated it. Therefore raise the pin of grpcio-tools and the version ranges for the nodes
together.

Every .proto file has a unique path (``dra_driver/protocol/...``), because the descriptor pool of protobuf uses the path
as key. The public files are all named ``api.proto`` and would collide.
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
    """Return generated ``code`` with the serialized descriptor split over lines, formatted by ruff, without unused imports.

    Raises CalledProcessError if ruff rejects the code.
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

    Raises RuntimeError if the compiler rejects a file. The compiler prints the reason.
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
