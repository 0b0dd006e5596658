//! Drives one transaction to its end: for the gateway that began it (§5.2.2), and for a node that
//! takes over from a gateway that is gone (§5.2.3). Both use the same code, with a different first
//! request.

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::Outcome;

use super::decide::{Tally, decide, recover, settle};
use super::message::{Answer, Ballot, Msg, Part, Vote};
use crate::ir::{Quorums, View};

/// A transaction that this node drives to its end.
#[derive(Debug)]
pub(super) struct Drive {
    pub txn: TxnId,
    pub ballot: Ballot,
    /// The timestamp at which the transaction would commit, chosen by its gateway.
    pub timestamp: Timestamp,
    pub stage: Stage,
    /// How often the timer of this stage has expired.
    pub times: u32,
    sides: OrdMap<PartitionId, Side>,
    participants: Vec<PartitionId>,
    /// The highest ballot received.
    highest: Ballot,
    is_fast: bool,
    /// True if another node decided it.
    is_recovered: bool,
}

/// The stage of a drive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// A gateway collects votes on its own proposal.
    Proposing,
    /// A node that took over finds out what has been agreed.
    TakingOver,
    /// It is decided, and all replicas must learn the decision.
    Ending(Outcome),
}

/// One participant.
#[derive(Debug)]
struct Side {
    replicas: Vec<NodeId>,
    quorums: Quorums,
    part: Option<Part>,
    answers: OrdMap<NodeId, Answer>,
    /// The result that was sent to be accepted, and its view.
    proposed: Option<(View, Vote)>,
    chosen: Option<Vote>,
    later: Option<Timestamp>,
    is_uncertain: bool,
    is_end_sent: bool,
    acks: OrdSet<NodeId>,
    /// For each replica, the replicas that its view does not count.
    absent: OrdMap<NodeId, Vec<NodeId>>,
}

/// The consequence of an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Progress {
    /// No change.
    Nothing,
    /// The gateway may try again with this timestamp.
    Later(Timestamp),
    /// Another node took over.
    Preempted,
    /// The durable facts decide.
    Decided(Outcome),
    /// Every replica that counts knows the decision.
    Complete,
    /// No replica knows the outcome any more.
    Forgotten,
}

/// Messages to send.
pub(super) type Out = Vec<(NodeId, Msg)>;

impl Drive {
    pub(super) fn new(
        cluster: &Cluster,
        txn: TxnId,
        parts: impl IntoIterator<Item = (PartitionId, Option<Part>)>,
    ) -> Self {
        let side = |(partition, part): (PartitionId, Option<Part>)| {
            let placed = cluster.partition(partition);
            let replicas = placed.map_or_else(Vec::new, |placed| placed.replicas.clone());
            let side = Side {
                quorums: Quorums::of(replicas.len()),
                replicas,
                part,
                answers: OrdMap::new(),
                proposed: None,
                chosen: None,
                later: None,
                is_uncertain: false,
                is_end_sent: false,
                acks: OrdSet::new(),
                absent: OrdMap::new(),
            };
            (partition, side)
        };
        let sides: OrdMap<PartitionId, Side> = parts.into_iter().map(side).collect();
        Self {
            txn,
            ballot: Ballot::default(),
            timestamp: Timestamp::ZERO,
            stage: Stage::Proposing,
            times: 0,
            participants: sides.keys().copied().collect(),
            sides,
            highest: Ballot::default(),
            is_fast: true,
            is_recovered: false,
        }
    }

    /// All participants.
    pub(super) fn participants(&self) -> &[PartitionId] {
        &self.participants
    }

    /// The path on which it was decided, for metrics.
    pub(super) fn path(&self) -> &'static str {
        if self.is_recovered {
            return "recovered";
        }
        match (self.ballot.takeover, self.ballot.round, self.is_fast) {
            (0, 0, true) => "fast",
            (0, 0, false) => "slow",
            (0, ..) => "retry",
            (..) => "recovered",
        }
    }

    /// The gateway proposes the transaction at `timestamp`: for the first time, or in a later
    /// round.
    pub(super) fn propose(&mut self, round: u32, timestamp: Timestamp, out: &mut Out) {
        (self.ballot, self.timestamp) = (Ballot::client(round), timestamp);
        (self.stage, self.times) = (Stage::Proposing, 0);
        self.reset();
        for (&partition, side) in &self.sides {
            for &to in &side.replicas {
                out.extend(self.proposal(partition, side).map(|msg| (to, msg)));
            }
        }
    }

    fn proposal(&self, partition: PartitionId, side: &Side) -> Option<Msg> {
        Some(Msg::ProposeConsensus {
            txn: self.txn,
            partition,
            ballot: self.ballot,
            timestamp: self.timestamp,
            part: side.part.clone()?,
            participants: self.participants.clone(),
        })
    }

    fn reset(&mut self) {
        for side in self.sides.values_mut().filter(|side| side.chosen.is_none()) {
            side.answers.clear();
            (side.proposed, side.later, side.is_uncertain) = (None, None, false);
        }
        if self.ballot.takeover == 0 {
            for side in self.sides.values_mut() {
                side.answers.clear();
                (side.proposed, side.chosen, side.later) = (None, None, None);
            }
        }
    }

    /// This node takes over, with a ballot above every one that it has received.
    pub(super) fn take_over(&mut self, node: NodeId, above: Ballot, out: &mut Out) {
        let takeover = self.highest.max(above).max(self.ballot).takeover + 1;
        if self.ballot.takeover == 0 {
            // The gateway's results in its own round do not bind later ballots.
            self.reset();
        }
        self.ballot = Ballot { takeover, node, round: 0 };
        (self.stage, self.times) = (Stage::TakingOver, 0);
        self.is_fast = false;
        self.reset();
        for (&partition, side) in &self.sides {
            for &to in side.replicas.iter().filter(|_| side.chosen.is_none()) {
                out.push((to, self.change(partition)));
            }
        }
    }

    fn change(&self, partition: PartitionId) -> Msg {
        Msg::CoordinatorChange {
            txn: self.txn,
            partition,
            ballot: self.ballot,
            participants: self.participants.clone(),
        }
    }

    /// Participants whose result only a view change can determine.
    pub(super) fn uncertain(&self) -> impl Iterator<Item = PartitionId> + '_ {
        let is_open = |side: &Side| side.chosen.is_none() && side.is_uncertain;
        self.sides.iter().filter(move |(_, side)| is_open(side)).map(|(id, _)| *id)
    }

    /// Processes a replica's answer. `suspects` are replicas that are not expected to answer soon.
    pub(super) fn on_answer(
        &mut self,
        from: NodeId,
        partition: PartitionId,
        (answer, part): (Answer, Option<Part>),
        suspects: &OrdSet<NodeId>,
        out: &mut Out,
    ) -> Progress {
        self.highest = self.highest.max(answer.promised);
        let Some(side) = self.sides.get_mut(&partition) else { return Progress::Nothing };
        side.absent.insert(from, answer.absent.clone());
        if side.part.is_none() {
            side.part = part;
        }
        if answer.ended.is_some() {
            side.acks.insert(from);
        }
        let age = |answer: &Answer| (answer.view, answer.promised);
        let is_news = side.answers.get(&from).is_none_or(|held| age(held) <= age(&answer));
        if is_news {
            side.answers.insert(from, answer);
        }
        if matches!(self.stage, Stage::Ending(_)) {
            self.send_end(partition, out);
            return self.completed();
        }
        self.evaluate(partition, suspects, false, out)
    }

    /// The current result of one participant's answers.
    fn evaluate(
        &mut self,
        partition: PartitionId,
        suspects: &OrdSet<NodeId>,
        is_overdue: bool,
        out: &mut Out,
    ) -> Progress {
        let Some(side) = self.sides.get_mut(&partition) else { return Progress::Nothing };
        if side.chosen.is_some() {
            return Progress::Nothing;
        }
        // An answer to an earlier round says nothing about this one.
        let is_current = |answer: &Answer| answer.promised >= self.ballot;
        let is_open = |node: &&NodeId| {
            !side.answers.get(node).is_some_and(is_current) && !suspects.contains(node)
        };
        let expected = if is_overdue { 0 } else { side.replicas.iter().filter(is_open).count() };
        let tally = match self.stage {
            Stage::Proposing => settle(side.quorums, self.ballot, &side.answers, expected),
            Stage::TakingOver => recover(side.quorums, self.ballot, &side.answers),
            Stage::Ending(_) => return Progress::Nothing,
        };
        match tally {
            Tally::Wait => Progress::Nothing,
            // The proposed result may be accepted by now, whatever later votes say.
            Tally::Chosen(vote, true) if side.proposed.is_some_and(|(_, other)| other != vote) => {
                Progress::Nothing
            }
            Tally::Chosen(vote, is_fast) => {
                side.chosen = Some(vote);
                self.is_fast &= is_fast;
                self.conclude(out)
            }
            Tally::Propose(vote) => {
                let view = side.answers.values().map(|answer| answer.view).max();
                let view = view.unwrap_or_default();
                if side.proposed.is_none_or(|(before, _)| before < view) {
                    side.proposed = Some((view, vote));
                    self.is_fast = false;
                    self.finalize(partition, out);
                }
                self.conclude(out)
            }
            Tally::Later(timestamp) => {
                side.later = Some(timestamp);
                self.conclude(out)
            }
            Tally::Preempted(_) => Progress::Preempted,
            Tally::Forgotten => Progress::Forgotten,
            Tally::Ended(outcome) => {
                self.is_recovered = true;
                self.end(outcome, out)
            }
            Tally::Uncertain => {
                side.is_uncertain = true;
                Progress::Nothing
            }
        }
    }

    /// Asks a participant's replicas that have not accepted the proposed result to accept it.
    fn finalize(&self, partition: PartitionId, out: &mut Out) {
        let Some(side) = self.sides.get(&partition) else { return };
        let Some((view, vote)) = side.proposed else { return };
        for &to in &side.replicas {
            let has = side.answers.get(&to).and_then(|answer| answer.cast);
            if has.is_some_and(|cast| cast.is_final && cast.ballot == self.ballot) {
                continue;
            }
            let (txn, ballot) = (self.txn, self.ballot);
            let part = side.part.clone().filter(|_| vote.is_ok());
            let participants = self.participants.clone();
            let msg =
                Msg::FinalizeConsensus { txn, partition, view, ballot, vote, part, participants };
            out.push((to, msg));
        }
    }

    /// The current result of all participants together.
    fn conclude(&mut self, out: &mut Out) -> Progress {
        let chosen = |partition| self.sides.get(&partition).and_then(|side: &Side| side.chosen);
        if let Some(outcome) = decide(self.participants.iter().copied(), chosen) {
            return self.end(outcome, out);
        }
        let is_waiting =
            |side: &Side| side.chosen.is_none() && side.later.is_none() && side.proposed.is_none();
        if self.sides.values().any(is_waiting) {
            return Progress::Nothing;
        }
        match self.sides.values().filter_map(|side| side.later).max() {
            Some(timestamp) => Progress::Later(timestamp),
            None => Progress::Nothing,
        }
    }

    /// It is decided: sends the decision to all.
    pub(super) fn end(&mut self, outcome: Outcome, out: &mut Out) -> Progress {
        (self.stage, self.times) = (Stage::Ending(outcome), 0);
        for partition in self.participants.clone() {
            self.send_end(partition, out);
        }
        Progress::Decided(outcome)
    }

    /// Sends a participant's replicas the decision. A commit must contain the writes. If f + 1
    /// replicas do not know the writes, all have executed the commit, and it has left the record of
    /// some.
    fn send_end(&mut self, partition: PartitionId, out: &mut Out) {
        let Stage::Ending(outcome) = self.stage else { return };
        let Some(side) = self.sides.get_mut(&partition) else { return };
        let is_commit = matches!(outcome, Outcome::Committed(_));
        let is_known = side.part.is_some() || side.answers.len() >= side.quorums.slow();
        if side.is_end_sent || (is_commit && !is_known) {
            return;
        }
        side.is_end_sent = true;
        self.resend_end(partition, out);
    }

    fn resend_end(&self, partition: PartitionId, out: &mut Out) {
        let Stage::Ending(outcome) = self.stage else { return };
        let Some(side) = self.sides.get(&partition) else { return };
        for to in side.owing() {
            let part = side.part.clone().filter(|_| matches!(outcome, Outcome::Committed(_)));
            let (txn, participants) = (self.txn, self.participants.clone());
            out.push((
                to,
                Msg::ProposeInconsistent { txn, partition, outcome, part, participants },
            ));
        }
    }

    /// A replica has executed the decision.
    pub(super) fn on_ack(
        &mut self,
        from: NodeId,
        partition: PartitionId,
        absent: Vec<NodeId>,
    ) -> Progress {
        let Some(side) = self.sides.get_mut(&partition) else { return Progress::Nothing };
        side.absent.insert(from, absent);
        if !side.acks.insert(from) {
            return Progress::Nothing;
        }
        self.completed()
    }

    fn completed(&self) -> Progress {
        let is_over = |side: &Side| side.owing().next().is_none();
        match self.stage {
            Stage::Ending(_) if self.sides.values().all(is_over) => Progress::Complete,
            Stage::Ending(_) | Stage::Proposing | Stage::TakingOver => Progress::Nothing,
        }
    }

    /// No further answers arrived for a while: continues with those that have, and asks the other
    /// replicas again. Returns the replicas that have not answered.
    pub(super) fn on_timeout(
        &mut self,
        node: NodeId,
        suspects: &OrdSet<NodeId>,
        out: &mut Out,
    ) -> (Progress, OrdSet<NodeId>) {
        let times = self.times + 1;
        self.times = times;
        let is_silent = |side: &Side, node: &NodeId| !side.answers.contains_key(node);
        let silent: OrdSet<NodeId> = match self.stage {
            Stage::Ending(_) => self.sides.values().flat_map(Side::owing).collect(),
            Stage::Proposing | Stage::TakingOver => self
                .sides
                .values()
                .flat_map(|s| s.replicas.iter().copied().filter(move |n| is_silent(s, n)))
                .collect(),
        };
        match self.stage {
            Stage::Ending(_) => {
                for (&partition, side) in &self.sides {
                    if side.is_end_sent {
                        self.resend_end(partition, out);
                    } else {
                        out.extend(side.owing().map(|to| (to, self.change(partition))));
                    }
                }
                return (Progress::Nothing, silent);
            }
            Stage::TakingOver => {
                self.take_over(node, Ballot::default(), out);
                self.times = times;
                return (Progress::Nothing, silent);
            }
            Stage::Proposing => {}
        }
        for partition in self.participants.clone() {
            let progress = self.evaluate(partition, suspects, true, out);
            if progress != Progress::Nothing {
                return (progress, silent);
            }
        }
        for (&partition, side) in &self.sides {
            if side.chosen.is_some() {
                continue;
            }
            if side.proposed.is_some() && times > 1 {
                self.finalize(partition, out);
            }
            let view = side.answers.values().map(|answer| answer.view).max();
            for &to in &side.replicas {
                // A vote of an earlier round that arrived late does not answer this one.
                let has_voted = side.answers.get(&to).is_some_and(|answer| {
                    Some(answer.view) == view
                        && answer.cast.is_some_and(|cast| cast.ballot >= self.ballot)
                });
                if !has_voted {
                    out.extend(self.proposal(partition, side).map(|msg| (to, msg)));
                }
            }
        }
        (Progress::Nothing, silent)
    }
}

impl Side {
    /// Replicas that have not executed the decision, except those that the view does not count,
    /// according to f + 1 replicas.
    fn owing(&self) -> impl Iterator<Item = NodeId> + '_ {
        let counted_out = |node: &NodeId| {
            let by = self.absent.values().filter(|absent| absent.contains(node)).count();
            by >= self.quorums.slow()
        };
        let is_owing = move |node: &NodeId| !self.acks.contains(node) && !counted_out(node);
        self.replicas.iter().copied().filter(is_owing)
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::id::ClientId;
    use orthodrome_core::topology::Topology;
    use orthodrome_core::txn::AbortReason;

    use super::*;
    use crate::ir::View;
    use crate::tapir::message::Cast;

    const P: PartitionId = PartitionId(0);
    const AT: Timestamp = Timestamp(100);

    fn answer(vote: Vote, is_final: bool) -> (Answer, Option<Part>) {
        let ballot = Ballot::client(0);
        let cast = Some(Cast { ballot, vote, is_final });
        (
            Answer {
                view: View(1),
                promised: ballot,
                cast,
                ended: None,
                absent: vec![],
                is_forgotten: false,
            },
            None,
        )
    }

    /// A gateway that has proposed a refusal must not change to a commit when enough votes for it
    /// arrive later: replicas that have accepted the refusal let other transactions pass.
    #[test]
    fn late_votes_do_not_replace_a_proposed_result() {
        let map = Topology::uniform(5, std::time::Duration::ZERO, std::time::Duration::ZERO);
        let cluster = Cluster::spread(map, 1, 1, 1, 5).unwrap();
        let txn = TxnId::new(ClientId(1), 1);
        let mut drive = Drive::new(&cluster, txn, [(P, Some(Part::default()))]);
        let (mut out, nobody) = (Out::new(), OrdSet::new());
        drive.propose(0, AT, &mut out);
        let (ok, no) = (Vote::PrepareOk(AT), Vote::Abstain);
        for (node, vote) in [(1, no), (2, ok), (3, ok)] {
            drive.on_answer(NodeId(node), P, answer(vote, false), &nobody, &mut out);
        }
        out.clear();
        // No further answer arrived in time.
        let (progress, _) = drive.on_timeout(NodeId(9), &nobody, &mut out);
        let is_refusal = |(_, msg): &(NodeId, Msg)| matches!(msg, Msg::FinalizeConsensus { vote, .. } if !vote.is_ok());
        assert!(progress == Progress::Nothing && out.iter().any(is_refusal), "{out:?}");
        for node in [4, 5] {
            let progress = drive.on_answer(NodeId(node), P, answer(ok, false), &nobody, &mut out);
            assert_eq!(progress, Progress::Nothing, "told on the fast path after all");
        }
        for node in [1, 2] {
            let progress = drive.on_answer(NodeId(node), P, answer(no, true), &nobody, &mut out);
            assert_eq!(progress, Progress::Nothing);
        }
        let progress = drive.on_answer(NodeId(3), P, answer(no, true), &nobody, &mut out);
        let aborted = Outcome::Aborted(AbortReason::Conflict);
        assert_eq!(progress, Progress::Decided(aborted));
    }
}
