//! One member of one group: its state, how it starts, and how inputs reach their handlers.

use std::collections::VecDeque;
use std::fmt;

use orthodrome_core::{NodeId, Ticket, Time, Wire};

use super::checks::Checks;
use super::leader::Leading;
use super::log::Log;
use super::message::{Beat, Message, Record};
use super::orders::Orders;
use super::quorum::Members;
use super::snapshot::{Ask, Incoming, Installed};
use super::timeout::Timeout;
use super::{Config, Event, Group, Index, Io, Mutations, Replicated, Term, Timer};

/// The role of a replica in its term.
#[derive(Debug)]
pub(super) enum Role<R: Replicated> {
    Follower,
    /// Asks for pre-votes; the nodes that have granted theirs.
    PreCandidate(Vec<NodeId>),
    /// Asks for votes; the nodes that have voted for it. Its own vote counts once it is durable.
    Candidate {
        votes: Vec<NodeId>,
        transfer: bool,
    },
    Leader(Box<Leading<R>>),
}

/// Actions that wait for a write.
#[derive(Debug)]
pub(super) enum Held<R: Replicated> {
    Send {
        to: NodeId,
        msg: Message<R>,
    },
    /// The candidate's own term and vote are written: ask the others.
    Campaign {
        term: Term,
    },
}

/// One member of one group. See the [module](super) for the protocol, and [`Io`] for its effects.
///
/// Every method that takes an [`Io`] may queue events. Drain [`Replica::next_event`] after each
/// call.
#[derive(Debug)]
pub struct Replica<R: Replicated> {
    pub(super) me: NodeId,
    pub(super) config: Config,
    pub(super) preferred: Option<NodeId>,

    pub(super) term: Term,
    pub(super) vote: Option<NodeId>,
    pub(super) log: Log<R>,
    pub(super) role: Role<R>,
    /// The leader of `term`, once known.
    pub(super) leader: Option<NodeId>,

    /// Entries up to this index are chosen, as far as this node knows.
    pub(super) chosen: Index,
    /// Entries up to this index were queued as events. It is behind `chosen` only while the state
    /// is incomplete.
    pub(super) pushed: Index,
    /// The embedder has taken the events up to this index.
    surfaced: Index,
    events: VecDeque<Event<R>>,

    /// The highest ticket known to be durable.
    durable: Ticket,
    /// The ticket of the current term and vote.
    hard_ticket: Ticket,
    /// Pending writes of entries: when the ticket is durable, the log is durable up to the index.
    pub(super) writes: VecDeque<(Ticket, Index)>,
    /// The log is durable up to this index.
    pub(super) durable_index: Index,
    held: VecDeque<(Ticket, Held<R>)>,

    /// When the last message of a leader arrived. Voters protect the leader for one election
    /// time-out after that.
    pub(super) heard_at: Option<Time>,
    /// Until then a restarted node votes for nobody, because it may have promised that to a leader.
    pub(super) quiet_until: Time,
    /// When to campaign. The timer may expire earlier, and then is only moved to this time.
    pub(super) election_at: Time,
    /// The time-out for a leader, for votes, or for answers.
    pub(super) timeout: Timeout,
    /// The last time-out drawn.
    pub(super) drawn: orthodrome_core::Duration,
    /// The time of the last input; only a mutation uses it.
    pub(super) last_input: Time,

    /// The log agrees with the current leader's up to this index.
    pub(super) received: Index,
    /// The leader expects an acknowledgement up to this index.
    pub(super) owed: Index,
    /// The index acknowledged in this term.
    pub(super) acked: Index,
    /// The latest message of the current leader.
    pub(super) beat: Beat,

    /// The state is only partly installed: nothing may be applied, and only a snapshot helps.
    pub(super) incomplete: bool,
    /// The snapshot being received.
    pub(super) incoming: Option<Incoming>,
    /// The last snapshot received, so that a repeated piece can be answered.
    pub(super) installed: Option<Installed>,
    /// Snapshot pieces requested from the embedder.
    pub(super) asks: Vec<Ask>,
    /// The progress of orders to change members.
    pub(super) orders: Orders,
    /// The effects of entries, for comparison.
    pub(super) checks: Checks,
}

/// The sum of one replica's records.
struct Recovered<R: Replicated> {
    term: Term,
    vote: Option<NodeId>,
    log: Log<R>,
    incomplete: bool,
}

fn replay<R: Replicated>(
    initial: Members,
    records: Vec<Record<R>>,
    mutations: Mutations,
) -> Recovered<R> {
    let mut state = Recovered {
        term: Term(0),
        vote: None,
        log: Log::new(Index(0), Term(0), initial),
        incomplete: false,
    };
    for record in records {
        match record {
            Record::Base { index, term, members } => state.log = Log::new(index, term, *members),
            Record::Incomplete => state.incomplete = true,
            Record::HardState { term, vote } => (state.term, state.vote) = (term, vote),
            Record::Entry { index, entry } => {
                if mutations.forget_truncation() && index <= state.log.last() {
                    state.log.overwrite(index, entry);
                    continue;
                }
                let last = state.log.last();
                assert!(
                    index == last.next(),
                    "replay: entry {index} follows {last}: the records are not those of one \
                     replica, in order"
                );
                state.log.append(entry);
            }
            Record::Truncate { from } => state.log.truncate(from),
        }
    }
    state
}

impl<R: Replicated> Replica<R> {
    /// Starts the replica, for the first time or after a crash. `recovered` has this group's
    /// records of the last durable checkpoint and the later ones, in order. If it is not empty,
    /// only the preferred leader of `group` is used.
    ///
    /// # Panics
    /// If the records are not those of one replica in the order persisted, or if [`Config::check`]
    /// refuses the settings: call it before.
    pub fn new(
        me: NodeId,
        group: Group,
        config: Config,
        recovered: Vec<Record<R>>,
        io: &mut impl Io<R>,
    ) -> Self {
        if let Err(error) = config.check(&group) {
            panic!("replica {me}: {error}");
        }
        let now = io.now();
        let is_new = recovered.is_empty();
        let initial = Members::settled(group.voters, group.learners);
        if is_new {
            // From here on the group is the one with which the node first started, whatever the
            // placement says after a restart.
            let members = Box::new(initial.clone());
            io.persist(Record::Base { index: Index(0), term: Term(0), members });
        }
        let Recovered { term, vote, log, incomplete } =
            replay(initial, recovered, config.mutations);
        let base = log.base_index();
        let trusts_itself = is_new || config.mutations.vote_after_restart();
        let quiet_until = if trusts_itself { now } else { now + config.election_timeout };
        let mut replica = Self {
            me,
            preferred: group.preferred_leader,
            term,
            vote,
            role: Role::Follower,
            leader: None,
            chosen: base,
            pushed: base,
            surfaced: base,
            events: VecDeque::new(),
            durable: Ticket(0),
            hard_ticket: Ticket(0),
            writes: VecDeque::new(),
            durable_index: log.last(),
            held: VecDeque::new(),
            heard_at: None,
            quiet_until,
            election_at: now,
            timeout: Timeout::new(config.election_timeout, now),
            drawn: config.election_timeout,
            last_input: now,
            received: base,
            owed: Index(0),
            acked: Index(0),
            beat: Beat::default(),
            incomplete,
            incoming: None,
            installed: None,
            asks: Vec::new(),
            orders: Orders::default(),
            checks: Checks::new(config.compared_entries),
            log,
            config,
        };
        replica.arm_first_election(is_new, io);
        replica
    }

    /// Processes a message.
    ///
    /// # Panics
    /// If the message proves that the group is broken: two leaders in one term, or a leader that
    /// lacks an entry known to be chosen.
    pub fn step(&mut self, from: NodeId, msg: Message<R>, io: &mut impl Io<R>) {
        self.last_input = io.now();
        match msg {
            Message::PreVote { term, last_index, last_term } => {
                self.on_pre_vote(from, term, last_index, last_term, io);
            }
            Message::PreVoteReply { term, granted } => {
                self.on_pre_vote_reply(from, term, granted, io);
            }
            Message::RequestVote { term, last_index, last_term, transfer } => {
                self.on_request_vote(from, term, (last_index, last_term), transfer, io);
            }
            Message::VoteReply { term, granted } => self.on_vote_reply(from, term, granted, io),
            Message::AppendEntries { term, prev_index, prev_term, entries, chosen, beat } => {
                if self.follows(from, term, beat, io) {
                    self.on_append_entries(from, (prev_index, prev_term), entries, chosen, io);
                }
            }
            Message::Heartbeat { term, chosen, beat, sum } => {
                if self.follows(from, term, beat, io) {
                    self.on_heartbeat(from, chosen, beat, sum, io);
                }
            }
            Message::SnapshotPiece { term, beat, .. } => {
                if self.follows(from, term, beat, io) {
                    self.on_snapshot_piece(from, msg, io);
                }
            }
            Message::AppendReply { term, matched, received, beat } => {
                if self.leads(term, io) {
                    self.on_append_reply(from, matched, received, beat, io);
                }
            }
            Message::HeartbeatReply { term, matched, received, beat, sum } => {
                if self.leads(term, io) {
                    self.on_sum(from, sum);
                    self.on_heartbeat_reply(from, matched, received, beat, io);
                }
            }
            Message::AppendReject {
                term,
                prev_index,
                hint_index,
                hint_term,
                wants_snapshot,
                beat,
            } => {
                if self.leads(term, io) {
                    let hint = (hint_index, hint_term);
                    self.on_append_reject(from, prev_index, hint, wants_snapshot, beat, io);
                }
            }
            Message::SnapshotReply { term, snapshot, next, at_least, beat } => {
                if self.leads(term, io) {
                    self.on_snapshot_reply(from, (snapshot, next), at_least, beat, io);
                }
            }
            Message::TimeoutNow { term, round } => self.on_timeout_now(from, term, round, io),
        }
    }

    /// Processes the expiry of a timer.
    pub fn on_timer(&mut self, timer: Timer, io: &mut impl Io<R>) {
        match timer {
            Timer::Election => self.on_election_timeout(io),
            Timer::Heartbeat => self.on_heartbeat_timeout(io),
        }
        self.last_input = io.now();
    }

    /// Everything persisted up to `ticket` is durable. Tickets of the embedder's other writes do no
    /// harm.
    pub fn on_durable(&mut self, ticket: Ticket, io: &mut impl Io<R>) {
        self.last_input = io.now();
        self.durable = self.durable.max(ticket);
        while let Some(&(due, _)) = self.held.front() {
            if due > self.durable {
                break;
            }
            match self.held.pop_front() {
                Some((_, Held::Send { to, msg })) => io.send(to, msg),
                Some((_, Held::Campaign { term })) => self.on_vote_durable(term, io),
                None => break,
            }
        }
        let before = self.durable_index;
        while let Some(&(due, index)) = self.writes.front() {
            if due > self.durable {
                break;
            }
            self.durable_index = index;
            self.writes.pop_front();
        }
        if self.durable_index != before {
            match self.role {
                Role::Leader(_) => self.count(io),
                Role::Follower | Role::PreCandidate(_) | Role::Candidate { .. } => {
                    self.acknowledge(io);
                }
            }
        }
    }

    /// True if there is an event.
    #[must_use]
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// The next event, if there is one.
    pub fn next_event(&mut self) -> Option<Event<R>> {
        let event = self.events.pop_front()?;
        match &event {
            Event::Chosen { index, .. } | Event::SnapshotChunk { last: true, index, .. } => {
                self.surfaced = *index;
            }
            Event::SnapshotChunk { .. }
            | Event::Leading { .. }
            | Event::Deposed { .. }
            | Event::ReadReady { .. }
            | Event::ReadFailed { .. }
            | Event::SnapshotWanted { .. } => {}
        }
        Some(event)
    }

    pub(super) fn tell(&mut self, event: Event<R>) {
        self.events.push_back(event);
    }

    /// Marks entries as chosen, queues them as events, and reports when a new leader is ready.
    pub(super) fn choose(&mut self, through: Index) {
        self.chosen = self.chosen.max(through);
        self.orders.review(&self.log, self.chosen);
        if self.incomplete {
            return;
        }
        while self.pushed < self.chosen {
            let index = self.pushed.next();
            let Some(entry) = self.log.get(index) else { break };
            let (term, payload) = (entry.term, entry.payload.clone());
            self.events.push_back(Event::Chosen { index, term, payload });
            self.pushed = index;
        }
        if let Role::Leader(lead) = &mut self.role
            && !lead.is_ready
            && lead.first <= self.pushed
        {
            lead.is_ready = true;
            self.events.push_back(Event::Leading { term: self.term });
        }
    }

    /// Persists term and vote; actions that depend on them wait.
    pub(super) fn persist_hard_state(&mut self, io: &mut impl Io<R>) {
        self.hard_ticket = io.persist(Record::HardState { term: self.term, vote: self.vote });
    }

    /// Sends once term and vote are durable.
    pub(super) fn send_when_term_durable(
        &mut self,
        to: NodeId,
        msg: Message<R>,
        io: &mut impl Io<R>,
    ) {
        if self.is_term_durable() {
            io.send(to, msg);
        } else {
            self.held.push_back((self.hard_ticket, Held::Send { to, msg }));
        }
    }

    pub(super) fn is_term_durable(&self) -> bool {
        self.hard_ticket <= self.durable || self.config.mutations.vote_not_durable()
    }

    pub(super) fn campaign_when_durable(&mut self) {
        self.held.push_back((self.hard_ticket, Held::Campaign { term: self.term }));
    }

    /// The last entry for which this node counts towards a quorum.
    pub(super) fn own_copy(&self) -> Index {
        if self.config.mutations.ack_not_durable() { self.log.last() } else { self.durable_index }
    }

    /// Drops everything up to `through`, which the embedder's state covers. Takes effect on disk
    /// with the next [`Replica::checkpoint_records`]. Ignores entries that were not reported.
    pub fn compact(&mut self, through: Index) {
        if !self.incomplete {
            self.log.compact(through.min(self.surfaced));
        }
    }

    /// The index up to which the log can be dropped: what was reported, minus what followers still
    /// lack, but never keeping more than `keep_entries` for them. A follower keeps as many, in case
    /// it has to lead.
    #[must_use]
    pub fn compactable(&self, keep_entries: usize) -> Index {
        self.compactable_within(keep_entries, usize::MAX)
    }

    /// The same, but never keeping more than `keep_bytes` of entries.
    #[must_use]
    pub fn compactable_within(&self, keep_entries: usize, keep_bytes: usize) -> Index {
        let mut bound = Index(self.surfaced.0.saturating_sub(keep_entries as u64));
        let (mut at, mut bytes) = (self.surfaced, 0);
        while at > bound.max(self.log.base_index()) {
            bytes += self.log.get(at).map_or(0, Wire::size);
            if bytes > keep_bytes {
                bound = at;
            }
            at = at.previous();
        }
        let needed = match &self.role {
            Role::Leader(lead) => lead.needed_by_followers(),
            Role::Follower | Role::PreCandidate(_) | Role::Candidate { .. } => Some(bound),
        };
        needed.map_or(self.surfaced, |needed| needed.max(bound).min(self.surfaced))
    }

    /// The records that replace everything that this group persisted before.
    #[must_use]
    pub fn checkpoint_records(&self) -> Vec<Record<R>> {
        let (index, term, members) = self.log.base();
        let mut records = vec![
            Record::Base { index, term, members: Box::new(members.clone()) },
            Record::HardState { term: self.term, vote: self.vote },
        ];
        if self.incomplete {
            records.push(Record::Incomplete);
        }
        let entries = self.log.from(index.next());
        records.extend(entries.map(|(index, entry)| Record::Entry { index, entry: entry.clone() }));
        records
    }

    /// True if this node leads, ready or not.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        matches!(self.role, Role::Leader(_))
    }

    /// True if this node leads and has reported everything chosen in earlier terms.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        matches!(&self.role, Role::Leader(lead) if lead.is_ready)
    }

    /// The current term.
    #[must_use]
    pub fn term(&self) -> Term {
        self.term
    }

    /// The leader of the current term, if this node knows it. A node that has been removed does not
    /// know it, unless it leads itself: later leaders do not contact it.
    #[must_use]
    pub fn leader(&self) -> Option<NodeId> {
        let is_told = self.log.members().is_member(self.me) || self.leader == Some(self.me);
        self.leader.filter(|_| is_told)
    }

    /// Everything up to this index is chosen, as far as this node knows.
    #[must_use]
    pub fn chosen_index(&self) -> Index {
        self.chosen
    }

    /// The embedder has taken the events up to this index.
    #[must_use]
    pub fn surfaced_index(&self) -> Index {
        self.surfaced
    }

    /// The end of the log.
    #[must_use]
    pub fn last_index(&self) -> Index {
        self.log.last()
    }

    /// The entry before the log's first.
    #[must_use]
    pub fn base_index(&self) -> Index {
        self.log.base_index()
    }

    /// The entry at `index`, if the log has it.
    #[must_use]
    pub fn entry(&self, index: Index) -> Option<&super::Entry<R::Command>> {
        self.log.get(index)
    }

    /// The members in force: the latest in the log, chosen or not.
    #[must_use]
    pub fn members(&self) -> &Members {
        self.log.members()
    }

    /// The index of the entry that made the members in force, or a later one if it is not kept.
    #[must_use]
    pub fn members_since(&self) -> Index {
        self.log.members_index()
    }

    /// The voters in force; during a change, the new ones.
    #[must_use]
    pub fn voters(&self) -> &[NodeId] {
        &self.log.members().voters
    }

    /// The voters, if their membership is chosen and no change is pending.
    #[must_use]
    pub fn settled_voters(&self) -> Option<&[NodeId]> {
        self.settled().map(|(_, voters)| voters)
    }

    /// The same, with the index of the entry that names them.
    #[must_use]
    pub fn settled(&self) -> Option<(Index, &[NodeId])> {
        let members = self.log.members();
        let is_settled = !members.is_joint() && self.log.members_index() <= self.chosen;
        is_settled.then_some((self.log.members_index(), members.voters.as_slice()))
    }

    /// True if the log, as far as it reaches back, has a membership other than the first.
    #[must_use]
    pub fn has_changed_members(&self) -> bool {
        self.log.members_index() > self.log.base_index().max(Index(1))
    }

    /// The learners in force.
    #[must_use]
    pub fn learners(&self) -> &[NodeId] {
        &self.log.members().learners
    }

    /// Panics if the state contradicts itself.
    ///
    /// # Panics
    /// If it does; the message names the contradiction.
    pub fn assert_invariants(&self) {
        let (base, last) = (self.log.base_index(), self.log.last());
        assert!(self.surfaced <= self.pushed, "{self}: surfaced more than was queued");
        assert!(self.pushed <= self.chosen, "{self}: queued more than is chosen");
        assert!(self.incomplete || base <= self.pushed, "{self}: base above the state");
        assert!(self.chosen <= last, "{self}: chosen beyond the log");
        assert!(self.received <= last, "{self}: received beyond the log");
        assert!(self.durable_index <= last, "{self}: durable beyond the log");
        assert!(self.log.last_term() <= self.term, "{self}: an entry of a later term");
        assert!(self.writes.iter().is_sorted_by(|a, b| a.0 <= b.0 && a.1 <= b.1), "{self}: writes");
        self.log.assert_invariants();
        match &self.role {
            Role::Leader(lead) => {
                assert_eq!(self.leader, Some(self.me), "{self}: leads without knowing it");
                assert!(!self.incomplete, "{self}: leads with an incomplete state");
                lead.assert_invariants(last);
            }
            Role::Candidate { .. } => {
                assert_eq!(self.vote, Some(self.me), "{self}: a candidate votes for itself");
            }
            Role::Follower | Role::PreCandidate(_) => {}
        }
    }
}

impl<R: Replicated> fmt::Display for Replica<R> {
    /// `n1 leader t3 log 2..9 chosen 8 durable 9 members n1 n2 n3`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let role = match &self.role {
            Role::Follower => "follower",
            Role::PreCandidate(_) => "pre-candidate",
            Role::Candidate { .. } => "candidate",
            Role::Leader(lead) if lead.is_ready => "leader",
            Role::Leader(_) => "leader (not ready)",
        };
        let (base, last) = (self.log.base_index(), self.log.last());
        write!(f, "{} {role} {} log {base}..{last}", self.me, self.term)?;
        write!(f, " chosen {} durable {}", self.chosen, self.durable_index)?;
        if self.incomplete {
            f.write_str(" incomplete")?;
        }
        write!(f, " members {}", self.log.members())
    }
}
