"""Registers, instructions, loads, barriers and wide accesses of a compiled kernel, by NVIDIA's tools in Triton."""

from __future__ import annotations

import json
import re
import struct
import subprocess
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
CEILINGS = Path(__file__).with_name("ceilings.json")
"""Counts, and whether there are wide accesses, for each kernel; `record` writes it."""
LIMITED = ("registers", "instructions", "loads", "barriers")
SLACK = 1.25
WIDE = re.compile(r"\b(?:LDG|STG|LDGSTS)(?:\.\w+)*\.128\b")
LOCAL = re.compile(r"\b(?:LDL|STL)\b")
LOADS = re.compile(r"\bld\.(?:volatile\.)?global\b")
BARRIERS = re.compile(r"\b(?:bar|barrier)\.(?:cta\.)?sync\b")
WIDE_IN_PTX = re.compile(r"\b(?:ld|st)\.global[.\w:]*\.(?:v4\.\w32|v2\.\w64)\b")
INSTRUCTION_BYTES = 16
EXECUTABLE = 4  # flag of an ELF file's section


def measure(ptx: str, cubin: bytes) -> dict[str, int] | None:
    """Return counts of a kernel's PTX and machine code; None where the tools are missing."""
    if not all((TOOLS / name).exists() for name in ("nvdisasm", "cuobjdump")):
        return None
    used = {
        name: int(value)
        for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", _run("cuobjdump", "-res-usage", cubin))
    }
    spilled = used["STACK"] + used["LOCAL"]
    if spilled and not LOCAL.search(_run("nvdisasm", "-c", cubin)):
        spilled = 0  # a frame that is never used
    return {
        "registers": used["REG"],
        "spilled": spilled,
        "instructions": _executable_bytes(cubin) // INSTRUCTION_BYTES,
        "loads": len(LOADS.findall(ptx)),
        "barriers": len(BARRIERS.findall(ptx)),
    }


def is_wide(codes: list[tuple[str, bytes]]) -> bool:
    """Return whether one of the forms of a kernel, PTX and machine code, reads or writes 16 bytes at a time."""
    # Disassembling takes a third of a second. Only a few wide accesses are made of narrow ones of PTX.
    return any(WIDE_IN_PTX.search(ptx) for ptx, _ in codes) or any(
        WIDE.search(_run("nvdisasm", "-c", cubin)) for _, cubin in codes
    )


def _run(tool: str, option: str, cubin: bytes) -> str:
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([TOOLS / tool, option, file.name], capture_output=True, text=True, check=True).stdout


def _executable_bytes(elf: bytes) -> int:
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry_bytes, entries = struct.unpack_from("<HH", elf, 58)
    sections = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_bytes) for i in range(entries)]
    return sum(size for _, _, flags, _, _, size in sections if flags & EXECUTABLE)


@cache
def ceilings() -> dict[str, Any]:
    """Return the recorded counts, or none if they are another version's of Triton."""
    recorded: dict[str, Any] = json.loads(CEILINGS.read_text()) if CEILINGS.exists() else {}
    return recorded.get("kernels", {}) if recorded.get("triton") == triton.__version__ else {}


def beyond(name: str, counts: dict[str, int]) -> list[str]:
    """Return the counts of a kernel's machine code that are beyond its ceilings."""
    found = [f"{counts['spilled']} bytes of local memory"] if counts["spilled"] else []
    known = ceilings().get(name)
    if known is not None:
        found += [
            f"{counts[one]} {one}, recorded are {known[one]}" for one in LIMITED if counts[one] > SLACK * known[one]
        ]
    return found


def lacks_wide(name: str, codes: list[tuple[str, bytes]]) -> bool:
    """Return True if no form of a kernel has a wide access, as one did when counts were recorded."""
    known = ceilings().get(name)
    return known is not None and known["wide"] and not is_wide(codes)


def record(kernels: dict[str, dict[str, int]], codes: dict[str, list[tuple[str, bytes]]]) -> None:
    """Write the counts of all kernels."""
    found = {name: {**counts, "wide": is_wide(codes[name])} for name, counts in kernels.items()}
    CEILINGS.write_text(json.dumps({"triton": triton.__version__, "kernels": found}, indent=1, sort_keys=True) + "\n")
