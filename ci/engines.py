"""What ci/engines needs to import serving engines where no GPU and no CUDA library is.

engines.py modules FOLDER NAME:VERSION…   stub packages: any name in them is a class, any submodule a stub
engines.py unpack WHEEL FOLDER [--no-libraries]
engines.py libraries VENV FOLDER          stub libraries that PyTorch and the engine's own libraries are linked with
"""

import collections
import glob
import os
import re
import subprocess
import sys
import tempfile
import zipfile

FINDER = '''"""Makes any name of a stub package a class, and any submodule a stub."""

import importlib.abc
import importlib.machinery
import sys


class Any(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Any(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    roots = set()

    def find_spec(self, name, path=None, target=None):
        if "." in name and name.partition(".")[0] in self.roots:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        fill(module)


def fill(module):
    def __getattr__(name):
        if name.startswith("__"):
            raise AttributeError(f"the stub {module.__name__} has no {name}")
        value = Any(name, (), {})
        setattr(module, name, value)
        return value

    module.__path__, module.__getattr__ = [], __getattr__


def install(name):
    Finder.roots.add(name)
    fill(sys.modules[name])


sys.meta_path.append(Finder())
'''
CUDA = r"lib(?:cu|nccl|nvrtc|nvshmem)[\w.]*"


def modules(folder, *names):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "_egmem_stub.py"), "w") as file:
        file.write(FINDER)
    for name in names:
        name, version = name.split(":")
        os.makedirs(os.path.join(folder, name), exist_ok=True)
        with open(os.path.join(folder, name, "__init__.py"), "w") as file:
            file.write(f'import _egmem_stub\n\n__version__ = "{version}"\n_egmem_stub.install(__name__)\n')


def unpack(wheel, folder, *options):
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            if not (options and entry.filename.endswith((".so", ".a", ".cubin"))) and ".data/" not in entry.filename:
                archive.extract(entry, folder)


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def libraries(venv, folder):
    """Links a library with the functions that are wanted of it, which do nothing, for each of CUDA's that is not there.

    PyPI's PyTorch is linked with 4 GB of CUDA's libraries, of which it calls none before a GPU is used.
    """
    (torch,) = glob.glob(os.path.join(venv, "lib/python*/site-packages/torch/lib"))
    there = {os.path.basename(path) for path in glob.glob(os.path.join(torch, "../../nvidia/**/lib*.so*"), recursive=True)}
    versions, functions = collections.defaultdict(set), collections.defaultdict(set)
    for path in glob.glob(os.path.join(torch, "lib[tcs]*.so")) + glob.glob(os.path.join(folder, "**/*.so"), recursive=True):
        for library in re.findall(rf"NEEDED.*\[({CUDA})\]", output("readelf", "-d", path)):
            versions[library] |= set()
        library = None
        for line in output("readelf", "-V", path).splitlines():
            if found := re.search(r"File: (\S+)", line):
                library = found[1]
            elif (found := re.search(r"Name: (\S+)", line)) and re.fullmatch(CUDA, library or ""):
                versions[library].add(found[1])
        for name, version in re.findall(r" U ((?:cu|nccl|nvrtc|nvshmem)\w+)(?:@(\S+))?", output("nm", "-D", path)):
            if not name.startswith(("cuda", "cupti")):  # of the packages in engines.txt
                functions[version].add(name)
    for library in sorted(versions.keys() - there):
        link(os.path.join(torch, library), functions[""], {version: functions[version] for version in versions[library]})


def link(path, plain, versioned):
    source = "".join(f"void {name}(void) {{}}\n" for name in sorted(plain.union(*versioned.values())))
    command = ["cc", "-shared", "-x", "c", "-", "-o", path, f"-Wl,-soname,{os.path.basename(path)}"]
    with tempfile.NamedTemporaryFile("w", suffix=".map") as script:
        script.write("".join(f"{version} {{ {' '.join(f'{name};' for name in sorted(names))} }};\n" for version, names in versioned.items()))
        script.flush()
        subprocess.run(command + ([f"-Wl,--version-script={script.name}"] if versioned else []), input=source, text=True, check=True)


if __name__ == "__main__":
    {"modules": modules, "unpack": unpack, "libraries": libraries}[sys.argv[1]](*sys.argv[2:])
