"""What describes a machine: complete, all text, and nothing that only this copy of it has."""

import json
import platform
import socket
from importlib import metadata
from pathlib import Path

import pytest
import torch

from rlhf import environment as module
from rlhf.environment import PACKAGES, environment, package_version, processor

CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
model\t\t: 85
model name\t: Intel(R) Xeon(R) CPU @ 2.00GHz
flags\t\t: fpu vme

processor\t: 1
model name\t: another
"""


def test_it_names_python_the_packages_and_what_sums_depend_on():
    found = environment("cpu", 3)
    last = ["machine", "processor", "instruction set", "device", "threads"]
    assert list(found) == ["python", *PACKAGES.split(), *last]
    assert found["python"] == platform.python_version()
    assert found["torch"] == metadata.version("torch")
    assert found["instruction set"] == torch.backends.cpu.get_cpu_capability()
    assert (found["device"], found["threads"]) == ("cpu", "3")
    assert all(isinstance(value, str) and value for value in found.values())


def test_it_is_the_same_twice_and_names_neither_host_nor_folder():
    found = json.dumps(environment("cpu", 1))
    assert found == json.dumps(environment("cpu", 1))
    assert socket.gethostname() not in found
    assert str(Path.home()) not in found and str(Path.cwd()) not in found


def test_a_package_that_is_absent_is_said_to_be():
    assert package_version("a-package-that-nobody-has-installed") == "not installed"


def test_the_processor_is_the_first_model_name_of_cpuinfo(tmp_path):
    (tmp_path / "cpuinfo").write_text(CPUINFO)
    assert processor(tmp_path / "cpuinfo") == "Intel(R) Xeon(R) CPU @ 2.00GHz"


@pytest.mark.parametrize(("name", "expected"), [("arm", "arm"), ("", "unknown")])
@pytest.mark.parametrize("cpuinfo", [None, "", "Features\t: fp asimd\n", "model name\t:\n"])
def test_without_a_model_name_the_platform_is_asked(tmp_path, monkeypatch, cpuinfo, name, expected):
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(platform, "processor", lambda: name)
    assert processor(tmp_path / "cpuinfo") == expected


@pytest.mark.parametrize(("present", "expected"), [(True, "Some GPU"), (False, "no CUDA device")])
def test_a_cuda_device_goes_by_its_name(monkeypatch, present, expected):
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: present)
    monkeypatch.setattr(module.torch.cuda, "get_device_name", lambda: "Some GPU")
    assert environment("cuda", 1)["device"] == expected
