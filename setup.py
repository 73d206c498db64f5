"""Builds the kernels of `residual_mass.kernels` where a C++ compiler is; everything else is in pyproject.toml.

One library for each kind of CPU, from the same sources; the best that a CPU has instructions for is loaded at run time.
They use neither Python's interface nor torch's, so that a wheel serves every version of both.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = Path("src/residual_mass/kernels")
FLAGS = "-std=c++20 -O3 -fno-math-errno -fvisibility=hidden -fPIC -shared -s -Wno-psabi".split()
TARGETS = {"portable": []}
if platform.machine() in ("x86_64", "AMD64"):
    TARGETS["avx2"] = ["-mavx2", "-mfma"]
    TARGETS["avx512"] = [*TARGETS["avx2"], *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni"))]


def compiler() -> list[str] | None:
    """The command of a C++ compiler: $CXX, or the first found."""
    named = shlex.split(os.environ.get("CXX", ""))
    found = named or [name for name in ("g++", "c++", "clang++") if shutil.which(name)][:1]
    return found if found and shutil.which(found[0]) else None


class BuildKernels(build_ext):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or len(TARGETS)

    def get_ext_filename(self, name: str) -> str:
        """The name of a library that is the same for every Python."""
        return str(Path(*name.split("."))) + ".so"

    def build_extension(self, extension: Extension) -> None:
        """Compiles beside the library's place and renames it then, so that no half of it is ever found."""
        command, place = compiler(), Path(self.get_ext_fullpath(extension.name))
        if command is None:
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        made = place.with_name(f"{place.name}.{os.getpid()}")
        try:
            flags = [*FLAGS, *extension.extra_compile_args, *extension.sources, "-o", str(made)]
            done = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                made.replace(place)
            else:
                first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
                tell(f"{place.name} did not compile ({first})")
        finally:
            made.unlink(missing_ok=True)

    def run(self) -> None:
        if compiler() is None:
            tell("no C++ compiler was found")
        super().run()

    def copy_extensions_to_source(self) -> None:
        """For an editable installation, with a rename as well."""
        for extension in self.extensions:
            built, place = Path(self.build_lib, self.get_ext_filename(extension.name)), Path(*extension.sources).parent
            if built.exists():
                made = place / f"{built.name}.{os.getpid()}"
                shutil.copyfile(built, made)
                made.replace(place / built.name)

    def get_outputs(self) -> list[str]:
        return [file for file in super().get_outputs() if Path(file).exists()]


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """Of this platform and any Python; of any platform where nothing was compiled."""
        return "py3", "none", super().get_tag()[2] if compiler() else "any"


def tell(why: str) -> None:
    sys.stderr.write(f"residual-mass: {why}; the CPU kernels are left out, and torch does their work\n")


setup(
    ext_modules=[
        Extension(
            f"residual_mass.kernels._{name}",
            [str(FOLDER / "kernels.cpp")],
            depends=[str(path) for path in sorted(FOLDER.glob("*.hpp"))],
            extra_compile_args=flags,
        )
        for name, flags in TARGETS.items()
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel},
)
