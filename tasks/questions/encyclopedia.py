"""An invented encyclopedia, questions about it, and the scripted expert that looks things up.

People, places and works have names made of a closed set of words, so that a small policy can copy
any new name. Entities of one split refer only to entities of the same split, so the entities of a
test question, and all that they lead to, occur in no training question. Kinds of questions
(``QUESTIONS`` below lists them all):

- fact: one search, and a fact of the article;
- hop: a second search for the fact that the first one found;
- age: a search, then the Python tool on the year in the article;
- gap: two searches, then the Python tool on both years.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from params.schema.base import Probability
from params.schema.prepare import EncyclopediaQuestions
from tasks.environments import Respond
from tasks.questions.contract import ExpertKind, Lesson, ScriptedExpert, Write
from tasks.questions.experts import Dropped, Material, Move, Played, Script, Trace, draw_flaw, play
from tasks.questions.faults import Fault
from tasks.trees.tree import Document, Question


class EncyclopediaExpert(ScriptedExpert):
    """An expert that answers questions about the encyclopedia with search and Python."""

    wrong_query: Probability  # the query names another entry than the question's
    wrong_fact: Probability  # the answer is another word of the search result
    missing_call: Probability  # no tool call; the answer is "unknown"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST = _words(
    "Ada Alba Ben Bram Cleo Cora Dag Dino Elsa Eva Finn Fred Gwen Hugo Ida Ines Jon Kira Leo Lars "
    "Mona Nils Nora Olga Otto Paul Pia Rosa Sven Tara Tina Urs Vera Walt Wim Yara Yves Zeno Zita"
)
LAST = _words(
    "Abbot Adler Berg Blum Cole Crane Dorn Drake Egan Elm Falk Gray Hahn Hood Ibsen Jung Kern Koch "
    "Lund Lynch Marsh Moss Nash Orton Pike Price Quist Rowe Sand Stern Thorn Ulmer Voss West Wolf "
    "York Young Zorn Zuber"
)
SIDE = _words(
    "North South East West Upper Lower Old New Great Little Port Saint Fort Mount Lake Outer Inner "
    "High Deep Long"
)
SITE = _words(
    "Alder Birch Cedar Delta Ember Fjord Grove Haven Inlet Jetty Knoll Ledge Moor Nook Orchard "
    "Pond Quarry Ridge Shore Tarn Vale Weir Yard Zinnia"
)
QUALITY = _words(
    "Amber Blue Calm Dark Early Frozen Golden Hidden Iron Jade Kind Lost Misty Narrow Open Pale "
    "Quiet Red Silver Tall Uneven Violet Wild Young Second Last First Broken"
)
OBJECT = _words(
    "Anchor Bridge Candle Door Engine Feather Garden Harbor Island Journey Kettle Lantern Mirror "
    "Needle Orbit Painter River Shadow Tower Umbrella Valley Window Circle Forest Winter Summer "
    "Letter Road"
)
CRAFT = _words("baker clerk diver dancer judge miner nurse pilot poet potter sailor singer")
COUNTRY = _words("Arvia Belor Corda Dalmor Estia Farland Gorm Helvia Istra Jorland Kelt Lorn")
GOODS = _words("cheese clocks coal cotton glass honey ships silk soap tea tin wool")
FORM = _words("novel ballad play film song painting")

NAMES = {"place": (SIDE, SITE), "person": (FIRST, LAST), "work": (("The",), QUALITY, OBJECT)}
SHARE = {"place": 0.15, "person": 0.6, "work": 0.25}  # of the articles
SPLITS = {"train": 0.65, "validation": 0.05, "test": 0.3}  # of the entities

ARTICLES = {
    "place": (
        "{name} is in {country}. It was founded in {founded} and makes {goods}.",
        "{name}, founded in {founded}, makes {goods}. It is in {country}.",
    ),
    "person": (
        "{name} was a {craft}, born in {born} in {home}.",
        "{name}, born in {home} in {born}, was a {craft}.",
    ),
    "work": (
        "{name} is a {form} of {year} by {maker}.",
        "{name}, by {maker}, is a {form} of {year}.",
    ),
}


@dataclass(frozen=True)
class Form:
    """A question about entities of one kind.

    ``path`` are the facts to follow from each entity; ``code`` is computed by the Python tool from
    the last facts, {0} and {1}, and {year}.
    """

    kind: str
    about: str
    text: str
    path: tuple[str, ...]
    code: str = ""
    entities: int = 1


QUESTIONS = (
    Form("fact", "person", "Where was {0} born?", ("home",)),
    Form("fact", "person", "When was {0} born?", ("born",)),
    Form("fact", "person", "What was the craft of {0}?", ("craft",)),
    Form("fact", "place", "In which country is {0}?", ("country",)),
    Form("fact", "place", "When was {0} founded?", ("founded",)),
    Form("fact", "place", "What does {0} make?", ("goods",)),
    Form("fact", "work", "Who made {0}?", ("maker",)),
    Form("fact", "work", "When was {0} made?", ("year",)),
    Form("hop", "person", "In which country was {0} born?", ("home", "country")),
    Form("hop", "person", "What does the home of {0} make?", ("home", "goods")),
    Form("hop", "person", "When was the home of {0} founded?", ("home", "founded")),
    Form("hop", "work", "Where was the maker of {0} born?", ("maker", "home")),
    Form("hop", "work", "When was the maker of {0} born?", ("maker", "born")),
    Form("hop", "work", "What was the craft of the maker of {0}?", ("maker", "craft")),
    Form("age", "person", "How old was {0} in {year}?", ("born",), "{year} - {0}"),
    Form("age", "place", "How old was {0} in {year}?", ("founded",), "{year} - {0}"),
    Form("gap", "person", "How much older was {0} than {1}?", ("born",), "{1} - {0}", 2),
    Form("gap", "place", "How much older is {0} than {1}?", ("founded",), "{1} - {0}", 2),
)
KINDS = tuple(dict.fromkeys(form.kind for form in QUESTIONS))


@dataclass(frozen=True)
class Entity:
    """The subject of an article: its facts by name, and the facts that have articles too."""

    kind: str
    name: str
    facts: Mapping[str, str]
    article: str
    links: Mapping[str, Entity] = field(default_factory=dict)


World = Mapping[str, Sequence[Entity]]  # kind -> the entities of one split


@dataclass(frozen=True)
class EntityQuestion:
    """A question, its entities, and its form."""

    question: Question
    form: Form
    entities: tuple[Entity, ...]
    year: str  # "" where the question names none


def material(settings: EncyclopediaQuestions, seed: int) -> Material:
    """Draw questions by split; add all articles as one corpus.

    Known are the training questions' problems, and the entities that they are about.
    """
    worlds = build(settings.articles, seed)
    problems = generate(settings, worlds, seed)
    documents = [
        Document(entity.name, entity.article)
        for world in worlds.values()
        for entities in world.values()
        for entity in entities
    ]
    random.Random(f"{seed}/order").shuffle(documents)
    questions = {split: [each.question for each in entries] for split, entries in problems.items()}
    return Material(questions, documents=documents, known=(problems["train"], worlds["train"]))


def write(expert: EncyclopediaExpert, lesson: Lesson) -> tuple[Write, list[Fault]]:
    """Write traces of the first training questions."""
    problems, world = lesson.known
    taught = problems[: expert.traces]
    scripts = [script(problem, expert, world, lesson.seed) for problem in taught]
    return lambda tools: _write_traces(taught, scripts, tools), []


def _write_traces(
    problems: Sequence[EntityQuestion], scripts: Sequence[Script], tools: Respond
) -> tuple[list[Trace], list[Dropped]]:
    """Write the scripts' traces; drop those whose searches did not show the facts that they use."""
    traces, dropped = [], []
    for problem, played in zip(problems, play(scripts, tools), strict=True):
        if played.script.flaw == "none" and not _shown(problem, played):
            dropped.append(Dropped(problem.question.id, "not_shown", played.observations[-1].text))
        else:
            traces.append(played.trace)
    return traces, dropped


def _shown(problem: EntityQuestion, played: Played) -> bool:
    facts = [fact for entity in problem.entities for fact in follow(entity, problem.form.path)]
    searches = played.observations[: len(facts)]
    return all(fact in seen.text for fact, seen in zip(facts, searches, strict=True))


# ---------------------------------------------------------------- the world


def build(articles: int, seed: int) -> dict[str, World]:
    """Draw the entities of each split, about ``articles`` in all.

    Raises ValueError where the lists of words make too few names.
    """
    draw = random.Random(f"{seed}/world")
    names = {kind: _names(kind, articles, draw) for kind in NAMES}
    return {split: _world(share * articles, names, draw) for split, share in SPLITS.items()}


def _names(kind: str, articles: int, draw: random.Random) -> list[str]:
    names = [" ".join(words) for words in product(*NAMES[kind])]
    most = int((len(names) - len(SPLITS)) / SHARE[kind])
    if articles > most:
        raise ValueError(
            f"prepare.questions.articles {articles}: the words make {len(names)} names of kind "
            f"{kind}, enough for {most} articles: lower it"
        )
    draw.shuffle(names)
    return names


def _world(articles: float, names: Mapping[str, list[str]], draw: random.Random) -> World:
    world: dict[str, list[Entity]] = {}
    for kind, share in SHARE.items():  # homes come before people, and people before works
        count = max(2, round(share * articles))
        world[kind] = [_entity(kind, names[kind].pop(), world, draw) for _ in range(count)]
    return world


def _entity(kind: str, name: str, world: World, draw: random.Random) -> Entity:
    links, plain_facts = FACTS[kind](world, draw)
    facts = {**plain_facts, **{fact: other.name for fact, other in links.items()}}
    article = draw.choice(ARTICLES[kind]).format(name=name, **facts)
    return Entity(kind, name, facts, article, links)


Drawn = tuple[dict[str, Entity], dict[str, str]]  # facts with articles of their own, other facts


def _place(world: World, draw: random.Random) -> Drawn:
    country, founded = draw.choice(COUNTRY), str(draw.randint(1100, 1799))
    return {}, {"country": country, "founded": founded, "goods": draw.choice(GOODS)}


def _person(world: World, draw: random.Random) -> Drawn:
    home = draw.choice(world["place"])
    return {"home": home}, {"craft": draw.choice(CRAFT), "born": str(draw.randint(1800, 1899))}


def _work(world: World, draw: random.Random) -> Drawn:
    maker = draw.choice(world["person"])
    return {"maker": maker}, {"form": draw.choice(FORM), "year": str(draw.randint(1900, 1999))}


FACTS: dict[str, Callable[[World, random.Random], Drawn]] = {
    "place": _place,
    "person": _person,
    "work": _work,
}

# ---------------------------------------------------------------- questions


def generate(
    settings: EncyclopediaQuestions, worlds: Mapping[str, World], seed: int
) -> dict[str, list[EntityQuestion]]:
    """Draw problems by split; kinds alternate, no text occurs twice.

    Raises ValueError where the articles allow too few questions.
    """
    return {
        split: list(
            _distinct(split, size, settings.kinds, worlds[split], random.Random(f"{seed}/{split}"))
        )
        for split, size in settings.rows().items()
    }


def _distinct(
    split: str, size: int, kinds: Sequence[str], world: World, draw: random.Random
) -> Iterator[EntityQuestion]:
    taken: set[str] = set()
    for number in range(size):
        kind = kinds[number % len(kinds)]
        for _ in range(1000):
            problem = _problem(f"{split}-{number:05d}", kind, world, draw)
            # of two entities of the same age, neither is older
            if problem.question.text not in taken and problem.question.answers != ("0",):
                break
        else:
            raise ValueError(
                f"prepare.questions: after {number} questions for {split} no new one of kind "
                f"{kind} is found: raise articles or ask for fewer questions"
            )
        taken.add(problem.question.text)
        yield problem


def _problem(identity: str, kind: str, world: World, draw: random.Random) -> EntityQuestion:
    form = draw.choice([form for form in QUESTIONS if form.kind == kind])
    entities = tuple(draw.sample(world[form.about], form.entities))
    if form.entities > 1:
        entities = tuple(sorted(entities, key=lambda entity: int(follow(entity, form.path)[-1])))
    year = ""
    if "{year}" in form.text:
        year = str(int(follow(entities[0], form.path)[-1]) + draw.randint(10, 90))
    text = form.text.format(*(entity.name for entity in entities), year=year)
    facts = [follow(entity, form.path)[-1] for entity in entities]
    answer = _difference(form.code.format(*facts, year=year)) if form.code else facts[0]
    return EntityQuestion(Question(identity, kind, text, (answer,)), form, entities, year)


def follow(entity: Entity, path: Sequence[str]) -> list[str]:
    """Return the facts on a path; the last one answers."""
    facts = []
    for name in path:
        facts.append(entity.facts[name])
        entity = entity.links.get(name, entity)
    return facts


def _difference(code: str) -> str:
    left, right = code.split(" - ")
    return str(int(left) - int(right))


# ---------------------------------------------------------------- the scripted expert


def script(problem: EntityQuestion, expert: EncyclopediaExpert, world: World, seed: int) -> Script:
    """Plan how the expert answers one problem, with a flaw at the documented rates.

    wrong_query: it looks up another entity of the same kind, and continues with the facts there;
    wrong_fact: it takes another fact of the last article, or misreads a digit of the year;
    missing_call: it calls no tool and answers "unknown". A trace has at most one flaw.
    """
    draw = random.Random(f"{seed}/{problem.question.id}")
    flaw = draw_flaw(expert.rates(), draw)
    if flaw == "missing_call":
        return Script(problem.question, flaw, (), "Done.", lambda results: "unknown")
    form, entities = problem.form, list(problem.entities)
    wrong = draw.randrange(len(entities))
    if flaw == "wrong_query":
        others = [entity for entity in world[form.about] if entity is not entities[wrong]]
        entities[wrong] = draw.choice(others)
    moves = [_look_up(query) for entity in entities for query in _queries(entity, form.path)]
    facts = [follow(entity, form.path)[-1] for entity in entities]
    if flaw == "wrong_fact":
        facts[wrong] = _misread(facts[wrong], entities[wrong], form.path, draw)
    if form.code:
        code = form.code.format(*facts, year=problem.year)
        moves.append(Move("I compute it.", "python", lambda results: code))
        return Script(problem.question, flaw, tuple(moves), "Done.", lambda results: results[-1])
    return Script(problem.question, flaw, tuple(moves), "Done.", lambda results: facts[0])


def _queries(entity: Entity, path: Sequence[str]) -> list[str]:
    """Return the searches that follow a path: the entity, then each fact but the last."""
    return [entity.name, *follow(entity, path)[:-1]]


def _look_up(query: str) -> Move:
    return Move("I look it up.", "search", lambda results: query)


def _misread(fact: str, entity: Entity, path: Sequence[str], draw: random.Random) -> str:
    if fact.isdigit():
        position = draw.randrange(2, len(fact))
        digit = draw.choice([digit for digit in "0123456789" if digit != fact[position]])
        return fact[:position] + digit + fact[position + 1 :]
    for name in path[:-1]:
        entity = entity.links[name]
    return draw.choice([other for other in entity.facts.values() if other != fact])


EXPERT = ExpertKind(EncyclopediaExpert, write, ("encyclopedia",), ("search", "python"))
