"""What pyproject.toml cannot say: `configs` becomes a package, and a wheel may bring kernels.

`DMC_CPU_KERNELS=1 pip wheel .` compiles dmc/kernels/cpu.cpp for x86-64 with AVX2 and with AVX-512: a wheel of this
platform. Else the wheel holds for all platforms, and the kernels are compiled on first use.
"""

import os
import shlex
import subprocess
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

WITH_KERNELS = os.environ.get("DMC_CPU_KERNELS", "0") == "1"
LEVELS = {"avx2": "x86-64-v3", "avx512": "x86-64-v4"}


class Build(build_py):
    """Copies the packages and compiles the kernels beside their source."""

    def run(self):
        """Build."""
        super().run()
        if WITH_KERNELS and not self.editable_mode:
            source = Path(self.build_lib, "dmc", "kernels", "cpu.cpp")
            flags = source.read_text().split("// flags: ", 1)[1].splitlines()[0].split()
            for name, level in LEVELS.items():
                command = [*shlex.split(os.environ.get("CXX") or "c++"), *flags, f"-march={level}", source]
                subprocess.run([*command, "-o", source.with_name(f"cpu_{name}.so")], check=True)


class Package(Distribution):
    """Is of one platform where it brings kernels."""

    def has_ext_modules(self):
        """Tell setuptools."""
        return WITH_KERNELS


class Wheel(bdist_wheel):
    """Names no version of Python: the kernels have no Python in them."""

    def get_tag(self):
        """Name the platform alone."""
        return ("py3", "none", super().get_tag()[2])


setup(
    packages=[*find_packages(include=["dmc*"]), "dmc.configs"],
    cmdclass={"build_py": Build, "bdist_wheel": Wheel},
    distclass=Package,
)
