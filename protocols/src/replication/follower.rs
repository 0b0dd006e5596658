//! How a follower processes a leader's log: Raft §5.3, the receiver's side.

use orthodrome_core::NodeId;

use super::checks::Sum;
use super::message::{Beat, Message, Record};
use super::replica::Replica;
use super::{Entry, Index, Io, Replicated, Term};

impl<R: Replicated> Replica<R> {
    /// Raft Figure 2, AppendEntries, receiver's steps 2 to 5.
    pub(super) fn on_append_entries(
        &mut self,
        from: NodeId,
        (prev_index, prev_term): (Index, Term),
        entries: Vec<Entry<R::Command>>,
        chosen: Index,
        io: &mut impl Io<R>,
    ) {
        if self.awaits_snapshot() {
            return;
        }
        let base = self.log.base_index();
        let through = prev_index.plus(entries.len());
        // Entries up to the base are chosen, so they agree without a comparison.
        let agrees = prev_index < base || self.log.term_at(prev_index) == Some(prev_term);
        if self.incomplete || !agrees {
            self.reject(from, prev_index, prev_term, io);
            return;
        }
        let mut last_ticket = None;
        let mut index = prev_index;
        for entry in entries {
            index = index.next();
            if index <= base || self.log.term_at(index) == Some(entry.term) {
                continue;
            }
            if index <= self.log.last() {
                self.truncate(index, io);
            }
            self.log.append(entry.clone());
            last_ticket = Some(io.persist(Record::Entry { index, entry }));
        }
        if let Some(ticket) = last_ticket {
            self.writes.push_back((ticket, index));
        }
        self.received = self.received.max(through).max(base);
        self.owed = self.owed.max(through);
        self.choose(chosen.min(self.received));
        if self.matched() >= self.owed {
            self.reply(from, io);
        }
    }

    /// Raft §5.3, step 3: an existing entry conflicts with a new one.
    fn truncate(&mut self, from: Index, io: &mut impl Io<R>) {
        assert!(
            from > self.chosen,
            "{self}: the leader's log has another entry at {from}, which is chosen"
        );
        self.log.truncate(from);
        let kept = from.previous();
        self.durable_index = self.durable_index.min(kept);
        for (_, index) in &mut self.writes {
            *index = (*index).min(kept);
        }
        if !self.config.mutations.forget_truncation() {
            io.persist(Record::Truncate { from });
        }
    }

    /// The last entry up to which the log agrees with the leader's and is durable. A node with an
    /// incomplete state reports nothing of its log, or the leader would believe that it needs no
    /// snapshot.
    fn matched(&self) -> Index {
        if self.incomplete { Index(0) } else { self.received.min(self.own_copy()) }
    }

    fn reply(&mut self, to: NodeId, io: &mut impl Io<R>) {
        self.acked = self.matched();
        let (term, matched, received, beat) = (self.term, self.acked, self.received, self.beat);
        let reply = Message::AppendReply { term, matched, received, beat };
        self.send_when_term_durable(to, reply, io);
    }

    /// Entries became durable: one reply covers all of them.
    pub(super) fn acknowledge(&mut self, io: &mut impl Io<R>) {
        if let Some(leader) = self.leader
            && self.matched() > self.acked
        {
            self.reply(leader, io);
        }
    }

    fn reject(&mut self, to: NodeId, prev_index: Index, prev_term: Term, io: &mut impl Io<R>) {
        let (hint_index, hint_term) = self.log.agreeable(prev_index, prev_term);
        let reject = Message::AppendReject {
            term: self.term,
            prev_index,
            hint_index,
            hint_term,
            wants_snapshot: self.incomplete,
            beat: self.beat,
        };
        self.send_when_term_durable(to, reject, io);
    }

    /// Raft §5.2. Answered at once: the promise does not depend on entries.
    pub(super) fn on_heartbeat(
        &mut self,
        from: NodeId,
        chosen: Index,
        beat: Beat,
        sum: Option<Sum>,
        io: &mut impl Io<R>,
    ) {
        self.choose(chosen.min(self.received));
        if self.incomplete && !self.receives_snapshot() {
            self.reject(from, self.log.last(), self.log.last_term(), io);
            return;
        }
        let (term, matched) = (self.term, self.matched());
        let received = if self.incomplete { Index(0) } else { self.received };
        let sum = self.answer_sum(from, sum);
        let reply = Message::HeartbeatReply { term, matched, received, beat, sum };
        self.send_when_term_durable(from, reply, io);
    }
}
