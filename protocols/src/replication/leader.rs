//! How a leader works: Raft §5.3 and §5.4.2, the sender's side. Reads and leases: thesis §6.4.
//! Leadership transfer: thesis §3.10.

use std::collections::VecDeque;
use std::sync::Arc;

use orthodrome_core::{NodeId, Time, Wire as _};

use super::change::Change;
use super::checks::Sum;
use super::log::Log;
use super::message::{Beat, Message, Record};
use super::replica::{Replica, Role};
use super::snapshot::Outgoing;
use super::{Config, Entry, Event, Index, Io, Payload, Replicated, Shared, Term, Timer};

/// The least size to which losses reduce messages: one packet.
const BATCH_BYTES_MIN: usize = 1_024;

/// The state that a leader keeps during its term.
#[derive(Debug)]
pub(super) struct Leading<R: Replicated> {
    /// The progress of each other member, and of members that are leaving; by node.
    pub(super) progress: Vec<Progress<R>>,
    /// Increased for every message that must be distinguished from earlier ones.
    pub(super) round: u64,
    /// When it was elected.
    since: Time,
    /// The first entry of its term. When it is chosen, the leader is ready (Raft §5.4.2, §8).
    pub(super) first: Index,
    pub(super) is_ready: bool,
    /// True if the next flush may have something to send.
    pub(super) is_dirty: bool,
    /// True if the next flush sends the chosen index to every member.
    announces: bool,
    /// Reads in order; each waits for a round of heartbeats.
    reads: VecDeque<Read>,
    /// True if the last of `reads` wait for a round that has not begun.
    has_new_reads: bool,
    pub(super) transfer: Option<Transfer>,
    /// Nodes that received `TimeoutNow`, and in which round. Each may act on it at any time until
    /// it answers a later round, so there is no lease until all have answered. At most one entry
    /// for each node.
    yielded: Vec<Yielded>,
    /// When leadership was last offered to the preferred leader.
    offered_at: Option<Time>,
    /// A pending change of members whose new voters are catching up.
    pub(super) change: Option<Change>,
    /// The number of snapshots begun in this term.
    pub(super) snapshots: u64,
    indexes: Vec<Index>,
    /// The last entry of the span that members are comparing, and of the last span that they have
    /// compared.
    pub(super) comparing: Option<Index>,
    pub(super) compared: Index,
}

#[derive(Debug)]
struct Read {
    id: u64,
    /// None until the read's round begins.
    round: Option<u64>,
}

#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) to: NodeId,
    /// When the transfer is given up, if this node still leads.
    pub(super) until: Time,
    pub(super) is_asked: bool,
}

#[derive(Debug)]
struct Yielded {
    to: NodeId,
    round: u64,
    at: Time,
}

/// The leader's knowledge of another member.
#[derive(Debug)]
pub(super) struct Progress<R: Replicated> {
    pub(super) node: NodeId,
    /// The last entry up to which its log agrees with the leader's and is durable.
    pub(super) matched: Index,
    /// The next entry to send.
    pub(super) next: Index,
    pub(super) mode: Mode<R>,
    inflight: Inflight,
    /// The largest size of the entries in the next message, in bytes. On links that lose packets, a
    /// long message arrives less often than a short one. So the size shrinks with every loss and
    /// grows with every success.
    batch_bytes: usize,
    /// The round in which entries were last sent.
    sent_round: u64,
    /// The latest of the leader's messages that it answered.
    beat: Option<Beat>,
    /// Its last answer to a sum.
    pub(super) sum: Option<Sum>,
    /// When its last answer came, and since when its answers have come without a long gap.
    pub(super) heard_at: Option<Time>,
    steady_since: Time,
}

/// The messages with entries that a member has not confirmed.
#[derive(Debug, Default)]
struct Inflight {
    /// Last index and size of each.
    messages: VecDeque<(Index, usize)>,
    /// The sum of their sizes. On a long link there are many, and each flush asks for the sum.
    bytes: usize,
}

impl Inflight {
    fn push(&mut self, end: Index, bytes: usize) {
        self.messages.push_back((end, bytes));
        self.bytes += bytes;
    }

    /// The member has confirmed all entries up to `matched`.
    fn confirm(&mut self, matched: Index) {
        while let Some(&(end, bytes)) = self.messages.front()
            && end <= matched
        {
            self.messages.pop_front();
            self.bytes -= bytes;
        }
    }

    fn clear(&mut self) {
        self.messages.clear();
        self.bytes = 0;
    }

    fn is_full(&self, config: &Config) -> bool {
        self.messages.len() >= config.max_inflight || self.bytes >= config.max_inflight_bytes
    }
}

/// How the leader sends to a member.
#[derive(Debug)]
pub(super) enum Mode<R: Replicated> {
    /// Searches for the point where the logs agree: one message at a time.
    Probe { is_waiting: bool },
    /// The logs agree up to `next`: many messages at a time.
    Stream,
    /// The log does not reach back far enough any more.
    Snapshot(Box<Outgoing<R>>),
}

impl<R: Replicated> Progress<R> {
    fn new(node: NodeId, next: Index, now: Time) -> Self {
        Self {
            node,
            matched: Index(0),
            next,
            mode: Mode::Probe { is_waiting: false },
            inflight: Inflight::default(),
            batch_bytes: usize::MAX,
            sent_round: 0,
            beat: None,
            sum: None,
            heard_at: None,
            steady_since: now,
        }
    }

    /// Processes an answer of the member.
    fn hear(&mut self, beat: Beat, now: Time, config: &Config) {
        if self.heard_at.is_none_or(|heard| heard + config.election_timeout < now) {
            self.steady_since = now;
        }
        self.heard_at = Some(now);
        if self.beat.is_none_or(|old| old.round < beat.round || old.sent_at < beat.sent_at) {
            self.beat = Some(beat);
        }
    }

    /// Its log is durable up to `matched` and agrees up to `received`. `of_append`: the member says
    /// so in answer to entries.
    fn advance(&mut self, matched: Index, received: Index, of_append: bool) {
        if matched > self.matched {
            self.matched = matched;
            self.batch_bytes = self.batch_bytes.saturating_mul(2);
        }
        self.inflight.confirm(self.matched);
        let is_reached = match &self.mode {
            // A heartbeat's answer shows that the probe arrived only if it confirms more than was
            // confirmed before the probe.
            Mode::Probe { .. } => {
                received >= self.next || (of_append && received.next() == self.next)
            }
            Mode::Stream => false,
            // Its current answer counts: it may have lost its state since an earlier one.
            Mode::Snapshot(outgoing) => outgoing.is_reached_by(matched),
        };
        if is_reached {
            self.mode = Mode::Stream;
            self.inflight.clear();
            self.next = received.max(self.matched).next();
        }
        self.next = self.next.max(self.matched.next());
    }

    /// Entries sent before `round` did not arrive: sends what is missing again. A member that has
    /// restarted does not know how far its log agrees; returns true if it must be told at once.
    fn resend_lost(&mut self, received: Index, round: u64, config: &Config) -> bool {
        if round <= self.sent_round {
            return false;
        }
        let followers_act = config.followers_act;
        let has_forgotten = received < self.matched && matches!(self.mode, Mode::Stream);
        if followers_act && has_forgotten {
            self.next = self.matched.next();
            self.inflight.clear();
            self.mode = Mode::Probe { is_waiting: false };
            return true;
        }
        let missing = received.max(self.matched).next();
        match &mut self.mode {
            Mode::Probe { is_waiting } => {
                *is_waiting = false;
                self.shorten(config);
                return followers_act;
            }
            Mode::Stream if missing < self.next => {
                self.next = missing;
                self.inflight.clear();
                self.shorten(config);
            }
            Mode::Stream | Mode::Snapshot(_) => {}
        }
        false
    }

    /// A message with entries was lost: the next one is shorter.
    fn shorten(&mut self, config: &Config) {
        self.batch_bytes = (self.batch_bytes.min(config.max_batch_bytes) / 2).max(BATCH_BYTES_MIN);
    }

    /// The next message with entries, if one should be sent. `Err` if the log does not have them
    /// any more.
    fn next_append(
        &mut self,
        log: &Log<R>,
        config: &Config,
        last_piece: (Term, Index, Beat),
    ) -> Result<Option<Message<R>>, ()> {
        let (term, chosen, beat) = last_piece;
        match &mut self.mode {
            Mode::Snapshot(_) | Mode::Probe { is_waiting: true } => return Ok(None),
            Mode::Stream => {
                if self.next > log.last() || self.inflight.is_full(config) {
                    return Ok(None);
                }
            }
            Mode::Probe { is_waiting } => *is_waiting = true,
        }
        let prev_index = self.next.previous();
        let prev_term = log.term_at(prev_index).ok_or(())?;
        let most = self.batch_bytes.min(config.max_batch_bytes);
        let mut bytes = 0;
        let mut entries = Vec::new();
        for (_, entry) in log.from(self.next) {
            let more = entry.size();
            if bytes + more > most && !entries.is_empty() {
                break;
            }
            bytes += more;
            entries.push(entry.clone());
        }
        if matches!(self.mode, Mode::Stream) {
            self.next = self.next.plus(entries.len());
            self.inflight.push(self.next.previous(), bytes);
        }
        self.sent_round = beat.round;
        Ok(Some(Message::AppendEntries { term, prev_index, prev_term, entries, chosen, beat }))
    }

    /// True if it has answered within an election time-out.
    pub(super) fn is_live(&self, now: Time, config: &Config) -> bool {
        self.heard_at.is_some_and(|heard| now < heard + config.election_timeout)
    }
}

impl<R: Replicated> Leading<R> {
    /// True if a member has answered within an election time-out, or this node has led for less than
    /// that.
    pub(super) fn may_be_live(&self, of: &Progress<R>, now: Time, config: &Config) -> bool {
        let is_new = of.heard_at.is_none() && now < self.since + config.election_timeout;
        is_new || of.is_live(now, config)
    }

    pub(super) fn of(&mut self, node: NodeId) -> Option<&mut Progress<R>> {
        self.progress.iter_mut().find(|progress| progress.node == node)
    }

    pub(super) fn get(&self, node: NodeId) -> Option<&Progress<R>> {
        self.progress.iter().find(|progress| progress.node == node)
    }

    pub(super) fn add(&mut self, node: NodeId, next: Index, now: Time) {
        if self.get(node).is_none() {
            self.progress.push(Progress::new(node, next, now));
            self.progress.sort_by_key(|progress| progress.node);
        }
    }

    pub(super) fn reads_waiting(self: Box<Self>) -> impl Iterator<Item = u64> {
        self.reads.into_iter().map(|read| read.id)
    }

    /// The lowest entry that some follower lacks, live or not: a follower that is away for a short
    /// time should not need a snapshot. None if there are no followers.
    pub(super) fn needed_by_followers(&self) -> Option<Index> {
        let needed = self.progress.iter().map(|progress| match &progress.mode {
            Mode::Snapshot(outgoing) => outgoing.index().unwrap_or(Index(u64::MAX)),
            Mode::Probe { .. } | Mode::Stream => progress.matched,
        });
        needed.min()
    }

    pub(super) fn assert_invariants(&self, last: Index) {
        for progress in &self.progress {
            assert!(progress.matched < progress.next, "{progress:?}: would send what it has");
            assert!(progress.next <= last.next(), "{progress:?}: beyond the log");
        }
        assert!(self.reads.iter().is_sorted_by_key(|read| read.round.unwrap_or(u64::MAX)));
    }
}

impl<R: Replicated> Replica<R> {
    /// Raft §5.2 and §8: a new leader appends an entry of its own term, because only that can make
    /// earlier entries chosen.
    pub(super) fn lead(&mut self, io: &mut impl Io<R>) {
        let now = io.now();
        let next = self.log.last().next();
        let members = self.log.members().clone();
        let others = members.all().into_iter().filter(|&node| node != self.me);
        self.leader = Some(self.me);
        self.role = Role::Leader(Box::new(Leading {
            progress: others.map(|node| Progress::new(node, next, now)).collect(),
            round: 0,
            since: now,
            first: next,
            is_ready: false,
            is_dirty: false,
            announces: false,
            reads: VecDeque::new(),
            has_new_reads: false,
            transfer: None,
            yielded: Vec::new(),
            offered_at: None,
            change: None,
            snapshots: 0,
            indexes: Vec::new(),
            comparing: None,
            compared: Index(0),
        }));
        io.cancel_timer(Timer::Election);
        let first =
            if next == Index(1) { Payload::Members(Arc::new(members)) } else { Payload::Noop };
        self.append(first, io);
        self.beat_all(io);
        io.set_timer(Timer::Heartbeat, now + self.config.heartbeat_interval);
    }

    /// Appends to its own log. Followers receive the entry at the next flush.
    pub(super) fn append(&mut self, payload: Payload<R::Command>, io: &mut impl Io<R>) -> Index {
        let entry = Entry { term: self.term, payload };
        let index = self.log.append(entry.clone());
        let ticket = io.persist(Record::Entry { index, entry });
        self.writes.push_back((ticket, index));
        if let Role::Leader(lead) = &mut self.role {
            lead.is_dirty = true;
            if self.log.members_index() == index {
                let now = io.now();
                for node in self.log.members().all() {
                    if node != self.me {
                        lead.add(node, index, now);
                    }
                }
            }
        }
        if self.config.mutations.ack_not_durable() {
            self.count(io);
        }
        index
    }

    /// Appends a command to the log if this node leads and accepts commands. It does not accept
    /// commands during a leadership transfer, or while more than `max_unchosen` entries wait to be
    /// chosen. Nothing is sent before [`Replica::flush`].
    ///
    /// The command is reported at the returned index if the entry there has the returned term;
    /// otherwise it was lost.
    pub fn propose(&mut self, command: R::Command, io: &mut impl Io<R>) -> Option<(Index, Term)> {
        if !self.takes_commands() {
            return None;
        }
        let index = self.append(Payload::Command(Shared::new(command)), io);
        Some((index, self.term))
    }

    /// Sends the chosen index to every member with the next flush: with the entries that the flush
    /// sends, or alone. For protocols whose followers act on chosen entries; for others, the next
    /// entries or the next heartbeat tell it.
    pub fn announce(&mut self) {
        if let Role::Leader(lead) = &mut self.role {
            lead.announces = true;
        }
    }

    /// True if [`Replica::propose`] would append a command now.
    #[must_use]
    pub fn takes_commands(&self) -> bool {
        let Role::Leader(lead) = &self.role else { return false };
        let waiting = self.log.last().0 - self.chosen.0;
        lead.transfer.is_none() && waiting < self.config.max_unchosen as u64
    }

    /// Sends messages that combine several calls: entries to each follower that lacks some, and a
    /// round of heartbeats for new reads.
    pub fn flush(&mut self, io: &mut impl Io<R>) {
        self.begin_reads(io);
        self.send_entries(io);
        self.ask_target(io);
    }

    fn send_entries(&mut self, io: &mut impl Io<R>) {
        let Role::Leader(lead) = &mut self.role else { return };
        let announces = std::mem::take(&mut lead.announces);
        if !std::mem::take(&mut lead.is_dirty) && !announces {
            return;
        }
        lead.round += u64::from(announces);
        let beat = Beat { round: lead.round, sent_at: io.now() };
        let mut behind = Vec::new();
        for progress in &mut lead.progress {
            let mut is_told = false;
            loop {
                let shared = (self.term, self.chosen, beat);
                match progress.next_append(&self.log, &self.config, shared) {
                    Ok(Some(msg)) => {
                        is_told = true;
                        io.send(progress.node, msg);
                    }
                    Ok(None) => break,
                    Err(()) => {
                        behind.push(progress.node);
                        break;
                    }
                }
            }
            if announces && !is_told {
                let (term, chosen) = (self.term, self.chosen);
                io.send(progress.node, Message::Heartbeat { term, chosen, beat, sum: None });
            }
        }
        for node in behind {
            self.start_snapshot(node, Index(0));
        }
    }

    /// Sends a round of heartbeats to all members.
    pub(super) fn beat_all(&mut self, io: &mut impl Io<R>) {
        let sum = self.compare(io.now());
        let Role::Leader(lead) = &mut self.role else { return };
        lead.round += 1;
        lead.announces = false;
        let beat = Beat { round: lead.round, sent_at: io.now() };
        for progress in &lead.progress {
            let msg = Message::Heartbeat { term: self.term, chosen: self.chosen, beat, sum };
            io.send(progress.node, msg);
        }
    }

    /// Thesis §6.2: a leader that receives no answer of a quorum for an election time-out steps
    /// down. Otherwise it does the recurring work: heartbeats, resends, and giving up what took too
    /// long.
    pub(super) fn on_heartbeat_timeout(&mut self, io: &mut impl Io<R>) {
        let now = io.now();
        let me = self.me;
        let Role::Leader(lead) = &mut self.role else { return };
        let heard = self.log.members().reached(
            |n| self.config.quorums.write(n),
            &mut Vec::new(),
            |node| {
                let answer = lead.get(node).and_then(|progress| progress.heard_at);
                if node == me { now } else { answer.unwrap_or(lead.since) }
            },
        );
        let gap = heard.map(|heard| now.since(heard.max(lead.since)));
        let is_alone = gap.is_none_or(|gap| gap > self.timeout.current());
        if let Some(gap) = gap {
            self.timeout.hear_after(gap, now);
        }
        if is_alone && !self.config.mutations.lead_without_quorum() {
            self.timeout.give_up(self.term);
            self.step_down(self.term, None, io);
            return;
        }
        if lead.transfer.as_ref().is_some_and(|transfer| transfer.until <= now) {
            lead.transfer = None;
        }
        let timeout = (self.config.election_timeout * 4).max(self.timeout.current());
        if lead.yielded.iter().any(|yielded| yielded.at + timeout < now) {
            // A node that was asked to campaign has not answered since, and may still campaign at
            // any later time. In a new term that permission is void, and leases are valid again.
            self.step_down(self.term, None, io);
            self.start_election(true, io);
            return;
        }
        self.pursue_change_of_silent(io);
        io.set_timer(Timer::Heartbeat, now + self.config.heartbeat_interval);
        self.beat_all(io);
        self.resend_pieces(io);
        self.offer_to_preferred(io);
    }

    pub(super) fn on_append_reply(
        &mut self,
        from: NodeId,
        matched: Index,
        received: Index,
        beat: Beat,
        io: &mut impl Io<R>,
    ) {
        self.on_progress(from, (matched, received), true, beat, io);
    }

    fn on_progress(
        &mut self,
        from: NodeId,
        (matched, received): (Index, Index),
        of_append: bool,
        beat: Beat,
        io: &mut impl Io<R>,
    ) {
        let now = io.now();
        let Role::Leader(lead) = &mut self.role else { return };
        // Round 0 answers no message of this term.
        let Some(progress) = lead.of(from).filter(|_| beat.round > 0) else { return };
        progress.hear(beat, now, &self.config);
        let before = progress.matched;
        progress.advance(matched, received, of_append);
        let is_news = progress.matched > before;
        lead.is_dirty |= progress.next <= self.log.last();
        self.confirm(from, beat);
        if is_news {
            self.count(io);
            self.pursue_change(io);
        }
    }

    pub(super) fn on_heartbeat_reply(
        &mut self,
        from: NodeId,
        matched: Index,
        received: Index,
        beat: Beat,
        io: &mut impl Io<R>,
    ) {
        if let Role::Leader(lead) = &mut self.role
            && let Some(progress) = lead.of(from)
        {
            lead.is_dirty |= progress.resend_lost(received, beat.round, &self.config);
        }
        self.on_progress(from, (matched, received), false, beat, io);
    }

    /// Raft §5.3: the logs do not agree before the entries sent. Both sides skip whole terms.
    pub(super) fn on_append_reject(
        &mut self,
        from: NodeId,
        prev_index: Index,
        (hint_index, hint_term): (Index, Term),
        wants_snapshot: bool,
        beat: Beat,
        io: &mut impl Io<R>,
    ) {
        let now = io.now();
        let Role::Leader(lead) = &mut self.role else { return };
        let Some(progress) = lead.of(from) else { return };
        progress.hear(beat, now, &self.config);
        if wants_snapshot {
            if !matches!(progress.mode, Mode::Snapshot(_)) {
                self.start_snapshot(from, Index(0));
            }
            self.confirm(from, beat);
            return;
        }
        let is_expected = match progress.mode {
            Mode::Probe { .. } => prev_index.next() == progress.next,
            Mode::Stream => prev_index > progress.matched && prev_index < progress.next,
            Mode::Snapshot(_) => false,
        };
        if is_expected {
            let (agreeable, _) =
                self.log.agreeable(hint_index.min(prev_index.previous()), hint_term);
            progress.next = agreeable.max(progress.matched).next();
            progress.mode = Mode::Probe { is_waiting: false };
            progress.inflight.clear();
            lead.is_dirty = true;
        }
        self.confirm(from, beat);
    }

    /// Raft §5.3 and §5.4.2: an entry is chosen when a write quorum has it durably and it is of the
    /// current term. Earlier entries are chosen with it.
    pub(super) fn count(&mut self, io: &mut impl Io<R>) {
        let (me, own_copy) = (self.me, self.own_copy());
        let Role::Leader(lead) = &mut self.role else { return };
        let mut indexes = std::mem::take(&mut lead.indexes);
        let reached = self.log.members().reached(
            |n| self.config.quorums.write(n),
            &mut indexes,
            |node| {
                if node == me {
                    own_copy
                } else {
                    lead.get(node).map_or(Index(0), |progress| progress.matched)
                }
            },
        );
        lead.indexes = indexes;
        let Some(reached) = reached.filter(|&reached| reached > self.chosen) else { return };
        let any_term = self.config.mutations.choose_old_term();
        if self.log.term_at(reached) == Some(self.term) || any_term {
            let (was_ready, was_chosen) = (lead.is_ready, self.chosen);
            self.choose(reached);
            let change = self.log.members_index();
            if self.is_ready() && (!was_ready || (was_chosen < change && change <= self.chosen)) {
                self.on_members_chosen(io);
            }
            self.confirm_reads();
        }
    }

    /// Requests a read. [`Event::ReadReady`] follows when a quorum has confirmed that this node
    /// still leads, in a round that began after this call (thesis §6.4). The round begins at the
    /// next [`Replica::flush`] and serves all reads requested until then. If this node does not
    /// lead, or already has `max_reads` waiting reads, [`Event::ReadFailed`] follows.
    pub fn read_index(&mut self, id: u64, _io: &mut impl Io<R>) {
        if let Role::Leader(lead) = &mut self.role
            && lead.reads.len() < self.config.max_reads
        {
            let round = self.config.mutations.read_unconfirmed().then_some(0);
            lead.has_new_reads |= round.is_none();
            lead.reads.push_back(Read { id, round });
            if round.is_some() {
                self.confirm_reads();
            }
        } else {
            self.tell(Event::ReadFailed { id });
        }
    }

    fn begin_reads(&mut self, io: &mut impl Io<R>) {
        let Role::Leader(lead) = &mut self.role else { return };
        if !std::mem::take(&mut lead.has_new_reads) {
            return;
        }
        let round = lead.round + 1;
        for read in lead.reads.iter_mut().rev() {
            if read.round.is_some() {
                break;
            }
            read.round = Some(round);
        }
        self.beat_all(io);
        self.confirm_reads();
    }

    /// `from` answered a message of this term.
    fn confirm(&mut self, from: NodeId, beat: Beat) {
        let Role::Leader(lead) = &mut self.role else { return };
        lead.yielded.retain(|yielded| yielded.to != from || beat.round <= yielded.round);
        if !lead.reads.is_empty() {
            self.confirm_reads();
        }
    }

    fn confirm_reads(&mut self) {
        let me = self.me;
        let Role::Leader(lead) = &mut self.role else { return };
        if !lead.is_ready || lead.reads.is_empty() {
            return;
        }
        let round_of = |node| {
            let beat = lead.get(node).and_then(|progress| progress.beat);
            if node == me { u64::MAX } else { beat.map_or(0, |beat| beat.round) }
        };
        let write = |n| self.config.quorums.write(n);
        let confirmed = self.log.members().reached(write, &mut Vec::new(), round_of).unwrap_or(0);
        let mut ready = Vec::new();
        while let Some(read) = lead.reads.front() {
            if read.round.is_none_or(|round| round > confirmed) {
                break;
            }
            ready.push(read.id);
            lead.reads.pop_front();
        }
        for id in ready {
            self.tell(Event::ReadReady { id });
        }
    }

    /// True if no other node can lead at `now`, so that the state may be read without a round of
    /// messages. A quorum has promised to vote for nobody else for one election time-out after it
    /// received this leader's message, and this leader counts from when it sent the message (thesis
    /// §6.4.1). Pass the current time, not that of the last input: a pause must count against the
    /// lease.
    #[must_use]
    pub fn has_lease(&self, now: Time) -> bool {
        let Role::Leader(lead) = &self.role else { return false };
        if !lead.is_ready || !lead.yielded.is_empty() {
            return false;
        }
        let ignores_pauses = self.config.mutations.lease_ignores_pauses();
        let now = if ignores_pauses { self.last_input.min(now) } else { now };
        let me = self.me;
        let promised = self.log.members().reached(
            |n| self.config.quorums.write(n),
            &mut Vec::new(),
            |node| {
                let beat = lead.get(node).and_then(|progress| progress.beat);
                if node == me { Some(now) } else { beat.map(|beat| beat.sent_at) }
            },
        );
        let length = self.config.election_timeout.saturating_sub(self.config.lease_margin);
        promised.flatten().is_some_and(|since| now < since + length)
    }

    fn ask_target(&mut self, io: &mut impl Io<R>) {
        let last = self.log.last();
        let Role::Leader(lead) = &mut self.role else { return };
        let Some(transfer) = &mut lead.transfer else { return };
        if transfer.is_asked {
            return;
        }
        let to = transfer.to;
        let has_all =
            lead.progress.iter().any(|progress| progress.node == to && progress.matched == last);
        if has_all {
            transfer.is_asked = true;
            self.yield_to(to, io);
        }
    }

    /// Gives up the lease, then asks `to` to campaign.
    pub(super) fn yield_to(&mut self, to: NodeId, io: &mut impl Io<R>) {
        let Role::Leader(lead) = &mut self.role else { return };
        lead.round += 1;
        lead.yielded.retain(|yielded| yielded.to != to);
        lead.yielded.push(Yielded { to, round: lead.round, at: io.now() });
        io.send(to, Message::TimeoutNow { term: self.term, round: lead.round });
        // Every later message belongs to a later round, and revokes the permission.
        lead.round += 1;
    }

    /// Placement: transfers leadership to the preferred leader once that node has answered for a
    /// while and lacks nothing. Not while messages are late: the target would campaign when this
    /// leader has taken up its work again, and the partition would lose its leader for nothing.
    fn offer_to_preferred(&mut self, io: &mut impl Io<R>) {
        let now = io.now();
        let Some(to) = self.preferred.filter(|&node| node != self.me) else { return };
        let timeout = self.config.election_timeout;
        let members = self.log.members();
        if members.is_joint() || !members.voters.contains(&to) || self.timeout.is_longer() {
            return;
        }
        let Role::Leader(lead) = &mut self.role else { return };
        let is_calm = lead.is_ready && lead.transfer.is_none() && lead.change.is_none();
        let may_offer = lead.offered_at.is_none_or(|at| at + timeout * 8 < now);
        let is_fit = lead.get(to).is_some_and(|progress| {
            progress.is_live(now, &self.config)
                && progress.steady_since + timeout * 2 < now
                && progress.matched >= self.chosen
        });
        if is_calm && may_offer && is_fit {
            lead.offered_at = Some(now);
            self.transfer(to, io);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::quorum::Members;
    use super::*;
    use bytes::Bytes;

    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    struct Sizes;

    impl Replicated for Sizes {
        type Command = Bytes;
        type Chunk = ();
        type Cursor = ();
    }

    /// A follower that lags behind by many large entries. Sending all of them at once exceeded the
    /// queue of a link, which dropped them again and again.
    #[test]
    fn what_is_under_way_to_one_follower_is_bounded_in_bytes() {
        let mut log: Log<Sizes> =
            Log::new(Index(0), Term(0), Members::settled(vec![NodeId(1)], Vec::new()));
        let longest = Bytes::from(vec![0; 3 << 20]);
        for length in [&[longest.len(); 60][..], &[1_000; 1_000]].concat() {
            let command = Shared::new(longest.slice(..length));
            log.append(Entry { term: Term(1), payload: Payload::Command(command) });
        }
        let config = Config::with_election_timeout(std::time::Duration::from_secs(1));
        let mut progress: Progress<Sizes> = Progress::new(NodeId(2), Index(1), Time::ZERO);
        progress.mode = Mode::Stream;
        let shared = (Term(1), Index(0), Beat::default());
        let (mut told, mut largest) = (Index(0), 0);
        while told < log.last() {
            let mut bytes = 0;
            while let Some(msg) = progress.next_append(&log, &config, shared).unwrap() {
                let Message::AppendEntries { entries, .. } = &msg else { panic!("{msg}") };
                let most = config.max_batch_bytes + 100 + 8 * entries.len();
                assert!(entries.len() == 1 || msg.size() <= most);
                bytes += msg.size();
            }
            assert!(bytes > 0, "no progress after {told}");
            largest = largest.max(bytes);
            told = progress.next.previous();
            progress.advance(told, told, true);
        }
        assert!(largest < config.max_inflight_bytes + (4 << 20), "{largest}");
        assert!(largest > config.max_inflight_bytes, "the window is used: {largest}");
    }

    /// A long message takes many packets. On links that lose a fifth of them, it never arrives.
    #[test]
    fn messages_get_shorter_while_they_are_lost_and_longer_again() {
        let mut log: Log<Sizes> =
            Log::new(Index(0), Term(0), Members::settled(vec![NodeId(1)], Vec::new()));
        for _ in 0..10_000 {
            let command = Shared::new(Bytes::from(vec![0; 100]));
            log.append(Entry { term: Term(1), payload: Payload::Command(command) });
        }
        let config = Config::with_election_timeout(std::time::Duration::from_secs(1));
        let mut progress: Progress<Sizes> = Progress::new(NodeId(2), Index(1), Time::ZERO);
        let send = |progress: &mut Progress<Sizes>, round| {
            let beat = Beat { round, sent_at: Time::ZERO };
            let next = progress.next_append(&log, &config, (Term(1), Index(0), beat));
            let msg = next.unwrap().unwrap();
            let Message::AppendEntries { entries, .. } = &msg else { panic!("{msg}") };
            (msg.size(), Index(entries.len() as u64))
        };
        let mut sizes = Vec::new();
        for round in 1..20 {
            sizes.push(send(&mut progress, round).0);
            progress.resend_lost(Index(0), round + 1, &config);
        }
        assert!(sizes.first() > Some(&200_000) && sizes.last() < Some(&1_500), "{sizes:?}");
        let mut through = Index(0);
        for round in 20..30 {
            let (size, count) = send(&mut progress, round);
            sizes.push(size);
            through = Index(through.0 + count.0);
            progress.advance(through, through, true);
        }
        assert!(sizes.last() > Some(&200_000), "{sizes:?}");
    }
}
