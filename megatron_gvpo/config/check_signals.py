"""What the objective asks for against what the run gives it: rewards, reference, teacher, groups, and the kind of data."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_gvpo.config.facts import Facts, Problem, doubtful, wrong

# Which teacher signals hold what an objective asks for. A sequence's log-prob is the sum of its tokens'; distributions come
# with the log-prob of the sampled token.
SATISFIES = {
    "sequence": ("sequence", "sampled", "topk", "full"),
    "sampled": ("sampled", "topk", "full"),
    "topk": ("topk", "full"),
    "full": ("full",),
}


def problems(facts: Facts) -> Iterator[Problem]:
    yield from _groups(facts)
    yield from _support(facts)
    yield from _data_policy(facts)
    yield from _reference(facts)
    yield from _teacher(facts)
    yield from _gupo(facts)


def _groups(facts: Facts) -> Iterator[Problem]:
    name, needs, size = facts.config.objective.name, facts.needs, facts.config.rollout.group_size
    if size < needs.min_group_size:
        yield wrong(
            f"{name} compares the responses of a group and needs at least {needs.min_group_size}, got {size}",
            "rollout.group_size",
        )
    elif needs.groups and size == 1:
        yield doubtful(f"{name} compares the responses of a group: one alone teaches it nothing", "rollout.group_size")


def _support(facts: Facts) -> Iterator[Problem]:
    rollout = facts.config.rollout
    if rollout.top_k == 0:
        yield wrong("-1 samples from the whole vocabulary, 1 or more from that many candidates; 0 is neither", "rollout.top_k")
    if facts.shape is not None and rollout.top_k > facts.shape.vocab:
        yield wrong(f"{rollout.top_k} is above the model's vocabulary of {facts.shape.vocab}", "rollout.top_k")
    for key, off in (("top_p", rollout.top_p == 1), ("top_k", rollout.top_k in (-1, 0))):
        if facts.needs.full_support and not off:
            yield _assumption(
                facts,
                f"assumes samples from the full support, and {key} {getattr(rollout, key)} cuts it; leave it out",
                f"rollout.{key}",
            )


def _assumption(facts: Facts, why: str, key: str) -> Problem:
    """The run breaks what the method's derivation assumes: refused, unless the user has said to go on."""
    why = f"{facts.config.objective.name} {why}"
    if facts.objective.assumptions == "warn":
        return doubtful(why, key)
    return wrong(f"{why}, or accept it with objective.assumptions: warn", key)


def _data_policy(facts: Facts) -> Iterator[Problem]:
    needs, stale = facts.needs, facts.config.rollout.max_staleness
    tis = "tis" in type(facts.objective).model_fields
    if needs.data == "on_policy":
        remedy = ", or correct it by objective.tis" if tis else ""
        if stale:
            yield _assumption(facts, f"takes this policy's own samples only: set 0{remedy}", "rollout.max_staleness")
        if facts.config.train.optimizer_steps > 1:
            why = f"takes this policy's own samples only, which they are no longer after one step: set 1{remedy}"
            yield _assumption(facts, why, "train.optimizer_steps")
    elif needs.data == "stale" and stale and not (needs.rollout_corrected or needs.rollout):
        remedy = ": set objective.tis" if tis else ""
        why = f"does not correct the step from an older policy that sampled to the one it starts from{remedy}"
        yield _assumption(facts, why, "rollout.max_staleness")


def _reference(facts: Facts) -> Iterator[Problem]:
    # The frozen reference is the run's own starting point, read again from model.path whenever the run resumes.
    if facts.needs.reference and facts.config.model.init == "random":
        keys = [f"objective.{key}" for key in ("kl_coef", "reference") if key in facts.config.objective.options]
        yield wrong(
            "a frozen reference model is read from model.path, and model.init: random reads no weights from there",
            *keys,
            "model.init",
        )


def _teacher(facts: Facts) -> Iterator[Problem]:
    teacher, needs, name = facts.config.teacher, facts.needs, facts.config.objective.name
    if needs.teacher == "none":
        if facts.has_teacher:
            yield doubtful(
                f"{name} takes no teacher signal; the teacher would be asked for nothing", "teacher.path", "teacher.servers"
            )
        return
    if not facts.has_teacher:
        yield wrong(
            f"{name} needs a teacher: set teacher.path, or teacher.servers.urls of a running one",
            "teacher.path",
            "objective.name",
        )
        return
    if teacher.signal not in (fitting := SATISFIES[needs.teacher]):
        yield wrong(
            f"{name} needs the teacher's {needs.teacher} signal, and {teacher.signal} does not hold it; "
            f"set {' or '.join(fitting)}",
            "teacher.signal",
            "objective.name",
        )
    if teacher.where == "colocated":
        for key, source in facts.teachers.items():
            if not source.path:
                yield wrong("a colocated teacher is loaded from a folder: name it", f"{key}.path", "teacher.where")
    if teacher.where == "served":
        if teacher.signal == "full":
            yield wrong(
                "a server cannot send whole distributions; set teacher.where: colocated, or teacher.signal: topk",
                "teacher.signal",
            )
        if facts.config.rollout.temperature != 1:
            yield wrong(
                f"a served teacher scores at temperature 1 and the student at {facts.config.rollout.temperature}; "
                "set 1, or teacher.where: colocated",
                "rollout.temperature",
            )
    if teacher.signal == "sequence" and getattr(facts.objective, "length_alpha", 0):
        yield doubtful(
            "a teacher of another tokenizer does not sum to 1 over the student's tokens, and a weight by length then biases the "
            "optimum: 0 is safe",
            "objective.length_alpha",
        )
    yield from _vocabularies(facts)


def _vocabularies(facts: Facts) -> Iterator[Problem]:
    teacher, student = facts.teacher_shape, facts.shape
    if teacher is None:
        return
    signal, top_k = facts.config.teacher.signal, facts.config.teacher.top_k
    if signal == "topk" and top_k > teacher.vocab:
        yield wrong(f"{top_k} is above the teacher's vocabulary of {teacher.vocab}", "teacher.top_k")
    if student is None or signal == "sequence" or facts.config.teacher.align_vocabulary:
        return
    if teacher.vocab != student.vocab:
        yield wrong(
            f"the teacher's vocabulary has {teacher.vocab} entries and the student's {student.vocab}; "
            f"the {signal} signal compares them one by one; set teacher.align_vocabulary: true to compare those that both have",
            "teacher.path",
        )


def _gupo(facts: Facts) -> Iterator[Problem]:
    gupo = facts.config.gupo
    if isinstance(gupo.delta, float) and gupo.delta <= 0:
        yield wrong(f"must be auto or a number above 0, got {gupo.delta}", "gupo.delta")
    if gupo.enabled is False:
        return
    obstacle = facts.needs.unweighable()
    if obstacle:
        yield wrong(f"{facts.config.objective.name} {obstacle}", "gupo.enabled", "objective.name")
    if gupo.enabled is True and gupo.eta == 0:
        yield doubtful("with eta 0 every group keeps the plain weight; enabled: observe computes without applying", "gupo.eta")
    prompts, data = facts.config.rollout.prompts_per_step, facts.config.parallel.data
    if prompts < data:
        yield wrong(
            f"GUPO keeps a group on one rank, and {prompts} groups a step leave some of the {data} data-parallel ranks "
            "without any",
            "rollout.prompts_per_step",
            "gupo.enabled",
        )
