"""The C part of the package. Everything else is in pyproject.toml."""

import tempfile

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, ExecError, PlatformError

from mesh_core import get_include


class BuildNative(build_ext):
    """Says what is missing where the C part cannot be built."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (CCompilerError, ExecError, PlatformError, OSError) as error:
            raise SystemExit(
                "mesh-snapshots has a part in C, which could not be compiled. It needs Linux, a C compiler (cc, or $CC) and the "
                f"headers of Python: on Debian, apt install gcc python3-dev. The cause: {error}"
            ) from error


# A folder of its own: what an earlier build has left in `build/` would come along.
with tempfile.TemporaryDirectory() as folder:
    setup(
        ext_modules=[
            Extension(
                "mesh_snapshots._native",
                ["src/mesh_snapshots/_native.c"],
                include_dirs=[get_include()],
                # One build for every Python from 3.11 on.
                define_macros=[("Py_LIMITED_API", "0x030b0000")],
                py_limited_api=True,
                extra_compile_args=["-pthread", "-Wall", "-Wextra"],
                extra_link_args=["-pthread"],
            )
        ],
        options={"bdist_wheel": {"py_limited_api": "cp311"}, "build": {"build_base": folder}},
        cmdclass={"build_ext": BuildNative},
    )
