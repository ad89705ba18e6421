"""One device, as far as compiling for it depends on it. A value; `detect.py` fills it from what is really there."""

import re
from dataclasses import dataclass

from ctj_trainer.hardware.book import Kind

# torch._inductor.utils.is_big_gpu in torch 2.15: fewer multiprocessors than an RTX 3080's, and matrix products are not
# tuned ("Not enough SMs to use max_autotune_gemm mode"). Slices of a partitioned GPU (MIG) fall below it.
MIN_TUNED_MULTIPROCESSORS = 68
_MIG = re.compile(r"\bMIG (\d+g\.\d+gb\S*)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Device:
    """What is known of a device; None where it could not be asked."""

    kind: Kind
    name: str
    multiprocessors: int | None = None
    memory_bytes: int | None = None
    capability: tuple[int, int] | None = None
    """CUDA's compute capability, or ROCm's architecture as torch writes it (gfx942 is 9.4)."""

    @property
    def slice(self) -> str:
        """The MIG slice that this is, as in 3g.20gb; empty for a whole device."""
        found = _MIG.search(self.name)
        return found[1] if found else ""

    def untuned_products(self) -> str:
        """Why torch does not tune matrix products here; empty where it does, or nobody knows."""
        if self.kind is Kind.CUDA and self.multiprocessors is not None:
            if self.multiprocessors >= MIN_TUNED_MULTIPROCESSORS:
                return ""
            part = f" (MIG slice {self.slice})" if self.slice else ""
            return (
                f"matrix products are not tuned: {self.multiprocessors} multiprocessors{part}, "
                f"torch asks for {MIN_TUNED_MULTIPROCESSORS}"
            )
        if self.kind is Kind.ROCM and self.capability is not None:
            major = self.capability[0]
            return f"matrix products are not tuned on architecture {major}.x" if major < 9 or major == 10 else ""
        return ""

    def refuses(self, flag: str) -> str:
        """Why an option of inductor that torch knows means nothing here; empty where it means something."""
        if self.kind is Kind.CPU and flag.startswith("triton."):
            return "Triton generates no code for a CPU, and a CPU has no CUDA graphs"
        if self.kind is Kind.CPU and flag == "disable_cpp_codegen":
            return "C++ is all that inductor generates for a CPU: everything would run uncompiled"
        if flag == "max_autotune_gemm":
            return self.untuned_products()
        return ""
