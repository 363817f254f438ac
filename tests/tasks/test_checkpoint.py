import math
from dataclasses import replace

import numpy as np
import pytest

from tasks import checkpoint, ledger
from tests.tasks.test_learner import (
    MACHINE,
    SETTINGS,
    fresh,
    made_rows,
    run,
    same,
    weights,
)


@pytest.fixture(scope="module")
def initial(policy, tokenizer, tmp_path_factory):
    """The folder of a very small policy."""
    folder = tmp_path_factory.mktemp("initial") / "policy"
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_equal_updates_give_equal_bytes_and_other_orders_do_not(initial, tmp_path):
    settings = SETTINGS.model_copy(update={"epochs": 2, "mini_batches": 2})
    digests = []
    for name, seed in (("one", 1), ("two", 1), ("three", 2)):
        learning = fresh(initial, settings)
        run(learning, made_rows(), settings, seed=seed)
        checkpoint.save(learning, tmp_path / name)
        digests.append(ledger.digest(tmp_path / name))
    assert digests[0] == digests[1] != digests[2]


def test_going_on_from_disk_is_going_on_in_memory(initial, tmp_path):
    settings = SETTINGS.model_copy(update={"warmup_updates": 3, "mini_batches": 2})
    learning = fresh(initial, settings)
    run(learning, made_rows(seed=1), settings)
    checkpoint.save(learning, tmp_path / "between")
    in_memory = run(learning, made_rows(seed=2), settings)
    checkpoint.save(learning, tmp_path / "in_memory")

    restarted = fresh(tmp_path / "between" / checkpoint.POLICY, settings)
    assert restarted.updates == 2
    from_disk = run(restarted, made_rows(seed=2), settings)
    checkpoint.save(restarted, tmp_path / "from_disk")
    assert from_disk == in_memory
    assert ledger.digest(tmp_path / "from_disk") == ledger.digest(tmp_path / "in_memory")


def test_without_its_optimizer_the_next_update_would_differ(initial, tmp_path):
    # proves that the test above looks at the optimizer's state, too
    learning = fresh(initial)
    run(learning, made_rows(seed=1))
    checkpoint.save(learning, tmp_path)
    run(learning, made_rows(seed=2))
    (tmp_path / checkpoint.OPTIMIZER).rename(tmp_path / "elsewhere")
    restarted = fresh(tmp_path / checkpoint.POLICY)
    run(restarted, made_rows(seed=2))
    assert not same(weights(restarted.model), weights(learning.model))


def test_a_policy_that_has_not_learned_is_saved_without_an_optimizer(initial, tmp_path):
    checkpoint._resident.clear()
    checkpoint.save(checkpoint.resident(initial, MACHINE), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.POLICY]


TEXTS = [
    "<think>I compute it.</think><python>12 * 345</python>",
    "<answer>\\boxed{-7}</answer>",
    "ZeroDivisionError: division by zero\r\n\tline 2,  'x' isn't 12",
    "Gr\u00fc\u00dfe, cafe\u0301",  # the accent is a character of its own
    "<|endoftext|><|im_end|>",  # what a tool prints may look like another model's special tokens
]


@pytest.mark.parametrize("text", TEXTS)
def test_the_loaded_tokenizer_writes_as_the_one_that_was_built(initial, tokenizer, tmp_path, text):
    loaded = fresh(initial)
    checkpoint.save(loaded, tmp_path)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    for learning in (loaded, fresh(tmp_path / checkpoint.POLICY)):
        assert learning.tokenizer.encode(text, add_special_tokens=False) == tokens
        assert learning.tokenizer.decode(tokens) == text
        assert max(tokens) < learning.model.config.vocab_size


def test_the_resident_learner_is_used_again_and_another_folder_is_loaded(initial, tmp_path):
    first = fresh(initial)
    assert checkpoint.resident(initial, MACHINE) is first
    checkpoint.save(first, tmp_path)
    other = checkpoint.resident(tmp_path / checkpoint.POLICY, MACHINE)
    assert other is not first
    assert same(weights(other.model), weights(first.model))
    assert checkpoint.resident(initial, MACHINE) is not first, "only one stays in memory"


def test_a_learner_is_known_by_the_folder_that_it_will_have(initial, tmp_path):
    learning = fresh(initial)
    checkpoint.keep_resident(learning, tmp_path / "later" / "policy")
    assert checkpoint.resident(tmp_path / "later" / "policy", MACHINE) is learning
    assert checkpoint.resident(initial, MACHINE) is not learning


def test_after_an_update_that_failed_the_folder_gives_what_lies_in_it(initial):
    # the first mini-batch has changed the weights in memory when the second one fails
    learning = fresh(initial)
    before = weights(learning.model)
    rows = [replace(row, advantage=a) for row, a in zip(made_rows(2), (1.0, math.inf), strict=True)]
    order = np.random.default_rng(1).permutation(2)
    with pytest.raises(RuntimeError, match="update 2"):
        run(
            learning,
            [rows[i] for i in np.argsort(order)],
            SETTINGS.model_copy(update={"mini_batches": 2}),
        )
    assert same(weights(checkpoint.resident(initial, MACHINE).model), before)


@pytest.mark.parametrize("left", [[], ["tokenizer.json"]])
def test_a_folder_that_was_pruned_is_an_error_with_its_remedy(tmp_path, left):
    for name in left:
        (tmp_path / name).write_text("{}")
    checkpoint._resident.clear()
    with pytest.raises(RuntimeError, match=rf"{tmp_path} holds no policy .* run `make clean`"):
        checkpoint.resident(tmp_path, MACHINE)
