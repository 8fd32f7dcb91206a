"""The driver through ctypes against cuda.bindings: the same names and values. test_stub_driver.py runs both."""

from __future__ import annotations

import ctypes
import inspect
import re
from enum import IntEnum

import pytest
from cuda.bindings import driver as bindings

from cute_mla.runtime import driver, libcuda

ENUMERATIONS = [value for value in vars(libcuda).values() if inspect.isclass(value) and issubclass(value, IntEnum) and value is not IntEnum]


@pytest.mark.parametrize("enumeration", ENUMERATIONS, ids=lambda each: each.__name__)
def test_values_are_those_of_cuda(enumeration: type[IntEnum]) -> None:
    real = getattr(bindings, enumeration.__name__)
    assert {member.name: member.value for member in enumeration} == {name: int(getattr(real, name)) for name in enumeration.__members__}


def test_there_is_all_that_the_driver_module_uses() -> None:
    text = inspect.getsource(driver)
    used = set(re.findall(r"bindings(?:\(\))?\.(cu\w+|CU\w+)", text)) | set(re.findall(r'_call\("(\w+)"', text))
    assert len(used) > 25
    assert {name for name in used if not hasattr(libcuda, name)} == set()
    members = set(re.findall(r"\bCU_\w+[A-Z0-9]\b", text))
    known = {member for enumeration in ENUMERATIONS for member in enumeration.__members__}
    assert members <= known


def test_sizes_of_structures_are_those_of_cuda() -> None:
    """64 bytes of a value behind 8 of the attribute's number; the configuration has two pointers at multiples of 8."""
    assert ctypes.sizeof(libcuda.CUlaunchAttribute) == 72
    assert ctypes.sizeof(libcuda.CUlaunchConfig) == 56
    assert libcuda.CUlaunchConfig.hStream.offset == 32


def test_a_configuration_keeps_its_attributes() -> None:
    ours = libcuda.CUlaunchConfig()
    attribute = libcuda.CUlaunchAttribute()
    attribute.id = libcuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x = 2
    ours.attrs = [attribute]
    attribute.value.clusterDim.x = 9  # a copy
    assert [(each.id, each.value.clusterDim.x) for each in ours.attrs] == [(4, 2)]
