"""Registers, instructions and wide accesses of a compiled kernel, as printed by NVIDIA's tools that Triton brings."""

from __future__ import annotations

import json
import re
import subprocess
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
CEILINGS = Path(__file__).with_name("ceilings.json")
"""Registers, instructions and number of wide accesses of each kernel; `record` writes it."""
SLACK = 1.25
WIDE = re.compile(r"\b(?:LDG|STG|LDGSTS)(?:\.\w+)*\.128\b")
LOCAL = re.compile(r"\b(?:LDL|STL)\b")
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/", re.MULTILINE)


def measure(cubin: bytes) -> dict[str, int] | None:
    """Return counts of a kernel's machine code; None where the tools are missing."""
    disassembler, dumper = TOOLS / "nvdisasm", TOOLS / "cuobjdump"
    if not (disassembler.exists() and dumper.exists()):
        return None
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        code, usage = (
            subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout
            for command in ([disassembler, "-c"], [dumper, "-res-usage"])
        )
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "registers": used["REG"],
        "spilled": used["STACK"] + used["LOCAL"] + len(LOCAL.findall(code)),
        "instructions": len(INSTRUCTION.findall(code)),
        "wide": len(WIDE.findall(code)),
    }


@cache
def ceilings() -> dict[str, Any]:
    """Return the recorded counts, or none if they are another version's of Triton."""
    recorded: dict[str, Any] = json.loads(CEILINGS.read_text()) if CEILINGS.exists() else {}
    return recorded.get("kernels", {}) if recorded.get("triton") == triton.__version__ else {}


def beyond(name: str, counts: dict[str, int]) -> list[str]:
    """Return what of a kernel's machine code is beyond its ceilings."""
    found = [f"{counts['spilled']} bytes or accesses of local memory"] if counts["spilled"] else []
    known = ceilings().get(name)
    if known is not None:
        found += [
            f"{counts[one]} {one}, recorded are {known[one]}"
            for one in ("registers", "instructions")
            if counts[one] > SLACK * known[one]
        ]
    return found


def lacks_wide(name: str, counts: dict[str, int]) -> bool:
    """Return True if no form of a kernel reads or writes 16 bytes at a time, as one did when counts were recorded."""
    known = ceilings().get(name)
    return known is not None and bool(known["wide"]) and not counts["wide"]


def record(kernels: dict[str, dict[str, int]]) -> None:
    """Write the counts of all kernels."""
    CEILINGS.write_text(json.dumps({"triton": triton.__version__, "kernels": kernels}, indent=1, sort_keys=True) + "\n")
