"""What can be done with a checkout; ``nox --list`` shows it."""

import nox

nox.needs_version = ">=2026.10"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["tests", "lint", "types"]

EXTRAS: dict[str, list[str]] = nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"]


@nox.session
def demo(session: nox.Session) -> None:
    """Train a digit classifier on two ranks and show that one process trains the same one."""
    install(session, ".[demo]")
    # torchrun sets the thread count by itself where it is unset, and warns about it.
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", "docs/examples/digits.py"]
    session.run(*command, env={"OMP_NUM_THREADS": "1"})


@nox.session
def tests(session: nox.Session) -> None:
    """Run every test that needs no third-party loader; arguments after ``--`` go to pytest."""
    install(session, ".[test]")
    session.run("pytest", "-n", "auto", "--ignore", "tests/integrations", *session.posargs)


@nox.session
def integrations(session: nox.Session) -> None:
    """Run the tests with the libraries that are used beside this one; arguments go to pytest."""
    install(session, ".[integrations]")
    session.run("pytest", "-n", "auto", "tests/integrations", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format."""
    install(session, *EXTRAS["lint"])
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check types, strictly."""
    install(session, ".[demo,test,types]", "nox")
    session.run("mypy")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into ``site/``; any warning is an error."""
    install(session, *EXTRAS["docs"], *EXTRAS["lint"])  # ruff formats the signatures
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def peers(session: nox.Session) -> None:
    """Run every kind of loader on real ranks, with other libraries too, and write ``docs/loaders.md``."""
    install(session, ".[peers]")
    session.run("python", "-W", "ignore", "benchmarks/peers.py", *session.posargs, env={"PYTHONPATH": "tests"})


@nox.session
def agreement(session: nox.Session) -> None:
    """Measure what agreeing costs on 2 to 8 ranks, and write the table of ``docs/agreement.md``."""
    install(session, ".[demo]")
    session.run("python", "benchmarks/agreement.py")


@nox.session
def audit(session: nox.Session) -> None:
    """Measure an audit of ten million samples, as ``docs/audit.md`` tells of it; ``--n 1000000`` is short."""
    install(session, ".[audit]")
    session.run("python", "benchmarks/audit.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure speed and memory beside other libraries, and write ``docs/benchmarks.md``; ``--largest 6`` is short."""
    install(session, ".[bench]")
    install(session, "--no-deps", "open-metric-learning")
    session.run("python", "-W", "ignore", "benchmarks/speed.py", *session.posargs)


@nox.session
def samplers(session: nox.Session) -> None:
    """Measure the samplers, and write the table and the pictures of ``docs/samplers.md``; ``--n 100000`` is short."""
    install(session, ".[bench]")
    session.run("python", "benchmarks/samplers.py", *session.posargs)


def install(session: nox.Session, *packages: str) -> None:
    """Install what is named and all that it needs, in the versions of constraints.txt only."""
    session.install("-c", "constraints.txt", "--build-constraint", "constraints.txt", *packages)
