"""Builds the kernels of `residual_mass.kernels` if there is a C++ compiler; everything else is in pyproject.toml.

The same sources make one library for each kind of CPU; the best one that the CPU supports is loaded at run time. The
libraries use neither Python's C API nor torch's, so that one wheel works with every version of both.
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
    TARGETS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    TARGETS["avx512"] = [*TARGETS["avx2"], *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni"))]


def compiler() -> list[str] | None:
    """Returns the command of a C++ compiler: $CXX, or the first one on PATH; None if there is none."""
    named = shlex.split(os.environ.get("CXX", ""))
    command = named or [name for name in ("g++", "c++", "clang++") if shutil.which(name)][:1]
    return command if command and shutil.which(command[0]) else None


class BuildKernels(build_ext):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or len(TARGETS)

    def get_ext_filename(self, name: str) -> str:
        """Returns the name of a library, which is the same for every Python."""
        return str(Path(*name.split("."))) + ".so"

    def build_extension(self, extension: Extension) -> None:
        """Compiles to a temporary file and renames it, so that no incomplete library is ever found."""
        command, place = compiler(), Path(self.get_ext_fullpath(extension.name))
        if command is None:
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(f"{place.name}.{os.getpid()}")
        try:
            flags = [*FLAGS, *extension.extra_compile_args, *extension.sources, "-o", str(temporary)]
            done = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                temporary.replace(place)
            else:
                first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
                tell(f"{place.name} did not compile ({first})")
        finally:
            temporary.unlink(missing_ok=True)

    def run(self) -> None:
        if compiler() is None:
            tell("no C++ compiler was found")
        super().run()

    def copy_extensions_to_source(self) -> None:
        """Copies the libraries of an editable installation, with a rename as well."""
        for extension in self.extensions:
            built, place = Path(self.build_lib, self.get_ext_filename(extension.name)), Path(*extension.sources).parent
            if built.exists():
                temporary = place / f"{built.name}.{os.getpid()}"
                shutil.copyfile(built, temporary)
                temporary.replace(place / built.name)

    def get_outputs(self) -> list[str]:
        return [file for file in super().get_outputs() if Path(file).exists()]


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """Returns the tag of any Python and this platform, or of any platform if nothing was compiled."""
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
