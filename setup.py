"""Build one wheel for every version of Python; everything else is in ``pyproject.toml``.

The compiled libraries do not use Python's C interface: ctypes loads them. They therefore have names
without a version of Python, and the wheel has the tag ``py3-none-PLATFORM``. If nothing was
compiled, or the environment variable ``CKA_MEMORY_PURE`` is 1, the wheel is ``py3-none-any``.
"""

import os
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


class BuildLibraries(build_ext):
    """Compile the libraries under names that do not depend on the version of Python."""

    def get_ext_filename(self, fullname):
        """Return the path of a library from the root of the wheel."""
        return os.path.join(*fullname.split(".")) + ".so"


class BuildWheel(bdist_wheel):
    """Name the wheel after what was compiled."""

    def finalize_options(self):
        """Compile nothing if a pure wheel was asked for."""
        if os.environ.get("CKA_MEMORY_PURE") == "1":
            self.distribution.ext_modules = []
        super().finalize_options()

    def get_tag(self):
        """Return the tag; setuptools asks for it when the files of the wheel are in place."""
        *_, platform = super().get_tag()
        if any(Path(self.bdist_dir).rglob("*.so")):
            return "py3", "none", platform
        self.root_is_pure = True
        return "py3", "none", "any"


setup(cmdclass={"build_ext": BuildLibraries, "bdist_wheel": BuildWheel})
