"""Every check of this repository, each in a fresh environment: `pip install 'nox[uv]'`, then `nox -l`."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "uv"
nox.options.sessions = ["tests", "lint"]

ROOT = Path(__file__).parent.resolve()
VERSION = (ROOT / "packages/VERSION.py").read_text().split('__version__ = "')[1].split('"')[0]
NOWHERE = ROOT / "dist" / "absent"
# numpy: what ranks send each other, and what the safetensors library reads and writes, goes through it.
TESTS = ("pytest", "pytest-timeout", "hypothesis", "numpy")
PAGES = ("scikit-learn", "torchmetrics")  # what the programs of the pages need
S3 = ("fsspec", "s3fs", "moto[server]")  # checkpoints behind a URL, and a server for them


@dataclass(frozen=True)
class Package:
    """One distribution of this repository and what its own tests need besides `TESTS`."""

    folder: str
    distribution: str
    extra: str = ""
    """An extra of the distribution, as `[name]`, that its tests need."""

    @property
    def path(self) -> Path:
        return ROOT / "packages" / self.folder

    def wheel(self, folder: Path) -> Path:
        return folder / f"{self.distribution.replace('-', '_')}-{VERSION}-py3-none-any.whl"


CORE = Package("core", "hocket")
CHECKPOINTS = Package("checkpoints", "hocket-checkpoints")
CLI = Package("cli", "hocket-cli")
DATA = Package("data", "hocket-data")
INSIGHT = Package("insight", "hocket-insight", "[monitors]")
TESTKIT = Package("testkit", "hocket-testkit")
LOGGERS = Package("loggers", "hocket-loggers", "[tensorboard]")
STRATEGIES = Package("strategies", "hocket-strategies", "[torchao]")
TOOLS = Package("tools", "hocket-tools", "[onnx,torchao,pruning,parquet]")
#: What the tests of every package need.
STANDARD = (CORE, CHECKPOINTS, CLI, DATA, INSIGHT, LOGGERS, TESTKIT, STRATEGIES, TOOLS)
GENERAL = Package("algorithms-general", "hocket-algorithms-general", "[optimizers]")
VISION = Package("algorithms-vision", "hocket-algorithms-vision", "[datasets]")
NLP = Package("algorithms-nlp", "hocket-algorithms-nlp", "[peft]")
REPORT = Package("report", "hocket-report")
STREAMING = Package("streaming", "hocket-streaming", "[s3,parquet,zstd]")
MIGRATION = Package("migration", "hocket-migration")
PACKAGES = (*STANDARD, GENERAL, VISION, NLP, REPORT, STREAMING, MIGRATION)


def with_extra(package: Package, extra: str) -> tuple[Package, ...]:
    """STANDARD with another extra of one of its packages."""
    return tuple(replace(each, extra=extra) if each is package else each for each in STANDARD)


def page(name: str) -> str:
    """The test that runs the programs of a how-to guide."""
    return f"{ROOT}/tests/test_pages.py::test_page_runs[docs/how-to/{name}.md]"


def settle(session: nox.Session, threads: int = 1) -> None:
    """Give the session's processes few threads, no foreign import path and leave to keep their bytecode."""
    session.env["OMP_NUM_THREADS"] = str(min(threads, os.cpu_count() or 1))
    session.env["PYTHONDONTWRITEBYTECODE"] = None  # without .pyc files every process would compile torch again
    session.env["PYTHONPATH"] = None


def scratch(session: nox.Session) -> Path:
    """A folder that goes with the session's environment. (nox's `create_tmp` would also move TMPDIR, to a path too
    long for the sockets of multiprocessing.)"""
    folder = Path(session.virtualenv.location).resolve() / "scratch"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def install(session: nox.Session, *what: str, siblings: str = "") -> None:
    """Install in the tested versions, under the further constraints `siblings` (the text of `located`).

    Nothing is compiled ahead, most of it being never imported: what is, the first process that imports it compiles.
    """
    file = scratch(session) / "siblings.txt"
    file.write_text(siblings)
    constraints = ("-c", str(ROOT / "constraints.txt"), "-c", str(file))
    session.install(*constraints, *what, env={"UV_COMPILE_BYTECODE": "0"})


def install_editable(session: nox.Session, packages: tuple[Package, ...], *others: str) -> None:
    """Install these folders and `others`; a requirement on a package of ours that is not among them is an error."""
    paths = [argument for package in packages for argument in ("-e", f"{package.path}{package.extra}")]
    here = {package.distribution for package in packages}
    missing = located({package: package.wheel(NOWHERE) for package in PACKAGES if package.distribution not in here})
    install(session, *paths, *others, siblings=missing)
    check_origin(session, packages, ROOT / "packages")


def located(wheels: dict[Package, Path]) -> str:
    """Constraints that tie our packages' names to files on this disk.

    A requirement such as `hocket-loggers~=0.1.0` then resolves to our wheel, or fails where that file is missing, but
    is never looked up in a registry, where somebody else may own the name.
    """
    return "".join(f"{package.distribution} @ {wheel.as_uri()}\n" for package, wheel in wheels.items())


def build(session: nox.Session, packages: tuple[Package, ...], folder: Path) -> dict[Package, Path]:
    """Build sdists, and wheels from these sdists, into a folder, which the first build of a run of nox empties."""
    if folder not in _BUILT:
        shutil.rmtree(folder, ignore_errors=True)
    wheels = _BUILT.setdefault(folder, {})
    for package in packages:
        if package not in wheels:
            session.run("uv", "build", "--quiet", "--out-dir", str(folder), str(package.path))
            wheels[package] = package.wheel(folder)
    return {package: wheels[package] for package in packages}


#: Wheels that this run of nox has built, by folder.
_BUILT: dict[Path, dict[Package, Path]] = {}


def install_wheels(session: nox.Session, wheels: dict[Package, Path], *others: str) -> None:
    """Install the wheels with the extras that their tests need, and `others`."""
    elsewhere = {package: wheels.get(package, package.wheel(NOWHERE)) for package in PACKAGES}
    ours = [f"{package.distribution}{package.extra} @ {wheel.as_uri()}" for package, wheel in wheels.items()]
    install(session, *ours, *others, siblings=located(elsewhere))
    check_origin(session, tuple(wheels), next(iter(wheels.values())).parent)


def pinned(*names: str) -> list[str]:
    """These tools in the versions of constraints.txt, for an environment that takes nothing else from there."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    return [f"{name}=={pins[name]}" for name in names]


def check_origin(session: nox.Session, packages: tuple[Package, ...], origin: Path) -> None:
    """Fail unless exactly these packages of ours are installed, in this version, from this folder."""
    names = [package.distribution for package in packages]
    session.run("python", "-I", str(ROOT / ".ci/check_origin.py"), VERSION, origin.as_uri(), *names)


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Train on scikit-learn's handwritten digits, plain and with algorithms picked by name (about two minutes)."""
    settle(session, threads=2)
    install_editable(session, (*STANDARD, GENERAL, VISION, REPORT), "torchmetrics", "scikit-learn")
    session.run("python", "examples/digits.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run every test but the long ones, or those named after `--`, against an editable install of all packages."""
    run_tests(session, "not long")


@nox.session(default=False)
def long(session: nox.Session) -> None:
    """Run the tests that `tests` skips: more ranks, more kills, two hosts (about a quarter of an hour)."""
    run_tests(session, "long")


def run_tests(session: nox.Session, marks: str) -> None:
    settle(session)
    others = ("pytest-xdist", "torchdata", "torchmetrics", "torchvision", "scikit-learn", "hatchling", "uv")
    others += ("nbclient", "ipykernel", "pandas", "matplotlib")  # a notebook, and what people read it with
    others += ("optuna", "pypiserver")  # a sampler of sweeps; an index for a while
    others += ("editables", "mypy", "ruff")  # what a new plug-in is installed and checked with
    install_editable(session, PACKAGES, *TESTS, *S3, *others)
    session.run("pytest", *(session.posargs or (*beside_each_other(), "-m", marks)))


#: What torch, oneDNN and MKL use of the processor: AVX2 and no more, or nothing beyond SSE 4.
INSTRUCTION_SETS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "plain": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}
PRECISIONS = ("FP16", "FP16WithOverflows", "FP16True", "BF16True", "FP8", "INT8", "TF32", "FP64")
NUMERICAL = (
    *(f"packages/algorithms-{name}/tests" for name in ("general", "vision", "nlp")),
    *(f"packages/core/tests/test_{name}.py" for name in ("clipping", "conformance")),
    *(f"packages/strategies/tests/test_{name}.py" for name in ("fp16", "fp64", "fp8", "int8", "tf32", "true_half")),
    *(f"packages/strategies/tests/test_conformance.py::Test{name}" for name in PRECISIONS),
    *(f"tests/test_{name}.py" for name in ("evaluation", "exactness", "training")),
)


@nox.session(name="instruction-sets", default=False)
@nox.parametrize("limits", list(INSTRUCTION_SETS.values()), ids=list(INSTRUCTION_SETS))
def instruction_sets(session: nox.Session, limits: dict[str, str]) -> None:
    """Run the numerical tests as on older processors, whose rounding differs (about four minutes each)."""
    settle(session)
    install_editable(session, PACKAGES, *TESTS, "pytest-xdist", "torchmetrics")
    session.run("pytest", *beside_each_other(), *(session.posargs or (*NUMERICAL, "-m", "not long")), env=limits)


def beside_each_other() -> tuple[str, ...]:
    """Options that run tests in several processes; each test has one thread, and many wait for processes of their own."""
    return "-n", str(min(os.cpu_count() or 1, 8)), "--dist", "worksteal"


@nox.session
def lint(session: nox.Session) -> None:
    """Check style (ruff), types (mypy) and who imports whom (import-linter)."""
    settle(session)
    tools = ("ruff", "mypy", "import-linter", "types-PyYAML")
    install_editable(session, PACKAGES, *tools, *TESTS, "torchmetrics", "scikit-learn")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-logo")
    session.run("lint-imports", "--no-logo", "--config", "packages/core/pyproject.toml")
    session.run("python", ".ci/circles.py", "12")
    session.run("mypy")
    session.run("mypy", "tests/typing/calls.py")


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the site into dist/site, where every warning is an error, and check links and searches (about four minutes)."""
    settle(session)
    tools = (
        "sphinx",
        "furo",
        "myst-parser",
        "sphinx-copybutton",
        "sphinx-llm",
        "sphinx-notfound-page",
        "sphinx-reredirects",
    )
    # quickjs-ng runs the script of the search; the others are imported by what the reference documents.
    others = ("quickjs-ng", "pytest", "torchmetrics", "torchvision", "scikit-learn")
    install_editable(session, PACKAGES, *tools, *others)
    generated, site = ROOT / "docs/reference/generated", ROOT / "dist/site"
    for folder in (generated, site):
        shutil.rmtree(folder, ignore_errors=True)
    session.run("python", "docs/_generate", str(generated))
    session.run("sphinx-build", "-q", "-W", "--keep-going", "docs", str(site), *session.posargs)
    session.run("python", ".ci/check_site.py", str(site))
    session.run("python", "tests/test_blocks.py")


#: The libraries whose data sets hocket-streaming reads, and what they need besides.
STREAMED = {
    "mosaic": ("mosaicml-streaming", "pillow"),
    "litdata": ("litdata", "pyarrow", "zstandard", "zstd"),
    "webdataset": ("webdataset",),
    "pyarrow": ("pyarrow", "numpy"),
}


@nox.session(default=False)
def streaming(session: nox.Session) -> None:
    """Run all tests of hocket-streaming, beside the libraries whose formats it reads, each in an environment of its own."""
    settle(session)
    others = ("pytest-xdist", "moto[server]", "brotli", "datasets", "pillow", "python-snappy", "safetensors")
    others += ("tokenizers",)
    install_editable(session, (*STANDARD, STREAMING), *TESTS, *others)
    pythons = {}
    for library, needed in STREAMED.items():
        folder = scratch(session) / library
        pythons[library] = str(folder / "bin" / "python")
        session.run(
            "uv", "venv", "--quiet", "--clear", "--python", f"{session.virtualenv.location}/bin/python", str(folder)
        )
        session.run("uv", "pip", "install", "--quiet", "--python", pythons[library], *needed)
    environment = {"STREAMING_PYTHONS": json.dumps(pythons)}
    session.run("pytest", str(STREAMING.path / "tests"), *beside_each_other(), *session.posargs, env=environment)


#: Packages by the name of the session that tests them: those of STANDARD share one, since it installs the same for each.
ISOLATED = {"standard": STANDARD, **{package.folder: (package,) for package in PACKAGES if package not in STANDARD}}


@nox.session(default=False)
@nox.parametrize("tested", list(ISOLATED.values()), ids=list(ISOLATED))
def isolation(session: nox.Session, tested: tuple[Package, ...]) -> None:
    """Run a package's tests, but for the long ones, with nothing of ours installed but its wheel and STANDARD's."""
    settle(session)
    packages = tuple(dict.fromkeys((*STANDARD, *tested)))
    install_wheels(session, build(session, packages, ROOT / "dist/isolation"), *TESTS, "pytest-xdist")
    tests = (str(package.path / "tests") for package in tested)
    session.run("pytest", *tests, *beside_each_other(), "-m", "not long", *session.posargs)


@nox.session(default=False)
def alone(session: nox.Session) -> None:
    """Train with the wheel of core alone, and see what every part that is missing says."""
    settle(session)
    install_wheels(session, build(session, (CORE,), ROOT / "dist/isolation"))
    session.run("python", "-I", str(ROOT / ".ci/alone.py"))


@nox.session(default=False)
def oldest(session: nox.Session) -> None:
    """Run the tests with the oldest versions that the packages say they work with, torch 2.9.0 among them.

    Those of quantization skip: their torchao needs torch 2.10.
    """
    settle(session)
    extras = {**{package: package.extra for package in PACKAGES}, TOOLS: "[onnx,pruning,parquet]"}
    paths = [argument for package, extra in extras.items() for argument in ("-e", f"{package.path}{extra}")]
    tools = pinned(*TESTS, "pytest-xdist", "torchmetrics", "hatchling", "uv")
    session.install("--resolution", "lowest-direct", *paths, *tools, env={"UV_COMPILE_BYTECODE": "0"})
    check_origin(session, PACKAGES, ROOT / "packages")
    session.run("python", "-c", "import torch; assert torch.__version__.startswith('2.9.'), torch.__version__")
    session.run("pytest", *(session.posargs or beside_each_other()))


@nox.session(default=False)
def xla(session: nox.Session) -> None:
    """Train on torch_xla's CPU client beside the CPU itself (about five minutes, most of it compilation)."""
    settle(session)
    install_editable(session, with_extra(CORE, "[xla]"), *TESTS)
    session.env["PJRT_DEVICE"] = "CPU"
    tests = ("test_xla.py", "test_devices.py")
    session.run("pytest", *(str(CORE.path / "tests" / name) for name in tests), *session.posargs)


@nox.session(default=False)
def deepspeed(session: nox.Session) -> None:
    """Run the tests of the deepspeed strategy, which `tests` skips (about three minutes; needs a C++ compiler)."""
    settle(session)
    install_editable(session, with_extra(STRATEGIES, "[deepspeed]"), *TESTS, *PAGES)
    # DeepSpeed compiles itself at run time, with the ninja that stands beside Python, and keeps what it made.
    session.env["TORCH_EXTENSIONS_DIR"] = str(scratch(session) / "extensions")
    tests = ("test_deepspeed.py", "test_deepspeed_arguments.py")
    session.run(
        "pytest", *(str(STRATEGIES.path / "tests" / name) for name in tests), page("deepspeed"), *session.posargs
    )


@nox.session(default=False)
def ray(session: nox.Session) -> None:
    """Run the tests of the ray strategy, which `tests` skips (about three minutes)."""
    settle(session)
    install_editable(session, with_extra(STRATEGIES, "[ray]"), *TESTS, *PAGES)
    tests = ("test_ray.py", "test_ray_arguments.py", "test_on_ray.py")
    session.run("pytest", *(str(STRATEGIES.path / "tests" / name) for name in tests), page("ray"), *session.posargs)


@nox.session(default=False)
def backends(session: nox.Session) -> None:
    """Run the tests of the loggers of W&B, MLflow, Comet and Trackio, which `tests` skips (about four minutes)."""
    settle(session)
    vendors = with_extra(LOGGERS, "[tensorboard,wandb,mlflow,comet,trackio]")
    install_editable(session, vendors, *TESTS, "pytest-xdist", "pillow")
    tests = (f"test_{vendor}.py" for vendor in ("wandb", "mlflow", "comet", "trackio"))
    paths = (str(LOGGERS.path / "tests" / test) for test in tests)
    # Most of their time they wait; and a server is started for a file.
    session.run("pytest", *paths, *beside_each_other(), "--dist", "loadfile", *session.posargs)


@nox.session(default=False)
def migration(session: nox.Session) -> None:
    """Run the tests of hocket-migration beside the other frameworks, which `tests` skips (about four minutes)."""
    settle(session)
    frameworks = replace(MIGRATION, extra="[lightning,transformers,accelerate]")
    packages = tuple(frameworks if package is MIGRATION else package for package in PACKAGES)
    others = ("pytest-xdist", "torchmetrics", "torchvision", "scikit-learn")
    install_editable(session, packages, *TESTS, *others)
    session.run("pytest", str(MIGRATION.path / "tests"), *beside_each_other(), *session.posargs)


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Build dist/, check it, install every extra from a local index (`-- --short`: a few), upload (`-- --index URL`)."""
    settle(session)
    session.install(*pinned("uv", "hatchling", "twine", "cyclonedx-bom", "pypiserver"), "packaging", "pip")
    session.run("python", ".ci/release.py", *session.posargs)


@nox.session(default=False)
def version(session: nox.Session) -> None:
    """Raise the version of all packages: `nox -s version -- 0.2.0`, or `0.2.0rc1`."""
    session.install(*pinned("towncrier"), "packaging")
    session.run("python", "packages/raise_version.py", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Measure hocket beside a hand-written loop and its peers (`-- --short`: without peers, fails on broken ratios)."""
    settle(session)
    install_editable(session, PACKAGES, "torchmetrics", "scikit-learn", "torchvision")
    arguments = list(session.posargs)
    if "--short" not in arguments:
        arguments += [
            "--peers",
            environment(session, "peers", "lightning", "accelerate", "transformers", "torchvision"),
        ]
        # Composer pins an old torch, and with it an old Python.
        arguments += ["--composer", environment(session, "composer", "mosaicml", "torchvision", "setuptools<81")]
        for reader, library in {"litdata": "litdata", "mosaic": "mosaicml-streaming"}.items():
            arguments += [f"--{reader}", environment(session, library, library)]
    session.run("python", "benchmarks/run.py", *arguments)


@nox.session(default=False)
def evidence(session: nox.Session) -> None:
    """Measure what each algorithm gives on small tasks, in about 80 minutes on two cores (`-- --publish` writes the tables)."""
    settle(session)
    others = ("scikit-learn", "mlxtend", "torchvision", "transformers")
    install_editable(session, (CORE, replace(GENERAL, extra="[optimizers]"), VISION, NLP, STRATEGIES), *others)
    with session.chdir("benchmarks"):
        session.run("python", "-m", "evidence", *session.posargs)


@nox.session(default=False)
def porting(session: nox.Session) -> None:
    """Compare ports (docs/how-to/port-from-*.md, a Composer project) with the frameworks that they come from."""
    settle(session)
    install_editable(session, (*STANDARD, GENERAL, VISION, MIGRATION), *TESTS, "scikit-learn", "torchmetrics")
    session.env["PEERS_PYTHON"] = environment(
        session, "peers", "lightning", "accelerate", "transformers", "scikit-learn"
    )
    session.env["COMPOSER_PYTHON"] = environment(
        session, "composer", "mosaicml", "torchvision", "scikit-learn", "setuptools<81"
    )
    session.run(
        "pytest", "tests/test_porting.py", "packages/migration/tests/composer/test_project.py", *session.posargs
    )


def environment(session: nox.Session, name: str, *what: str) -> str:
    """The Python of a further virtual environment of the session, for packages that cannot share one with ours."""
    folder = Path(session.virtualenv.location).resolve() / name
    python = folder / "bin" / "python"
    session.run("uv", "venv", "--quiet", "--allow-existing", "--python", "3.11", str(folder), external=True)
    session.run("uv", "pip", "install", "--quiet", "--compile-bytecode", "--python", str(python), *what, external=True)
    return str(python)
