"""Rollouts in parts: each part goes on from what the one before has left on the disk."""

from tasks.rollouts.rollout_parts import load_part, save_part
from tasks.rollouts.rounds import grow_part


def grown_in_parts(questions, engine, setting, turns, folder):
    """Trees whose paths rest after so many turns, again and again; and the number of parts."""
    begun, parts = questions, 0
    while not parts or any(path.is_open for one in begun for path in one.paths):
        grown = grow_part(begun, engine, setting, 1.0, turns)
        parts += 1
        save_part(grown, folder / str(parts))
        begun = load_part(folder / str(parts))
        assert [paths[0].tree.leaves for paths in grown] == [one.tree.leaves for one in begun]
    return [one.tree for one in begun], parts
