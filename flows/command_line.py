"""The console script ``beamline``: ``beamline plan tiny`` is ``python -m flows.plan tiny``.

``beamline --help`` lists the commands, and each has a ``--help`` of its own. docs/runs.md says
how a shell completes commands and recipes.
"""

from __future__ import annotations

import ast
import os
import sys
import tomllib
from contextlib import chdir
from importlib.util import find_spec
from pathlib import Path

import click
from click.shell_completion import CompletionItem

PURPOSES = {
    "Write": ("new", "recipe"),
    "Train": ("run", "retrain", "plan", "launch"),
    "Look": ("ask", "serve", "page", "figures", "ui", "lineage"),
    "Compare": ("compare", "agents", "judge", "rescore"),
    "Keep": ("reproduce", "export", "doctor"),
    "Run one stage": (
        *("prepare", "champion", "cold_start", "reward_model", "reinforce", "evaluate", "verdict"),
        "dvc",
    ),
}
# command -> another module than the one of its name, options, and what it does
SHORT_FORMS = {
    "run": (
        "retrain",
        ("--here",),
        "Run the stages of a recipe in this checkout, without a commit",
    ),
    "dvc": (
        "runs.dvc_command",
        (),
        "Run DVC, such as repro evaluate@mine, where recipes may leave out keys",
    ),
}

COMMIT = 12  # letters of a commit that are shown
INSTALLED = Path(__file__).parents[1]  # the checkout that this program was installed from
PACKAGES = ("beamline", "flows", "params", "tasks")
SHOW_A_RUN = ("page", "figures", "export")  # whatever version has made it


class ByPurpose(click.Group):
    """The commands of ``PURPOSES``, each made when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return [name for names in PURPOSES.values() for name in names]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of this name, or None."""
        return command(cmd_name) if cmd_name in self.list_commands(ctx) else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments begin with; an unknown one ends the program."""
        from params import suggestions

        name, known = args[0], self.list_commands(ctx)
        if name not in known and (meant := suggestions.meant(name, known)):
            ctx.fail(f"No such command '{name}'{meant}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, one section for each purpose."""
        for purpose, names in PURPOSES.items():
            with formatter.section(purpose):
                formatter.write_dl([(name, summary(name)) for name in names])


def version() -> str:
    """Return version and commit of the code that commands run: that of this folder, if it has any.

    The version is that of pyproject.toml, the newest one in CHANGELOG.md.
    """
    from flows.runs import git  # a tenth of a second, which only this needs

    with chdir(Path() if is_checkout(Path()) else INSTALLED):
        project = tomllib.loads(Path("pyproject.toml").read_text()).get("project", {})
        here = git.revision()
    commit = f"commit {here.commit[:COMMIT]}" if here.commit else "no commit"
    number = project.get("version", "without a version")
    return f"beamline {number}, {commit}{', with changes' if here.commit and here.dirty else ''}"


def show_version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    """Print the version, and end."""
    if wanted:
        click.echo(version())
        ctx.exit()


@click.command(cls=ByPurpose, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=show_version,
    help="Show version and commit of the code here.",
)
def beamline() -> None:
    """Train agents that use tools, by reinforcement learning. Call it in a checkout."""


def command(name: str) -> click.Command:
    """Return a command that hands its arguments, and --help, to the module that it starts."""
    arguments = click.Argument(
        ["arguments"], nargs=-1, type=click.UNPROCESSED, shell_complete=recipes
    )
    return click.Command(
        name,
        params=[arguments],
        callback=lambda arguments: start(name, arguments),
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    )


def start(name: str, arguments: tuple[str, ...]) -> None:
    """Replace this process by the one that ``python -m`` starts for a command.

    It runs the code of this folder. What a restored run of an older version has no command for is
    shown by the code that is installed.
    """
    module, options, _ = SHORT_FORMS.get(name, (name, (), ""))
    if is_older_than(module):
        if name not in SHOW_A_RUN:
            raise click.UsageError(
                f"the code here is of an older version and has no command {name}: call it in a "
                "checkout that has it"
            )
        click.echo(f"beamline: {name} by the code of {INSTALLED}: that here has none", err=True)
        take_installed_code()
    command = [sys.executable, "-m", f"flows.{module}", *arguments, *options]
    os.execv(sys.executable, command)


def is_older_than(module: str) -> bool:
    """Return whether there is code of Beamline in this folder, and none of a command."""
    file = f"{module.replace('.', '/')}.py"
    rooms = ("", "commands", "stages")
    return is_checkout(Path()) and not any(Path("flows", room, file).is_file() for room in rooms)


def is_checkout(folder: Path) -> bool:
    """Return whether a folder has the code of Beamline."""
    return all(Path(folder, file).is_file() for file in ("flows/__init__.py", "pyproject.toml"))


def take_installed_code() -> None:
    """Have the programs that this process starts import the installed code, and ``own/`` of here.

    Its packages are linked from a folder without an ``own/``, which could hide the one of here.
    """
    code = Path(".beamline/code").absolute()
    code.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        link = code / package
        link.unlink(missing_ok=True)
        link.symlink_to(INSTALLED / package)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(code), str(Path().absolute())])
    os.environ["PYTHONSAFEPATH"] = "1"  # without it, the code of this folder goes first


def summary(name: str) -> str:
    """Return the first sentence of a command's module, which is not imported for it."""
    if name in SHORT_FORMS:
        return SHORT_FORMS[name][2]
    source = Path(str(getattr(find_spec(f"flows.{name}"), "origin", ""))).read_text()
    return str(ast.get_docstring(ast.parse(source))).split("\n\n")[0].rstrip(".")


def recipes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the recipes of this checkout whose names start with a text."""
    from params import recipe_files  # half a second, which only completion needs

    folder = Path("params")
    return [
        CompletionItem(name) for name in recipe_files.names(folder) if name.startswith(incomplete)
    ]
