"""The invented encyclopedia, read by a reader of our own, and its expert with the real tools."""

import re
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from params.schema.prepare import EncyclopediaQuestions
from tasks.questions import encyclopedia
from tasks.questions.encyclopedia import KINDS, EncyclopediaExpert, build, generate, script
from tasks.questions.experts import play
from tasks.questions.sources import taught
from tasks.recipes import load as settings_of
from tasks.tools.search import save_corpus, search_tool
from tasks.trees import dialogue as talk
from tests.agents import open_tools
from tests.examples import examples

RECIPE = settings_of("tiny-search")
SETTINGS = RECIPE.prepare.questions
RATES = {"wrong_query": 0.2, "wrong_fact": 0.15, "missing_call": 0.1}
SEED = 5


def sizes(**changes):
    few = {"train": 80, "validation": 8, "test": 40, "articles": 300, "kinds": KINDS}
    return EncyclopediaQuestions(source="encyclopedia", **(few | changes))


def expert(traces=80, **rates):
    none = dict.fromkeys(RATES, 0.0)
    return EncyclopediaExpert(kind="encyclopedia", traces=traces, **(none | rates))


@pytest.fixture(scope="module")
def worlds():
    """The entities of the recipe, by split and kind."""
    return build(SETTINGS.articles, SEED)


@pytest.fixture(scope="module")
def problems(worlds):
    return generate(SETTINGS, worlds, SEED)


@pytest.fixture(scope="module")
def made():
    """The material of the recipe, with an expert that makes every mistake."""
    return taught(encyclopedia.material(SETTINGS, SEED), expert(400, **RATES), None, SEED)


@pytest.fixture(scope="module")
def corpus(made, tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    save_corpus(made.documents, folder)
    return folder


@pytest.fixture(scope="module")
def tools(corpus):
    """The recipe's own tools, the sandbox too."""
    with open_tools(RECIPE.tools, 2, corpus) as respond:
        yield respond


def every(problems):
    return [problem for entries in problems.values() for problem in entries]


def entities(world):
    return [entity for members in world.values() for entity in members]


# ---------------------------------------------------------------- a reader of our own

NAME = r"([A-Z]\w*(?: [A-Z]\w*)*)"
WORD, YEAR = r"([a-z]+)", r"(\d{4})"
ARTICLES = {  # what an article says -> the facts in it, in their order
    rf"{NAME} is in {NAME}\. It was founded in {YEAR} and makes {WORD}\.": "country founded goods",
    rf"{NAME}, founded in {YEAR}, makes {WORD}\. It is in {NAME}\.": "founded goods country",
    rf"{NAME} was an? {WORD}, born in {YEAR} in {NAME}\.": "craft born home",
    rf"{NAME}, born in {NAME} in {YEAR}, was an? {WORD}\.": "home born craft",
    rf"{NAME} is an? {WORD} of {YEAR} by {NAME}\.": "form year maker",
    rf"{NAME}, by {NAME}, is an? {WORD} of {YEAR}\.": "maker form year",
}
Book = dict[str, dict[str, str]]


def read(articles) -> Book:
    """Title -> facts, from the texts alone."""
    book = {}
    for text in articles:
        ((found, names),) = (
            (found, names)
            for pattern, names in ARTICLES.items()
            if (found := re.fullmatch(pattern, text))
        )
        title, *facts = found.groups()
        book[title] = dict(zip(names.split(), facts, strict=True))
    return book


def years(book, name):
    facts = book[name]
    return int(facts.get("born") or facts["founded"])


QUESTIONS: dict[str, Callable[..., object]] = {  # what a person reads in a question
    rf"Where was {NAME} born\?": lambda b, x: b[x]["home"],
    rf"When was {NAME} born\?": lambda b, x: b[x]["born"],
    rf"What was the craft of {NAME}\?": lambda b, x: b[x]["craft"],
    rf"In which country is {NAME}\?": lambda b, x: b[x]["country"],
    rf"When was {NAME} founded\?": lambda b, x: b[x]["founded"],
    rf"What does {NAME} make\?": lambda b, x: b[x]["goods"],
    rf"Who made {NAME}\?": lambda b, x: b[x]["maker"],
    rf"When was {NAME} made\?": lambda b, x: b[x]["year"],
    rf"In which country was {NAME} born\?": lambda b, x: b[b[x]["home"]]["country"],
    rf"What does the home of {NAME} make\?": lambda b, x: b[b[x]["home"]]["goods"],
    rf"When was the home of {NAME} founded\?": lambda b, x: b[b[x]["home"]]["founded"],
    rf"Where was the maker of {NAME} born\?": lambda b, x: b[b[x]["maker"]]["home"],
    rf"When was the maker of {NAME} born\?": lambda b, x: b[b[x]["maker"]]["born"],
    rf"What was the craft of the maker of {NAME}\?": lambda b, x: b[b[x]["maker"]]["craft"],
    rf"How old was {NAME} in {YEAR}\?": lambda b, x, year: int(year) - years(b, x),
    rf"How much older (?:was|is) {NAME} than {NAME}\?": lambda b, x, y: years(b, y) - years(b, x),
}


def answer_of(book, text):
    """What the articles answer to a question."""
    ((found, solve),) = (
        (found, solve)
        for pattern, solve in QUESTIONS.items()
        if (found := re.fullmatch(pattern, text))
    )
    return str(solve(book, *found.groups()))


@pytest.fixture(scope="module")
def book(made):
    return read(document.text for document in made.documents)


# ---------------------------------------------------------------- the world and its questions


def test_recipe_has_two_thousand_short_articles(made, book):
    titles = [document.title for document in made.documents]
    assert len(titles) == len(set(titles)) == len(book) >= 2000
    assert abs(len(titles) - SETTINGS.articles) <= 5
    assert set(titles) == set(book), "an article begins with its title"
    assert max(len(document.text.split()) for document in made.documents) <= 20
    assert [d.text for d in made.documents if re.search(r"\ba [aeiou]", d.text)] == []


def test_documents_are_articles_of_mixed_splits(made, worlds):
    articles = {(e.name, e.article) for world in worlds.values() for e in entities(world)}
    assert {(document.title, document.text) for document in made.documents} == articles
    held_out = {entity.name for entity in entities(worlds["test"])}
    half = len(made.documents) // 2
    first = sum(document.title in held_out for document in made.documents[:half])
    assert first / len(held_out) == pytest.approx(0.5, abs=0.1)


def test_an_article_says_what_the_entity_is_known_for(worlds, book):
    for world in worlds.values():
        for entity in entities(world):
            assert book[entity.name] == entity.facts


def test_no_name_is_within_another_one(worlds):
    """Else a search for one could only ever find the other, and a leak could not be told."""
    names = {entity.name for world in worlds.values() for entity in entities(world)}
    words = {tuple(name.split()) for name in names}
    assert not any(part in words for name in words for part in (name[:-1], name[1:]) if part)


def test_entities_know_only_entities_of_their_split(worlds):
    for world in worlds.values():
        names = {entity.name for entity in entities(world)}
        for entity in entities(world):
            assert {other.name for other in entity.links.values()} <= names
            assert [entity.facts[fact] for fact in entity.links] == [
                other.name for other in entity.links.values()
            ]


@pytest.mark.parametrize("split", ["validation", "test"])
def test_no_held_out_entity_in_training_questions(worlds, problems, split):
    asked = "\n".join(problem.question.text for problem in problems["train"])
    assert [e.name for e in entities(worlds[split]) if e.name in asked] == []
    mine = {entity.name for entity in entities(worlds[split])}
    for problem in problems[split]:
        assert {entity.name for entity in problem.entities} <= mine


def test_training_texts_have_every_test_word(problems, made):
    """A small policy copies words that it has met, in names that it has not."""
    known = "\n".join(
        [problem.question.text for problem in problems["train"]]
        + [document.text for document in made.documents]
    )
    words = set(re.findall(r"[A-Za-z]+", known.replace("\n", " ")))
    test_names = {entity.name for p in problems["test"] for entity in p.entities}
    training = " ".join(problem.question.text for problem in problems["train"])
    assert {word for name in test_names for word in name.split()} <= set(
        re.findall(r"[A-Za-z]+", training)
    )
    assert {w for p in problems["test"] for w in re.findall("[A-Za-z]+", p.question.text)} <= words


def test_splits_have_sizes_ids_and_mixed_kinds(problems):
    assert {split: len(entries) for split, entries in problems.items()} == SETTINGS.rows()
    for split, entries in problems.items():
        kinds = [problem.question.kind for problem in entries]
        turns = [SETTINGS.kinds[number % len(SETTINGS.kinds)] for number in range(len(entries))]
        assert kinds == turns
        assert all(problem.question.id.startswith(f"{split}-") for problem in entries)
    assert len({problem.question.id for problem in every(problems)}) == len(every(problems))


def test_no_text_occurs_twice_within_or_across_splits(problems):
    texts = Counter(problem.question.text for problem in every(problems))
    assert [text for text, count in texts.items() if count > 1] == []


def test_the_gold_answer_is_what_the_articles_say(problems, book):
    for problem in every(problems):
        assert problem.question.answers == (answer_of(book, problem.question.text),)


def test_every_form_is_in_training_and_test(problems):
    forms = {form for form in encyclopedia.QUESTIONS if form.kind in SETTINGS.kinds}
    for split in ("train", "test"):
        assert {problem.form for problem in problems[split]} == forms


def test_only_the_kinds_that_are_named_are_asked():
    asked = generate(sizes(kinds=("hop", "fact", "hop")), build(300, 0), 0)["train"]
    assert [problem.question.kind for problem in asked[:6]] == ["hop", "fact", "hop"] * 2
    assert set(KINDS) == {"fact", "hop", "age", "gap"}


def test_ages_and_gaps_are_not_negative(problems):
    for problem in every(problems):
        if problem.form.code:
            assert 0 <= int(problem.question.answers[0]) <= 700
        if problem.year:
            assert int(problem.question.answers[0]) >= 10


@examples(20)
@given(articles=st.integers(1, 600), seed=st.integers(0, 99))
def test_any_size_makes_whole_worlds(articles, seed):
    worlds = build(articles, seed)
    made = [entity.name for world in worlds.values() for entity in entities(world)]
    assert len(set(made)) == len(made)
    assert min(len(members) for world in worlds.values() for members in world.values()) >= 2
    assert len(made) >= articles - 5
    assert len(made) <= articles + 5 or articles < 300, "two of a kind are the least"


def test_material_depends_on_the_seed():
    def of(seed, **changes):
        made = encyclopedia.material(sizes(**changes), seed)
        return made.questions, made.documents

    assert of(1) == of(1)
    assert of(1)[0] != of(2)[0]
    assert of(1)[1] != of(2)[1]
    few, more = of(1)[0], of(1, test=60)[0]
    assert more["train"] == few["train"]
    assert more["test"][:40] == few["test"]


# ---------------------------------------------------------------- what cannot be made


def test_too_few_names_are_an_error():
    said = r"prepare\.questions\.articles (\d+): the words make \d+ names of kind (\w+), enough for"
    limits = {}
    articles = 10**6
    while articles not in limits:
        try:
            worlds = build(articles, 0)
            limits[articles] = "all"
        except ValueError as error:
            found = re.match(said, str(error))
            assert found, error
            assert int(found[1]) == articles
            articles = int(re.search(r"enough for (\d+) articles: lower it", str(error))[1])
    assert SETTINGS.articles <= articles
    assert sum(len(entities(world)) for world in worlds.values()) == pytest.approx(articles, abs=5)
    with pytest.raises(ValueError, match=f"enough for {articles} articles"):
        build(articles + 1, 0)


def test_too_many_questions_are_an_error():
    said = r"prepare\.questions: after \d+ questions for train .* of kind \w+ .* raise articles"
    with pytest.raises(ValueError, match=said):
        generate(sizes(train=500), build(20, 0), 0)


# ---------------------------------------------------------------- looking things up


def searches(plan):
    return [move.argument([]) for move in plan.moves if move.tool == "search"]


def code(plan):
    return next((move.argument([]) for move in plan.moves if move.tool == "python"), "")


def clean(problem, worlds):
    return script(problem, expert(), worlds["train"], SEED)


def test_plan_makes_the_calls_of_its_kind(problems, worlds):
    calls = {"fact": "s", "hop": "ss", "age": "sp", "gap": "ssp"}
    for problem in every(problems):
        plan = clean(problem, worlds)
        assert "".join(move.tool[0] for move in plan.moves) == calls[problem.question.kind]
        assert len(plan.moves) <= RECIPE.dialogue.tool_calls


@pytest.mark.parametrize("results", [1, 2])
def test_search_shows_the_article_of_its_step(problems, worlds, made, corpus, results):
    articles = {document.title: document.text for document in made.documents}
    recipe = RECIPE.tools["search"].model_copy(update={"results": results})
    found = Counter()
    with search_tool(recipe, corpus) as run:
        for problem in every(problems):
            queries = searches(clean(problem, worlds))
            first = [observation.text.split("\n")[0] for observation in run(queries)]
            found[first == [articles[query] for query in queries]] += 1
    assert found[True] >= 0.99 * len(every(problems))


def test_searches_use_words_of_the_last_article(problems, worlds, book):
    for problem in every(problems):
        queries = searches(clean(problem, worlds))
        needed = [book[query][fact] for query, fact in zip(queries, facts_of(problem), strict=True)]
        for entity in problem.entities:
            assert entity.name in queries
            assert entity.name in problem.question.text
        if problem.question.kind == "hop":
            assert queries[1] == needed[0]
        if not problem.form.code:
            assert problem.question.answers == (needed[-1],)


def facts_of(problem):
    """The fact that each search of a problem is after."""
    return problem.form.path * len(problem.entities)


@pytest.mark.parametrize("kind", SETTINGS.kinds)
def test_flawless_expert_reaches_the_gold_answer(problems, worlds, tools, kind):
    chosen = [p for p in every(problems)[::7] if p.question.kind == kind][:40]
    for played in play([clean(problem, worlds) for problem in chosen], tools):
        assert {seen.outcome for seen in played.observations} <= {"ok"}
        assert (played.answer,) == played.script.question.answers
        assert played.trace.flaw == "none"


def test_trace_thinks_searches_and_computes(problems, worlds, tools):
    problem = next(p for p in problems["train"] if p.question.kind == "gap")
    (played,) = play([clean(problem, worlds)], tools)
    text = "".join(part for part, _ in played.trace.parts)
    first, second = problem.entities
    assert re.fullmatch(
        rf"<think>I look it up\.</think><search>{first.name}</search>"
        rf"<result>{first.name}.*</result>"
        rf"<think>I look it up\.</think><search>{second.name}</search>"
        rf"<result>{second.name}.*</result>"
        r"<think>I compute it\.</think><python>\d+ - \d+</python><result>\d+</result>"
        r"<think>Done\.</think><answer>\\boxed\{\d+\}</answer>",
        text,
    )
    assert talk.final_answer(text) == problem.question.answers[0]


# ---------------------------------------------------------------- the expert's flaws


def test_flaws_come_at_their_rates(problems, worlds):
    wrong = expert(**RATES)
    plans = [
        script(problem, wrong, worlds["train"], seed)
        for seed in range(3)
        for problem in problems["train"]
    ]
    counts = Counter(plan.flaw for plan in plans)
    assert set(counts) == {"none", *RATES}
    for flaw, rate in [*RATES.items(), ("none", 1 - sum(RATES.values()))]:
        error = (rate * (1 - rate) / len(plans)) ** 0.5
        assert counts[flaw] / len(plans) == pytest.approx(rate, abs=4 * error)


def test_a_plan_depends_on_seed_and_question_only(problems, worlds):
    def plans(problems, seed):
        made = [script(p, expert(**RATES), worlds["train"], seed) for p in problems]
        return [(plan.question, plan.flaw, searches(plan), code(plan)) for plan in made]

    few = problems["train"][:200]
    assert plans(few[::-1], 1)[::-1] == plans(few, 1)
    assert plans(few, 2) != plans(few, 1)


def flawed(problems, worlds, flaw):
    plans = [script(p, expert(**{flaw: 1.0}), worlds["train"], SEED) for p in problems]
    assert {plan.flaw for plan in plans} == {flaw}
    return list(zip(problems, plans, strict=True))


def test_a_missing_call_answers_unknown_without_a_call(problems, worlds):
    for _, plan in flawed(problems["train"][:100], worlds, "missing_call"):
        assert plan.moves == ()
        assert plan.answer([]) == "unknown"


def looked_up(problem, plan):
    """The entities whose articles the plan begins with."""
    return searches(plan)[:: len(problem.form.path)]


def concluded(plan):
    """The plan's answer; code is worked out here instead of in the sandbox."""
    if code(plan):
        left, right = code(plan).split(" - ")
        return plan.answer([str(int(left) - int(right))])
    return plan.answer([])


def test_wrong_query_continues_with_its_results(problems, worlds, book):
    """Its answer is the right one to the question about the entity that it looked up."""
    training = {entity.name for entity in entities(worlds["train"])}
    for problem, plan in flawed(problems["train"], worlds, "wrong_query"):
        names = looked_up(problem, plan)
        right = [entity.name for entity in problem.entities]
        assert sum(a != b for a, b in zip(names, right, strict=True)) == 1
        assert set(searches(plan)) <= training
        other = problem.form.text.format(*names, year=problem.year)
        assert concluded(plan) == answer_of(book, other)


def test_wrong_fact_is_of_last_article_or_misread(problems, worlds, book):
    for problem, plan in flawed(problems["train"], worlds, "wrong_fact"):
        assert searches(plan) == searches(clean(problem, worlds))
        last = book[searches(plan)[-1]]
        gold = problem.question.answers[0]
        answer = concluded(plan)
        assert answer != gold
        if problem.form.code:
            good, bad = code(clean(problem, worlds)), code(plan)
            assert sum(a != b for a, b in zip(good, bad, strict=True)) == 1
        elif gold.isdigit():
            assert sum(a != b for a, b in zip(gold, answer, strict=True)) == 1
        else:
            assert answer in last.values()


def test_traces_of_flaws_have_real_results(made, worlds, tools, book):
    """None of them shows, or copies from, an entity that is held out."""
    traces, dropped = made.write_traces(tools)
    assert dropped == []
    assert [trace.question for trace in traces] == made.questions["train"][:400]
    assert {trace.flaw for trace in traces} == {"none", *RATES}
    shown = "\n".join(part for trace in traces for part, _ in trace.parts)
    for split in ("validation", "test"):
        assert [e.name for e in entities(worlds[split]) if e.name in shown] == []
    for trace in traces:
        text = "".join(part for part, _ in trace.parts)
        answer, results = talk.final_answer(text), [part for part, own in trace.parts if not own]
        if trace.flaw in ("none", "wrong_query"):
            assert answer in results[-1]
        if trace.flaw == "none":
            assert (answer,) == trace.question.answers
        for year in re.findall(r"\d{4}", " ".join(re.findall("<python>(.*?)</python>", text))):
            known = " ".join([trace.question.text, *results])
            assert trace.flaw == "wrong_fact" or year in known
