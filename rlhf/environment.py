"""What the bits of a result depend on besides code and data: packages, processor, device, threads."""

import platform
from importlib import metadata
from pathlib import Path

import torch

PACKAGES = (
    "torch transformers peft datasets safetensors tokenizers bitsandbytes scipy numpy pandas matplotlib dvc"
)


def environment(device: str, threads: int) -> dict[str, str]:
    """Describe the running Python and machine, without anything that names this one copy of them.

    Args:
        device: "cpu" or "cuda", as `runtime.device`; "cuda" is described by the name of the CUDA device.
        threads: as `runtime.threads`.
    """
    packages = {package: package_version(package) for package in PACKAGES.split()}
    return {"python": platform.python_version()} | packages | machine(device, threads)


def package_version(package: str) -> str:
    """Return the installed version, or "not installed"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def machine(device: str, threads: int) -> dict[str, str]:
    """Return what decides in which order a sum is taken: processor, instructions used, device, threads."""
    return {
        "machine": platform.machine(),
        "processor": processor(),
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "device": device if device == "cpu" else cuda_name(),
        "threads": str(threads),
    }


def processor(cpuinfo: str | Path = "/proc/cpuinfo") -> str:
    """Return the processor's model name, or "unknown"; `cpuinfo` is Linux's list of `key : value` lines."""
    lines = Path(cpuinfo).read_text(encoding="utf-8").splitlines() if Path(cpuinfo).exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (names and names[0]) or platform.processor() or "unknown"


def cuda_name() -> str:
    """Return the name of the CUDA device that a stage would use, or "no CUDA device"."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
