"""Members, labels and claims, from what ``fx100 status`` sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from fx100_lmcache.admin.inspect import Report, ShardReport
from fx100_lmcache.config import Config
from fx100_lmcache.doctor.question import MP, Question
from fx100_lmcache.findings import Finding, note, ok, problem


def check_volume(report: Report) -> Iterator[Finding]:
    """Pass on what is wrong with the members, or say that all were found."""
    yield from report.findings
    if report.usage is not None:
        yield ok("volume", f"{report.volume}: all {len(report.members)} members found")


def shards_needed(config: Config, question: Question, there: int) -> range:
    """Return the shards that this configuration opens."""
    if MP in question.modes:
        return range(there)
    base = config.inprocess.shard_base
    return range(base, min(base + question.ranks, there))


def check_claims(
    shards: Iterable[ShardReport],
    question: Question,
    program: Callable[[str], str],
) -> Iterator[Finding]:
    """Judge who owns the shards that this configuration opens.

    Parameters
    ----------
    program : callable
        Given a holder's own words, the command line of that process; empty if unknown.
    """
    for shard in shards:
        subject, who = f"shard {shard.shard}", shard.holder or "an unknown process"
        running = program(shard.holder)
        who += f" ({running})" if running else ""
        if shard.state == "in use":
            yield _in_use(subject, who, question)
        elif question.running:
            yield problem(
                subject,
                "nobody holds it, though the server is meant to be running",
                "the adapter or plugin was not loaded: everything is a miss",
                "look for fx100 and 'Failed to create backend' in the log of LMCache or vLLM",
            )
        elif shard.state == "claimed by another host":
            yield _of_another_host(subject, who, renews=shard.renews)
        elif shard.state == "left behind":
            yield note(subject, f"left behind by {who}", "that process died; the next one takes it")
        else:
            yield ok(subject, "free")


def _of_another_host(subject: str, who: str, *, renews: bool) -> Finding:
    if not renews:
        return problem(
            subject,
            f"claimed by another host: {who}",
            "two writers would destroy each other's entries, and a claim of an older version does "
            "not show whether that host lives",
            "stop the server there; if that host is gone: fx100 take-over CONFIG",
        )
    return problem(
        subject,
        f"claimed by another host: {who}",
        "two writers would destroy each other's entries: it opens here once that claim stood "
        "still for claim.watch",
        "fx100 status CONFIG --watch 20; if it is renewed, stop the server there; if it stands "
        "still, start this one, which waits, or: fx100 take-over CONFIG",
    )


def _in_use(subject: str, who: str, question: Question) -> Finding:
    if question.running:
        return ok(subject, f"in use by {who}")
    return problem(
        subject,
        f"in use by {who}",
        "a shard has one owner: a second server or rank does not start with it",
        "if that is this configuration's own server, all is well: fx100 doctor CONFIG --running; "
        "else stop it, or choose another inprocess.shard_base",
    )
