"""What our own YAML says about space and names."""

from __future__ import annotations

from collections.abc import Iterator

from fx100_lmcache.config import Config, format_size
from fx100_lmcache.doctor.question import IN_PROCESS, MP, Question
from fx100_lmcache.findings import Finding, ok, problem, warning


def check_space(
    config: Config, capacity_bytes: int | None, question: Question
) -> Iterator[Finding]:
    """Judge the reserve and LMCache's watermark against the size of the volume.

    Parameters
    ----------
    capacity_bytes : int or None
        Of all data blocks; None if the volume cannot be opened.
    """
    if capacity_bytes is None:
        return
    space, object_bytes = config.space, config.volume.object_bytes
    reserve_bytes = int(capacity_bytes * space.reserve_fraction)
    subject = "space"
    if reserve_bytes < object_bytes:
        yield warning(
            subject,
            f"space.reserve_fraction {space.reserve_fraction:g} keeps {reserve_bytes} bytes free, "
            f"less than one object of {object_bytes}",
            "on a full volume every put waits for an eviction, and objects are cut into small "
            "pieces",
            f"set space.reserve_fraction: {_share(object_bytes, capacity_bytes)} or more, or give "
            "the volume larger members",
        )
    else:
        share = f"{space.reserve_fraction:.0%} of {format_size(capacity_bytes)}"
        yield ok(subject, f"{share} are kept free by evicting ahead of need")
    if MP in question.modes:
        yield _watermark(config, capacity_bytes)


def _watermark(config: Config, capacity_bytes: int) -> Finding:
    space, object_bytes = config.space, config.volume.object_bytes
    between = 1 - space.reserve_fraction - space.trigger_watermark
    if int(capacity_bytes * between) >= object_bytes:
        return ok("mp: eviction", f"LMCache starts at {space.trigger_watermark:.0%}, before we do")
    return warning(
        "mp: eviction",
        f"space.trigger_watermark {space.trigger_watermark:g} lies less than one object below "
        f"1 - space.reserve_fraction, {1 - space.reserve_fraction:g}",
        "the store evicts by itself before LMCache, which knows what is in use, has looked",
        f"set space.trigger_watermark: {max(0.1, 1 - space.reserve_fraction - 0.05):.2f}",
    )


def _share(part_bytes: int, whole_bytes: int) -> str:
    return f"{min(0.5, part_bytes / whole_bytes + 0.005):.2f}"


def check_identity(config: Config) -> Finding:
    """Judge the tags that tell apart what LMCache's keys do not."""
    identity, subject = config.identity, "identity"
    if identity.model_tags:
        models = ", ".join(sorted(identity.model_tags))
        return ok(subject, f"tagged models: {models}")
    if identity.require_model_tag:
        return problem(
            subject,
            "identity.require_model_tag is on, and identity.model_tags names no model",
            "nothing at all is cached",
            'set identity.model_tags: {"MODEL": "any tag"}',
        )
    if identity.default_model_tag:
        return ok(subject, f"all models have the tag {identity.default_model_tag!r}")
    return warning(
        subject,
        "no model has a tag in identity.model_tags",
        "when the same name means other weights, old entries are taken for its own",
        'set identity.model_tags: {"MODEL": "any tag"}, and change the tag with the weights',
    )


def check_shards(config: Config, formatted: int, question: Question) -> Iterator[Finding]:
    """Judge the number of shards against the ranks.

    Parameters
    ----------
    formatted : int
        Shards that the volume really has.
    """
    if config.volume.shards != formatted:
        yield warning(
            "shards",
            f"volume.shards is {config.volume.shards}, the volume was formatted with {formatted}",
            "the number on the media counts, and ranks are refused by the number in the file",
            f"set volume.shards: {formatted}",
        )
    if IN_PROCESS not in question.modes:
        return
    base, needed = config.inprocess.shard_base, config.inprocess.shard_base + question.ranks
    if needed > min(formatted, config.volume.shards):
        yield problem(
            "in-process: shards",
            f"{question.ranks} ranks from shard {base} on need {needed} shards, there are "
            f"{min(formatted, config.volume.shards)}",
            "a rank without a shard of its own stores and finds nothing",
            f"set volume.shards: {needed} and format the volume anew, or lower "
            "inprocess.shard_base",
        )
    else:
        yield ok("in-process: shards", f"{question.ranks} rank(s) from shard {base} on have one")
