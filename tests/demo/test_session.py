import pytest

from demo.model import FIRST_TEXT_TOKEN, VOCABULARY_TOKENS
from demo.session import (
    ANSWER_TOKENS,
    MAX_SESSION_TOKENS,
    MIN_SESSION_TOKENS,
    NEXT_TURN_TOKENS,
    TURNS,
    Session,
    user_text,
    user_turn_sizes,
    warm_up_prompt,
)


def play(session_tokens: int, answer: int = 7) -> tuple[Session, list[list[int]]]:
    session = Session(session_tokens)
    prompts = []
    for prompt in session.prompts():
        prompts.append(prompt)
        session.add_answer([answer] * ANSWER_TOKENS)
    return session, prompts


@pytest.mark.parametrize("session_tokens", [MIN_SESSION_TOKENS, 4_001, 29_800, MAX_SESSION_TOKENS])
def test_last_prompt_has_exactly_the_length_asked_for(session_tokens: int) -> None:
    session, prompts = play(session_tokens)
    assert len(prompts) == TURNS
    assert len(prompts[-1]) == session_tokens
    assert len(session.next_prompt()) == session_tokens + ANSWER_TOKENS + NEXT_TURN_TOKENS


def test_each_prompt_continues_the_one_before_with_the_answer() -> None:
    session, prompts = play(29_800, answer=9)
    for before, after in zip(prompts, [*prompts[1:], session.next_prompt()], strict=True):
        assert after[: len(before)] == before
        assert after[len(before) : len(before) + ANSWER_TOKENS] == [9] * ANSWER_TOKENS


def test_session_is_deterministic_and_turns_differ() -> None:
    assert play(5_000)[1] == play(5_000)[1]
    assert user_text(100, seed=0) != user_text(100, seed=1)


def test_no_special_tokens_are_used() -> None:
    tokens = set(user_text(20_000, seed=3))
    assert min(tokens) == FIRST_TEXT_TOKEN
    assert max(tokens) == VOCABULARY_TOKENS - 1


def test_warm_ups_share_no_prefix_with_the_session_or_each_other() -> None:
    first_chunks = [warm_up_prompt(number)[:256] for number in (1, 2, 3)]
    first_chunks.append(play(29_800)[1][0][:256])
    assert len({tuple(chunk) for chunk in first_chunks}) == 4


@pytest.mark.parametrize("session_tokens", [0, MIN_SESSION_TOKENS - 1, MAX_SESSION_TOKENS + 1])
def test_length_out_of_range_is_refused(session_tokens: int) -> None:
    with pytest.raises(ValueError, match=rf"{session_tokens} tokens .* 2048 to 32000"):
        user_turn_sizes(session_tokens)
