"""A game for servers in tests: guess a digit that the seed draws. No part of it is a server's."""

import os
import random
import time


class Game:
    """The digit, and what each guess is answered: an observation, a reward and whether it ends."""

    def reset(self, seed=None, digits=10):
        self.target = random.Random(os.urandom(8) if os.environ.get("FORGETS") else seed).random()
        self.digits, self.tries = digits, 0
        return self._seen(f"Guess a digit below {digits} ({self.target:.3f})."), None, False

    def step(self, guess):
        if guess == -1:
            raise RuntimeError("the game has no such digit")
        if guess == -2:
            time.sleep(600)
        if guess == -3:
            return self._seen("x" * 20_000_000), None, False
        self.tries += 1
        right = int(self.target * self.digits)
        if guess == right:
            return self._seen("Right."), 1.0, True
        return self._seen("Higher." if guess < right else "Lower."), -0.25, False

    def _seen(self, text):
        board = {"text": text, "tries": self.tries}
        return {"board": board, "legal": list(range(self.digits)), "metadata": {}}
