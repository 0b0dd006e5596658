//! Statements: when each starts, and how answers are handled.

use orthodrome_core::id::NodeId;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::Duration;

use super::{Branch, Middleware, Optimizations, Out, Phase, Stage};
use crate::contract::{
    Effect, Failure, Fence, Last, Mark, Note, Part, Reason, Then, Timer, ToAgent, Work, Xid,
};
use crate::hotspot::SourceKey;
use crate::schedule::postpone;

impl<W: Work> Middleware<W> {
    /// Runs the next statements of a transaction. [`Effect::Answers`] or
    /// [`Effect::StatementFailed`] follows, or [`Effect::Finished`]. With [`Last::Commit`], the
    /// answers come first and then the outcome.
    pub fn round(
        &mut self,
        xid: Xid,
        parts: OrdMap<NodeId, Part<W>>,
        last: Last,
        io: Out<'_, '_, W>,
    ) {
        let Some(open) = self.open.get_mut(&xid) else { return };
        if open.phase != Phase::Idle {
            return;
        }
        let is_over =
            |branch: &Branch<W>| matches!(branch.stage, Stage::Preparing | Stage::Prepared);
        if open.branches.values().any(is_over) && !parts.is_empty() {
            // The annotation of the last statement was wrong: a prepared branch accepts no
            // statements.
            self.abort(xid, None, Reason::Marked.into(), io);
            return;
        }
        open.last = last;
        open.since = io.now;
        self.admit(xid, parts, last, io);
    }

    /// Late transaction scheduling (Alg. 2 l. 11-18): delays a transaction that holds no locks yet
    /// and would probably abort.
    pub(super) fn admit(
        &mut self,
        xid: Xid,
        parts: OrdMap<NodeId, Part<W>>,
        last: Last,
        io: Out<'_, '_, W>,
    ) {
        let Some(open) = self.open.get_mut(&xid) else { return };
        if self.optimizations.high_contention && open.branches.is_empty() {
            let places: Vec<SourceKey> = places(&parts).collect();
            if !self.hot.admits(places.iter(), io.rng) {
                open.tries += 1;
                if open.tries > self.config.admission_tries {
                    io.push(Effect::Note(Note::Refused));
                    self.abort(xid, None, Reason::Refused.into(), io);
                    return;
                }
                io.push(Effect::Note(Note::HeldBack));
                open.phase = Phase::HeldBack { parts, last };
                io.push(Effect::SetTimer(Timer::Admit(xid), io.now + self.config.admission_wait));
                return;
            }
        }
        self.launch(xid, parts, io);
    }

    /// Sends every part of a round, each at its scheduled time.
    pub(super) fn launch(
        &mut self,
        xid: Xid,
        mut parts: OrdMap<NodeId, Part<W>>,
        io: Out<'_, '_, W>,
    ) {
        let Some(open) = self.open.get_mut(&xid) else { return };
        open.phase = Phase::Executing;
        open.unanswered = parts.keys().copied().collect();
        open.answers.clear();
        open.failed = None;
        let participants: OrdSet<NodeId> =
            open.branches.keys().chain(parts.keys()).copied().collect();
        let is_global = participants.len() > 1;
        // While the session may still roll back to a savepoint, no branch may prepare.
        let may_end = open.last != Last::No && open.savepoints.is_empty();
        open.is_decentralized = self.optimizations.decentralized_prepare && is_global && may_end;
        if open.is_decentralized {
            // §III-A: sources without statements in the last round prepare at once.
            let others: Vec<NodeId> =
                open.branches.keys().filter(|at| !parts.contains_key(*at)).copied().collect();
            for source in others {
                self.ask_prepare(xid, source, &participants, io);
            }
        }
        if let Some(below) = self.config.inner_below {
            let is_inner = |source: &NodeId| self.rtt(*source) < below;
            if parts.keys().any(is_inner) && !parts.keys().all(is_inner) {
                let outer =
                    parts.keys().filter(|source| !is_inner(source)).copied().collect::<OrdSet<_>>();
                let (outer, inner) =
                    parts.into_iter().partition(|(source, _)| outer.contains(source));
                parts = outer;
                if let Some(open) = self.open.get_mut(&xid) {
                    open.inner = inner;
                }
            }
        }
        self.launch_parts(xid, parts, &participants, io);
        self.after_answer(xid, io);
    }

    pub(super) fn launch_parts(
        &mut self,
        xid: Xid,
        parts: OrdMap<NodeId, Part<W>>,
        participants: &OrdSet<NodeId>,
        io: Out<'_, '_, W>,
    ) {
        let expected = |(&source, part): (&NodeId, &Part<W>)| {
            (source, self.latency(source, &places_of(source, part).collect::<Vec<_>>()))
        };
        let delays = if self.optimizations.latency_aware && parts.len() > 1 {
            postpone(&parts.iter().map(expected).collect())
        } else {
            OrdMap::new()
        };
        for (source, part) in parts {
            self.hot.enter(places_of(source, &part).collect::<Vec<_>>().iter());
            let Some(open) = self.open.get_mut(&xid) else { return };
            let then = match open.last {
                Last::No => Then::Wait,
                Last::Marked | Last::Commit if open.is_decentralized => Then::Prepare,
                Last::Commit
                    if participants.len() == 1
                        && self.config.commit_in_text
                        && open.savepoints.is_empty() =>
                {
                    Then::Commit
                }
                Last::Marked | Last::Commit => Then::Wait,
            };
            let branch = open.branches.entry(source).or_insert_with(Branch::new);
            branch.recent = places_of(source, &part).collect();
            branch.places.extend(branch.recent.iter().cloned());
            branch.writes |= part.writes;
            let marks = branch.marks_before(&open.savepoints);
            if matches!(marks.first(), Some(Mark::Back(_))) {
                io.push(Effect::Note(Note::WentBack));
            }
            branch.outbox = Some(ToAgent::Execute {
                xid,
                round: branch.rounds,
                life: 0,
                peers: peers(source, participants, self.optimizations),
                isolation: open.isolation,
                marks,
                statements: part.statements,
                writes: part.writes,
                then,
            });
            branch.rounds += 1;
            let wait = delays.get(&source).copied().unwrap_or_default();
            if wait.is_zero() {
                branch.stage = Stage::Running(then);
                self.transmit(xid, source, io);
            } else {
                branch.stage = Stage::Waiting;
                io.push(Effect::Note(Note::Postponed));
                io.push(Effect::SetTimer(Timer::Start(xid, source), io.now + wait));
            }
        }
        io.push(Effect::SetTimer(Timer::Resend(xid), io.now + self.config.resend_after));
    }

    /// Sends the message in a branch's outbox if the agent is attached. Otherwise it is sent when
    /// the agent attaches.
    pub(super) fn transmit(&mut self, xid: Xid, source: NodeId, io: Out<'_, '_, W>) {
        let Some(known) = self.sources.get(&source) else { return };
        let Some(fence) = known.fence.filter(|_| known.is_attached) else { return };
        let Some(open) = self.open.get_mut(&xid) else { return };
        let session = open.session;
        let Some(branch) = open.branches.get_mut(&source) else { return };
        if let Some(ToAgent::Execute { life, .. }) = &mut branch.outbox
            && *life == 0
        {
            *life = fence.agent;
        }
        branch.is_sent = true;
        let Some(order) = branch.outbox.clone() else { return };
        let begins = matches!(order, ToAgent::Execute { round: 0, .. });
        let earlier = if begins { self.own_commits(session, source) } else { Vec::new() };
        let msg = if earlier.is_empty() {
            order
        } else {
            ToAgent::After { earlier, order: Box::new(order) }
        };
        self.send(source, msg, io);
    }

    pub(super) fn rtt(&self, source: NodeId) -> Duration {
        self.sources.get(&source).and_then(|source| source.rtt.get()).unwrap_or_default()
    }

    /// The time until the answers of statements on these records arrive: Eq. 3, or Eq. 8 with
    /// forecasts.
    pub(super) fn latency(&self, source: NodeId, places: &[SourceKey]) -> Duration {
        let forecast = if self.optimizations.high_contention {
            let forecast = self.hot.forecast(places.iter()) / 100 * self.config.forecast_percent;
            forecast.min(self.config.forecast_max)
        } else {
            Duration::ZERO
        };
        self.rtt(source) + forecast
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one message")]
    pub(super) fn on_answered(
        &mut self,
        from: NodeId,
        xid: Xid,
        round: u32,
        answers: Vec<W::Answer>,
        fence: Fence,
        took: Duration,
        io: Out<'_, '_, W>,
    ) {
        let Some(branch) = self.branch(xid, from) else { return };
        let Stage::Running(then) = branch.stage else { return };
        if round + 1 != branch.rounds {
            return;
        }
        if branch.fence.is_some_and(|begun| begun != fence) {
            self.abort(xid, None, Reason::Restarted.into(), io);
            return;
        }
        branch.fence = Some(fence);
        let recent = std::mem::take(&mut branch.recent);
        branch.stage = match then {
            Then::Wait => Stage::Idle,
            // The message stays in the outbox until the vote or the outcome arrives.
            Then::Prepare => Stage::Preparing,
            Then::Commit => Stage::Running(Then::Commit),
        };
        if then == Then::Wait {
            branch.outbox = None;
        }
        self.hot.measured(&recent, took);
        if let Some(open) = self.open.get_mut(&xid)
            && open.unanswered.remove(&from)
        {
            open.answers.insert(from, answers);
        }
        self.after_answer(xid, io);
    }

    /// Continues the transaction if every part of the round has been answered.
    pub(super) fn after_answer(&mut self, xid: Xid, io: Out<'_, '_, W>) {
        let Some(open) = self.open.get_mut(&xid) else { return };
        if open.phase != Phase::Executing {
            return;
        }
        if !open.inner.is_empty()
            && open.unanswered.iter().all(|source| open.inner.contains_key(source))
        {
            let inner = std::mem::take(&mut open.inner);
            let participants = open.branches.keys().chain(inner.keys()).copied().collect();
            self.launch_parts(xid, inner, &participants, io);
            return;
        }
        if !open.unanswered.is_empty() {
            return;
        }
        open.phase = Phase::Idle;
        if let Some((source, statement, failure)) = open.failed.take() {
            open.answers.clear();
            io.push(Effect::StatementFailed { xid, source, statement, failure });
            return;
        }
        let answers = std::mem::take(&mut open.answers);
        let (last, is_committing) = (open.last, open.branches.values().any(Branch::is_committing));
        if is_committing {
            open.phase = Phase::Committing;
        }
        io.push(Effect::Answers { xid, answers });
        if last == Last::Commit && !is_committing {
            self.finish_commit(xid, io);
        }
    }

    pub(super) fn on_statement_failed(
        &mut self,
        from: NodeId,
        xid: Xid,
        round: u32,
        statement: u32,
        failure: Failure<W>,
        io: Out<'_, '_, W>,
    ) {
        let Some(open) = self.open.get_mut(&xid) else {
            self.learn_cause(from, xid, failure, io);
            return;
        };
        let is_alone =
            open.unanswered.len() == 1 && open.answers.is_empty() && open.inner.is_empty();
        let Some(branch) = open.branches.get_mut(&from) else { return };
        if !matches!(branch.stage, Stage::Running(_)) || round + 1 != branch.rounds {
            return;
        }
        if !is_alone && open.savepoints.is_empty() {
            // Another source may have executed its part of the same statement.
            self.abort(xid, Some(from), failure, io);
            return;
        }
        (branch.stage, branch.outbox) = (Stage::Idle, None);
        open.last = Last::No;
        open.unanswered.remove(&from);
        // Parts that have not started are dropped.
        for source in std::mem::take(&mut open.inner).into_keys() {
            open.unanswered.remove(&source);
        }
        open.failed.get_or_insert((from, statement, failure));
        self.after_answer(xid, io);
    }

    pub(super) fn on_start_timeout(&mut self, xid: Xid, source: NodeId, io: Out<'_, '_, W>) {
        let Some(branch) = self.branch(xid, source) else { return };
        let Some(ToAgent::Execute { then, .. }) = branch.outbox else { return };
        branch.stage = Stage::Running(then);
        self.transmit(xid, source, io);
    }

    pub(super) fn on_admit_timeout(&mut self, xid: Xid, io: Out<'_, '_, W>) {
        let Some(open) = self.open.get_mut(&xid) else { return };
        let Phase::HeldBack { parts, last } = std::mem::replace(&mut open.phase, Phase::Idle)
        else {
            unreachable!("the timer runs only while a transaction is held back");
        };
        let last = last.max(open.last);
        open.last = last;
        self.admit(xid, parts, last, io);
    }
}

/// The agents to which an agent reports a failure: all others; without O1, none.
pub(super) fn peers(
    source: NodeId,
    participants: &OrdSet<NodeId>,
    optimizations: Optimizations,
) -> Vec<NodeId> {
    let others = participants.iter().copied().filter(|&peer| peer != source);
    if optimizations.decentralized_prepare { others.collect() } else { Vec::new() }
}

pub(super) fn places_of<W: Work>(
    source: NodeId,
    part: &Part<W>,
) -> impl Iterator<Item = SourceKey> + '_ {
    part.records.iter().map(move |key| (source, key.clone()))
}

pub(super) fn places<W: Work>(
    parts: &OrdMap<NodeId, Part<W>>,
) -> impl Iterator<Item = SourceKey> + '_ {
    parts.iter().flat_map(|(&source, part)| places_of(source, part))
}
