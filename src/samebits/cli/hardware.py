"""What has been run on which hardware, and what has only been compiled."""

from __future__ import annotations

HARDWARE = {
    "x86-64 processors": "run: whole jobs, conformance and golden digests, on every change",
    "NVIDIA H200 (sm_90)": (
        "run: whole jobs on one and two cards, the conformance suite under sm90 and fma32, kernels made wrong on "
        "purpose; timed (docs/performance.md)"
    ),
    "AMD MI300X (gfx942)": "not run: kernels compiled and audited (make audit); cdna3 is a published model of the chip",
    "AMD MI350 (gfx950)": "not run: kernels compiled and audited; its matrix units are not modelled, fma32 is used",
}
