"""Generates `orthodrome.v1` from the project's `.proto` file, for wheels and for editable installs.

`python setup.py generate` does it alone, for work on the client itself."""

import shutil
import sys
import tempfile
from pathlib import Path

from setuptools import Command, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
NAME = "orthodrome.proto"


def proto() -> Path:
    """The file in the repository, or its copy in a source distribution."""
    for folder in (HERE / "proto", HERE.parent.parent / "proto"):
        if (folder / NAME).is_file():
            return folder / NAME
    sys.exit(f"{NAME} is in neither {HERE}/proto nor the repository's folder proto; build from a checkout")


def generate(target: Path) -> None:
    """Writes the package `orthodrome.v1` below `target`."""
    from grpc_tools import protoc
    import grpc_tools

    with tempfile.TemporaryDirectory() as folder:
        # The path below the folder becomes the name of the module.
        source = Path(folder) / "orthodrome" / "v1" / "api.proto"
        source.parent.mkdir(parents=True)
        shutil.copyfile(proto(), source)
        include = Path(grpc_tools.__file__).parent / "_proto"
        status = protoc.main(
            ["protoc", f"-I{folder}", f"-I{include}", f"--python_out={target}", f"--pyi_out={target}", str(source)]
        )
    if status != 0:
        sys.exit(f"protoc could not compile {proto()}")
    (target / "orthodrome" / "v1" / "__init__.py").write_text('"""The messages of the API, generated."""\n')


class BuildPy(build_py):
    def run(self) -> None:
        generate(HERE / "src")
        # The generated package is new since the list of packages was made.
        if "orthodrome.v1" not in self.distribution.packages:
            self.distribution.packages.append("orthodrome.v1")
            self.packages = self.distribution.packages
        super().run()


class Sdist(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        generated = str(Path("src", "orthodrome", "v1"))
        super().make_release_tree(base_dir, [file for file in files if not file.startswith(generated)])
        folder = Path(base_dir) / "proto"
        folder.mkdir(exist_ok=True)
        shutil.copyfile(proto(), folder / NAME)


class Generate(Command):
    description = "generate orthodrome.v1 from the .proto file"
    user_options: list[tuple[str, str | None, str]] = []

    def initialize_options(self) -> None:
        pass

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        generate(HERE / "src")


setup(cmdclass={"build_py": BuildPy, "sdist": Sdist, "generate": Generate})
