"""Commits of others that try to leave their worktree, in real repositories of git and DVC."""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from flows.commands import reproduce
from flows.runs import git, transfer
from tests import toy_project as toy
from tests.flows.runs.conftest import RUN

SECRET = "s3cr3t"
MESSAGE = "a run\n\nRecipe: toy"
WHO = ("-c", "user.name=author", "-c", "user.email=author@example.org")


@pytest.fixture(scope="module")
def places(finished, tmp_path_factory):
    """A checkout with a run, that of an author with the same, and a folder that is neither's."""
    root = tmp_path_factory.mktemp("foreign").resolve()
    shutil.copytree(finished, root / "project", symlinks=True)
    toy.run(root, "git", "clone", "--quiet", "--shared", str(finished), "author")
    (root / "outside/folder").mkdir(parents=True)
    (root / "outside/secret").write_text(SECRET)
    return root / "project", root / "author", root / "outside"


@pytest.fixture
def author(places, monkeypatch):
    """The author's checkout, as the run has left it, and the folder outside."""
    project, folder, outside = places
    monkeypatch.chdir(project)
    for words in (("checkout", "--quiet", "--force", "-B", "theirs", RUN), ("clean", "-qffdx")):
        assert toy.run(folder, "git", *words).returncode == 0
    return folder, outside


def fetched(project, author, message=MESSAGE):
    """Commit what the author has made; the commit, which the project has fetched."""
    assert toy.run(author, "git", "add", "--all", "--force").returncode == 0
    done = toy.run(author, "git", *WHO, "commit", "--quiet", "--allow-empty", "--message", message)
    assert done.returncode == 0, done.stdout
    toy.git(project, "fetch", "--quiet", str(author), "+theirs:theirs")
    return toy.git(project, "rev-parse", "theirs")


def snapshot(folder):
    """Every file, link and mode below a folder, as one digest."""
    entries = [
        (str(path), path.lstat().st_mode, str(path.readlink()) if path.is_symlink() else "")
        for path in sorted(folder.rglob("*"))
        if ".git" not in path.parts and "tmp" not in path.parts
    ]
    contents = [Path(path).read_bytes() for path, *_ in entries if Path(path).is_file()]
    return hashlib.md5(repr((entries, contents)).encode()).hexdigest()


# ---------------------------------------------------------------- what an author can do


def file(path, text):
    def change(folder, outside):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text.replace("OUTSIDE", str(outside)))

    return change


def link(path, target):
    def change(folder, outside):
        place = folder / path
        shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target.replace("OUTSIDE", str(outside)))

    return change


def message(text):
    return lambda folder, outside: text.replace("OUTSIDE", str(outside))


def both(*changes):
    return lambda folder, outside: [change(folder, outside) for change in changes] and None


def edit(name, change):
    """Have ``change`` edit the content of a YAML file."""

    def edited(folder, outside):
        content = yaml.safe_load((folder / name).read_text())
        change(content, outside)
        (folder / name).write_text(yaml.safe_dump(content))

    return edited


def out(path, **entries):
    """Give the first stage another out."""

    def stage(content, outside):
        there = json.loads(json.dumps([path, entries]).replace("OUTSIDE", str(outside)))
        content["vars"].append({"dot": "."})
        content["stages"]["first"]["do"].update({"outs": there[:1], **there[1]})

    return edit("dvc.yaml", stage)


def locked(**entries):
    """Change the first out in dvc.lock."""

    def stage(content, outside):
        found = content["stages"]["first@toy"]["outs"][0]
        found |= {key: value.replace("OUTSIDE", str(outside)) for key, value in entries.items()}

    return edit("dvc.lock", stage)


def listing(path):
    """Have dvc.lock name a folder in the project's cache with a file at ``path``."""

    def change(folder, outside):
        there = path.replace("OUTSIDE", str(outside))
        text = json.dumps([{"md5": "0" * 32, "relpath": there}])
        name = hashlib.md5(text.encode()).hexdigest()
        place = Path(f".dvc/cache/files/md5/{name[:2]}/{name[2:]}.dir")
        place.parent.mkdir(exist_ok=True)
        place.write_text(text)
        locked(md5=f"{name}.dir")(folder, outside)

    return change


def remove(name):
    return lambda folder, outside: (folder / name).unlink()


def submodule(folder, outside):
    toy.run(folder, "git", "update-index", "--add", "--cacheinfo", f"160000,{'a' * 40},docs/sub")
    (folder / "docs/sub").mkdir(parents=True)


def entry(name):
    """Put a folder into the tree that git's index does not take."""

    def change(folder, outside):
        def made(command, text):
            done = subprocess.run(["git", *command], cwd=folder, input=text, capture_output=True)
            return done.stdout.strip().decode()

        blob = made(["hash-object", "-w", "--stdin"], b"[core]\n")
        inner = made(["mktree"], f"100644 blob {blob}\tconfig\n".encode())
        tree = subprocess.check_output(["git", "ls-tree", "-z", "HEAD"], cwd=folder)
        whole = made(["mktree", "-z"], tree + f"040000 tree {inner}\t{name}\0".encode())
        commit = made([*WHO, "commit-tree", whole, "-p", "HEAD", "-m", MESSAGE], b"")
        toy.git(folder, "reset", "--soft", commit)
        toy.git(folder, "read-tree", "HEAD^")  # what is committed on top has no such folder
        return

    return change


def dvc_file(text):
    return file("data/sources/x.dvc", text.replace("MD5", "0" * 32))


def variables(name, text):
    take = edit("dvc.yaml", lambda content, _: content["vars"].append(name))
    return both(file(name, text), take)


BOMB = "a0: &a0 [x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 4)}]\n" for i in range(1, 15)
)
PAIRS = {"e": {"matrix": {"a": [*range(300)], "b": [*range(300)]}, "cmd": "x"}}
HOSTILE = {
    # what is said, and what the author has made
    "recipe above": ("'../../outside/x'", message("x\n\nRecipe: ../../outside/x")),
    "recipe elsewhere": ("outside/x'", message("x\n\nRecipe: OUTSIDE/x")),
    "recipe as an option": ("'--detach'", message("x\n\nRecipe: --detach")),
    "two recipes": (r"'toy\\n../x'", message("x\n\nRecipe: toy\nRecipe: ../x")),
    "recipe of a stage": (
        "'first@../x'",
        edit("dvc.lock", lambda lock, _: lock["stages"].update({"first@../x": {"cmd": "x"}})),
    ),
    "settings as a link": (".dvc/config.local", link(".dvc/config.local", "OUTSIDE/secret")),
    "settings as a file": (".dvc/config.local", file(".dvc/config.local", "[core]\n")),
    ".dvc as a link": (".dvc is a link", link(".dvc", "OUTSIDE/folder")),
    "DVC's locks as a link": (".dvc/tmp", link(".dvc/tmp", "OUTSIDE/folder")),
    ".beamline as a link": (".beamline is a link", link(".beamline", "OUTSIDE/folder")),
    "mark of a ready worktree": (".beamline/ready", file(".beamline/ready", "")),
    "table as a link": ("reports/toy/table.md", link("reports/toy/table.md", "OUTSIDE/secret")),
    "reports as a link": ("reports is a link", link("reports", "OUTSIDE/folder")),
    "data as a link": ("data is a link", link("data", "OUTSIDE/folder")),
    "data as a link inside": ("data/toy is a link", link("data/toy", "../docs")),
    "recipes as a link": ("params is a link", both(link("other", "params"), link("params", "x"))),
    "list of recipes as a link": ("params.yaml is a link", link("params.yaml", "params/toy.yaml")),
    "link upwards": ("docs/up", link("docs/up", "../../outside/secret")),
    "link through a link": (  # as text, its target stays in docs
        "docs/deep/er/b is a link",
        both(
            file("other/x", ""),
            link("docs/deep/er/a", "../../../other"),
            link("docs/deep/er/b", "a/../../outside"),
        ),
    ),
    "link to passwords": ("docs/p is a link", link("docs/p", "../.dvc/config.local")),
    "out above": ("'../../../../outside/x'", out("../../../../outside/x")),
    "out elsewhere": ("outside/x'", out("OUTSIDE/x")),
    "out by variables": ("'../../../../outside/x'", out("${dot}./../${dot}${dot}/../outside/x")),
    "out of another folder": ("not below", out("x", wdir="../../../../outside")),
    "out on a server": ("'s3://x/y'", out("s3://x/y")),
    "out for git": ("out .git is where", out(".git")),
    "out for DVC": ("out .dvc/config.local is where", out(".dvc/config.local")),
    "out through a link": ("through the link own", both(link("own/a", "../docs"), out("own/a/x"))),
    "tracked file above": (
        "'../../../../../outside/x'",
        dvc_file("outs:\n- path: ../../../../../outside/x\n  md5: MD5\n"),
    ),
    "tracked file elsewhere": (
        "x.dvc: the out 'x'",
        dvc_file("wdir: OUTSIDE\nouts:\n- path: x\n  md5: MD5\n"),
    ),
    "import of a repository": (
        "x.dvc imports 'x'",
        dvc_file("deps:\n- path: x\n  repo: {url: OUTSIDE}\nouts:\n- path: y\n  md5: MD5\n"),
    ),
    "import of a file": (
        "outside/secret' from elsewhere",
        dvc_file("deps:\n- path: OUTSIDE/secret\nouts:\n- path: y\n  md5: MD5\n"),
    ),
    "input of nobody's": ("outside/secret'", out("data/toy/first", deps=["OUTSIDE/secret"])),
    "digest as a path": ("for its digest", locked(md5="ab/../../../../OUTSIDE/secret")),
    "file of a folder": ("file that leads out", listing(f"{'../' * 40}OUTSIDE/x")),
    "DVC's databases": (
        "sets site_cache_dir",
        file(".dvc/config", "[core]\n    site_cache_dir = OUTSIDE/x\n"),
    ),
    "command of a remote": (
        "sets bearer_token_command",
        file(".dvc/config", "['remote \"x\"']\n    bearer_token_command = touch OUTSIDE/x\n"),
    ),
    "DVC's cache": ("sets dir", file(".dvc/config", "[cache]\n    dir = OUTSIDE/x\n")),
    "variables from elsewhere": (
        "reads variables from '../../secret.yaml'",
        both(
            file("secret.yaml", "a: 1\n"),  # which DVC finds without a worktree
            edit("dvc.yaml", lambda content, _: content["vars"].append("../../secret.yaml")),
        ),
    ),
    "stage with a colour": (
        r"'first\\x1b[31m@toy'",
        edit("dvc.lock", lambda lock, _: lock["stages"].update({"first\x1b[31m@toy": {}})),
    ),
    "submodule": ("docs/sub is a submodule", submodule),
    "other bytes": ("UTF-16", file(".gitattributes", "none.yaml working-tree-encoding=UTF-16\n")),
    "program of git": ("the filter ours", file(".gitattributes", "*.py filter=ours\n")),
    "dvc.yaml that nests": ("dvc.yaml nests deeper", file("dvc.yaml", "a: " + "[" * 100_000)),
    "dvc.lock that nests": ("dvc.lock nests deeper", file("dvc.lock", "a: " + "[" * 100_000)),
    "tracked file that nests": ("x.dvc nests deeper", dvc_file("- " * 200)),
    "variables that nest": ("b.yaml nests deeper", variables("b.yaml", "a: " + "{b: " * 5000)),
    "variables that nest as JSON": (
        "nests too deeply",
        variables("b.json", '{"a": ' + "[" * 5000 + "]" * 5000 + "}"),
    ),
    "aliases of aliases": ("b.yaml has more than 500000 values", variables("b.yaml", BOMB)),
    "alias of itself": ("the alias *a before", variables("b.yaml", "a: &a [*a]")),
    "a stage for each pair": (
        "dvc.yaml stands for 90002 stages",
        edit("dvc.yaml", lambda content, _: content["stages"].update(PAIRS)),
    ),
    "stage that is a list": (
        "dvc.lock, first@toy: is no stage",
        edit("dvc.lock", lambda lock, _: lock["stages"].update({"first@toy": [1]})),
    ),
    "folders in folders": ("lies in 501 folders", file("docs/" + "d/" * 500 + "x", "x")),
    "name with a colour": (r"'docs/a\\x1b[31m'", file("docs/a\x1b[31m", "x")),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_commit_that_leaves_its_worktree_is_refused_by_name(places, author, capfd, case):
    project, (folder, outside) = places[0], author
    said, change = HOSTILE[case]
    toy.git(project, "config", "filter.ours.smudge", f"touch {outside}/x; cat")
    commit = fetched(project, folder, change(folder, outside) or MESSAGE)
    before = snapshot(outside), snapshot(project)
    assert reproduce.main(["theirs"]) == 2
    text = "".join(capfd.readouterr())
    assert f"commit {commit} is refused" in text
    assert said.replace(r"\\", "\\") in text, text
    assert SECRET not in text
    assert text.replace("\n", "").isprintable()
    assert (snapshot(outside), snapshot(project)) == before


@pytest.mark.parametrize("name", [".GIT", "git~1"])
def test_names_that_mean_the_folder_of_git_are_refused(places, author, capfd, name):
    folder, outside = author
    entry(name)(folder, outside)
    toy.git(places[0], "fetch", "--quiet", str(folder), "+theirs:theirs")
    assert reproduce.main(["theirs"]) == 2
    assert f"{name}/config: a part of this path" in capfd.readouterr().err


def test_all_that_is_wrong_is_said_at_once(places, author, capfd):
    folder, outside = author
    for number in range(30):
        link(f"docs/{number:02}", "OUTSIDE/secret")(folder, outside)
    fetched(places[0], folder, f"{MESSAGE}\nRecipe: ../x")
    assert reproduce.main(["theirs"]) == 2
    text = capfd.readouterr().err
    assert r"'toy\n../x'" in text
    assert "docs/00" in text
    assert "and 11 more" in text


def test_an_ordinary_commit_is_restored_with_this_checkouts_settings(places, author, capfd):
    project, (folder, outside) = places[0], author
    link("docs/plots.md", "../reports/toy/table.md")(folder, outside)
    link("data/sources/newest", "intake/a.jsonl")(folder, outside)
    link("reports/newest", "toy")(folder, outside)
    file("data/sources/intake/a.jsonl", "{}\n")(folder, outside)
    file(".dvc/plots/template.json", "{}")(folder, outside)
    file(".dvc/config", "[core]\n    remote = theirs\n['remote \"theirs\"']\n    url = x\n")(
        folder, outside
    )
    file("reports/toy/table.md", "a\x1b]0;title\x07\u009b31mb\u202ec\n")(folder, outside)
    commit = fetched(project, folder)
    before = snapshot(outside)
    assert reproduce.main(["theirs"]) == 1, "the table is not what the run has made"
    text, faults = capfd.readouterr()
    assert faults.startswith("reproduce: reports/toy/table.md of the commit is not what its run")
    place = Path(text.splitlines()[-1])
    assert (place / "data/toy/first").read_text() == "first\n"
    assert (place / "docs/plots.md").is_symlink()
    assert r"a\x1b]0;title\x07\x9b31mb\u202ec" in text
    assert transfer.default_remote(place) is None, "that of the commit would be asked"
    assert (place / ".dvc/config.local").stat().st_mode & 0o777 == 0o600
    assert toy.git(place, "status", "--porcelain") == ""
    assert snapshot(outside) == before
    git.remove_worktree(place)
    assert commit.startswith(place.name.removeprefix("toy-"))


def no_stages(folder, outside):
    edit("dvc.yaml", lambda content, _: content.update(stages={}))(folder, outside)


NOT_RESTORED = {
    # exit status, what is said, and what the author has made
    "no lock": (2, "no stage for the recipe 'toy' in its dvc.lock", remove("dvc.lock")),
    "no pipeline": (2, "is no run: it has no dvc.yaml", remove("dvc.yaml")),
    "no such recipe": (
        2,
        "'nosuch' in its dvc.lock: it has runs of",
        message("x\n\nRecipe: nosuch"),
    ),
    "no stages": (2, "dvc.yaml has no stage for the recipe 'toy'", no_stages),
    "half a run": (
        1,
        "has no later@toy: the run of toy has not ended",
        edit("dvc.lock", lambda lock, _: lock["stages"].pop("later@toy")),
    ),
    "size as text": (2, "validation failed", locked(size="x")),
    "key of nobody": (1, "extra keys not allowed", dvc_file("cmd: x\nouts: []\n")),
    "digest of nothing": (1, "no default remote to pull it from", locked(md5="ab" * 16)),
}


@pytest.mark.parametrize("case", NOT_RESTORED)
def test_what_is_not_restored_is_said_with_the_cause_and_the_commit(places, author, capfd, case):
    folder, outside = author
    status, said, change = NOT_RESTORED[case]
    commit = fetched(places[0], folder, change(folder, outside) or MESSAGE)
    assert reproduce.main(["theirs"]) == status
    text = capfd.readouterr().err
    assert said in text
    assert f"commit {commit}" in text
    assert ("no default remote" in text) == (case == "digest of nothing")
    assert text.count("\n") == 1, "one line"


def test_a_worker_refuses_it_too(places, author):
    from flows import deploy  # with Prefect, which the other tests do without

    folder, outside = author
    link(".beamline", "OUTSIDE/folder")(folder, outside)
    commit = fetched(places[0], folder)
    place = places[0] / ".beamline/runs/worker"
    with pytest.raises(ValueError, match=r"\.beamline is a link"):
        deploy.receive.fn("first@toy", commit, {}, place)
    assert not place.exists()


def test_a_link_at_the_settings_is_replaced_and_not_followed(places, author):
    project, (_, outside) = places[0], author
    place = project / ".beamline/runs/one"
    git.add_worktree(place, git.resolve(RUN))
    (place / ".dvc/config.local").symlink_to(outside / "secret")
    transfer.share(place)
    assert not (place / ".dvc/config.local").is_symlink()
    assert (outside / "secret").read_text() == SECRET
    shutil.rmtree(place / ".dvc")
    (place / ".dvc").symlink_to(outside / "folder")
    with pytest.raises(ValueError, match="is no folder"):
        transfer.share(place)
    assert list((outside / "folder").iterdir()) == []
    git.remove_worktree(place)
