"""A multi-turn conversation as token ids: deterministic, and of an exact length."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from demo.model import FIRST_TEXT_TOKEN, VOCABULARY_TOKENS

TURNS = 4
ANSWER_TOKENS = 16
NEXT_TURN_TOKENS = 200
MIN_SESSION_TOKENS = 2048
MAX_SESSION_TOKENS = 32_000


def user_text(tokens: int, seed: int) -> list[int]:
    """Return what a user says: `tokens` ids, none of them special, the same for equal seeds."""
    return random.Random(seed).choices(range(FIRST_TEXT_TOKEN, VOCABULARY_TOKENS), k=tokens)


def user_turn_sizes(session_tokens: int) -> list[int]:
    """Return how many tokens the user adds in each turn.

    Parameters
    ----------
    session_tokens : int
        Length of the last prompt: all user text and all answers before it, in tokens.

    Returns
    -------
    list of int
        One size per turn. The first turn takes half of the text, as a pasted document would.

    Raises
    ------
    ValueError
        When the session would be too short to be worth a store or too long for the model.
    """
    if not MIN_SESSION_TOKENS <= session_tokens <= MAX_SESSION_TOKENS:
        raise ValueError(
            f"a session of {session_tokens} tokens was asked for; "
            f"it must have {MIN_SESSION_TOKENS} to {MAX_SESSION_TOKENS}"
        )
    user_tokens = session_tokens - (TURNS - 1) * ANSWER_TOKENS
    later = user_tokens // 2 // (TURNS - 1)
    return [user_tokens - (TURNS - 1) * later] + [later] * (TURNS - 1)


@dataclass
class Session:
    """A conversation that grows by user text and by the answers of the model.

    Attributes
    ----------
    session_tokens : int
        Length of the prompt of the last turn before the kill.
    history : list of int
        Token ids of everything said so far.
    """

    session_tokens: int
    history: list[int] = field(default_factory=list)

    def prompts(self) -> Iterator[list[int]]:
        """Yield the prompt of each turn; `add_answer` must be called before the next one."""
        for turn, tokens in enumerate(user_turn_sizes(self.session_tokens)):
            self.history += user_text(tokens, seed=turn)
            yield list(self.history)

    def add_answer(self, tokens: Sequence[int]) -> None:
        """Append what the model said."""
        self.history += tokens

    def next_prompt(self) -> list[int]:
        """Return the prompt of the turn that comes after the restart: history and new text."""
        return self.history + user_text(NEXT_TURN_TOKENS, seed=TURNS)


def warm_up_prompt(number: int) -> list[int]:
    """Return a prompt that shares no chunk with the session or with another warm-up.

    The first request after a start costs seconds extra.
    """
    return user_text(600, seed=1000 + number)
