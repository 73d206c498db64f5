"""Builds the kernels of `residual_mass.kernels` if there is a C++ compiler; everything else is in pyproject.toml.

The same sources make one library for each kind of CPU; the best one that the CPU supports is loaded at run time. The
libraries use neither Python's C API nor torch's, so that one wheel works with every version of both.

`_PYTHON_HOST_PLATFORM` names another platform for a compiler that makes its code, as it does for other packages:

    _PYTHON_HOST_PLATFORM=linux-aarch64 CXX=aarch64-linux-gnu-g++ pip wheel --no-deps .
    _PYTHON_HOST_PLATFORM=macosx-11.0-arm64 CXX="python -m ziglang c++ -target aarch64-macos.11.0" pip wheel --no-deps .
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = Path("src/residual_mass/kernels")
FLAGS = "-std=c++20 -O3 -fno-math-errno -fvisibility=hidden -fPIC -shared -Wno-psabi".split()
SYSTEM, _, MACHINE = sysconfig.get_platform().partition("-")
MACHINE = MACHINE.rpartition("-")[2]  # after the version of macOS
if MACHINE == "universal2":  # a Python for two kinds of Mac; the libraries are for the one that builds them
    MACHINE = platform.machine()
# Names of OpenMP's runtime are looked up when a library is loaded: macOS's linker has to be told.
FLAGS += ["-Wl,-undefined,dynamic_lookup"] if SYSTEM == "macosx" else ["-s"]
TARGETS = {"portable": []}
if MACHINE in ("x86_64", "amd64"):
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
        """Returns the tag of any Python, and of the systems that have what the libraries need.

        That is any platform if nothing was compiled. On Linux it is the least version of glibc whose symbols they name
        (PEP 600): a compiler on a newer system may take newer ones.
        """
        if not compiler():
            return "py3", "none", "any"
        folder = Path(self.get_finalized_command("build_ext").build_lib, FOLDER.relative_to("src"))
        names = {name for file in folder.glob("*.so") for name in re.findall(rb"GLIBC_2\.(\d+)", file.read_bytes())}
        if SYSTEM == "linux" and names:
            return "py3", "none", f"manylinux_2_{max(map(int, names))}_{MACHINE}"
        return "py3", "none", super().get_tag()[2].replace("universal2", MACHINE)


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
