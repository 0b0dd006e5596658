//! Terms and votes: Raft §5.1, §5.2 and §5.4.1. Pre-vote, check-quorum and the protection of
//! leaders: thesis §4.2.3, §6.2 and §9.6. The target's side of a leadership transfer: thesis §3.10.

use orthodrome_core::{NodeId, Time};

use super::message::{Beat, Message};
use super::replica::{Replica, Role};
use super::{Event, Index, Io, Replicated, Term, Timer};

impl<R: Replicated> Replica<R> {
    /// Sets the first election timer. In a new group the preferred leader campaigns at once, and
    /// the others leave it time for a second attempt. So a cluster starts with the leaders of its
    /// placement.
    pub(super) fn arm_first_election(&mut self, is_new: bool, io: &mut impl Io<R>) {
        self.draw(io);
        let now = io.now();
        self.election_at = match self.preferred {
            Some(preferred) if is_new && preferred == self.me => now,
            Some(_) if is_new => now + self.drawn + self.config.election_timeout * 2,
            Some(_) | None => now + self.drawn,
        };
        io.set_timer(Timer::Election, self.election_at);
    }

    fn draw(&mut self, io: &mut impl Io<R>) {
        let least = self.timeout.current();
        let extra = io.rng().below(orthodrome_core::time::nanos(least));
        self.drawn = least + orthodrome_core::Duration::from_nanos(extra);
    }

    fn arm_election(&mut self, io: &mut impl Io<R>) {
        self.draw(io);
        self.election_at = io.now() + self.drawn;
        io.set_timer(Timer::Election, self.election_at);
    }

    /// Raft §5.2: no message of a leader arrived during the drawn time. A message of a leader only
    /// moves `election_at`. This timer catches up here, so that not every message moves a timer.
    pub(super) fn on_election_timeout(&mut self, io: &mut impl Io<R>) {
        if self.is_leader() {
            return;
        }
        if io.now() < self.election_at {
            io.set_timer(Timer::Election, self.election_at);
            return;
        }
        if self.leader.is_some() || matches!(self.role, Role::Candidate { .. }) {
            self.timeout.give_up(self.term);
        }
        self.arm_election(io);
        // This includes a node that will not campaign. It may have been removed without learning of
        // it. Then no later leader contacts it, and it must not keep naming the old leader.
        self.leader = None;
        if self.may_campaign() {
            self.pre_campaign(io);
        }
    }

    /// A node campaigns if it is a voter with a complete state. A voter that is about to be removed
    /// still counts until it knows that the removal is chosen: it may have entries that the
    /// remaining voters lack (thesis §4.2.2).
    fn may_campaign(&self) -> bool {
        self.log.members_since(self.chosen).any(|members| members.is_voter(self.me))
            && !self.incomplete
            && !self.awaits_snapshot()
    }

    /// A node votes if its log names it as voter or learner. The vote of a learner that is becoming
    /// a voter may be needed before the learner knows that (thesis §4.2.2), and the candidate knows
    /// whether the vote counts. A node that starts empty knows no members, and does not vote before
    /// it has caught up that far.
    fn may_vote(&self) -> bool {
        self.log.members().is_member(self.me) || self.config.mutations.count_non_voters()
    }

    /// Thesis §4.2.3 and §6.4.1: within one election time-out of a leader's message a node votes
    /// for nobody else, because the leader may have a lease. A restarted node does not know, and
    /// waits as long. A node with a longer time-out of its own protects the leader for that time.
    fn protects_leader(&self, now: Time) -> bool {
        let timeout = self.timeout.current();
        self.is_leader()
            || now < self.quiet_until
            || self.heard_at.is_some_and(|heard| now < heard + timeout)
    }

    /// Thesis §9.6: ask before disturbing anyone with a new term.
    fn pre_campaign(&mut self, io: &mut impl Io<R>) {
        self.role = Role::PreCandidate(vec![self.me]);
        if self.is_elected(&[self.me]) {
            self.start_election(false, io);
            return;
        }
        let (last_index, last_term) = (self.log.last(), self.log.last_term());
        for to in self.electorate() {
            io.send(to, Message::PreVote { term: self.term.next(), last_index, last_term });
        }
    }

    /// The nodes whose votes are asked for.
    fn electorate(&self) -> Vec<NodeId> {
        let members = self.log.members();
        let anyone = self.config.mutations.count_non_voters();
        let mut asked = members.all();
        asked.retain(|&node| node != self.me && (anyone || members.is_voter(node)));
        asked
    }

    /// True if the votes elect a leader. Only votes of voters count, in each half of a joint
    /// membership.
    fn is_elected(&self, votes: &[NodeId]) -> bool {
        let members = self.log.members();
        if self.config.mutations.count_non_voters() {
            return votes.len() >= self.config.quorums.election(members.voters.len());
        }
        members.is_quorum(|n| self.config.quorums.election(n), |node| votes.contains(&node))
    }

    /// True if this node's log contains no entry that a log with this end may lack (Raft §5.4.1).
    fn may_be_led_by(&self, last_index: Index, last_term: Term) -> bool {
        let any_term = self.config.mutations.longest_log();
        let last_term = if any_term { self.log.last_term() } else { last_term };
        self.log.is_covered_by(last_index, last_term)
    }

    pub(super) fn on_pre_vote(
        &mut self,
        from: NodeId,
        term: Term,
        last_index: Index,
        last_term: Term,
        io: &mut impl Io<R>,
    ) {
        let granted = term > self.term
            && self.may_vote()
            && !self.protects_leader(io.now())
            && self.may_be_led_by(last_index, last_term);
        let term = if granted { term } else { self.term };
        self.send_when_term_durable(from, Message::PreVoteReply { term, granted }, io);
    }

    pub(super) fn on_pre_vote_reply(
        &mut self,
        from: NodeId,
        term: Term,
        granted: bool,
        io: &mut impl Io<R>,
    ) {
        if !granted {
            // A voter in a later term could never grant this vote: catch up with its term first.
            if term > self.term {
                self.step_down(term, None, io);
            }
            return;
        }
        let next = self.term.next();
        let Role::PreCandidate(votes) = &mut self.role else { return };
        if term != next || votes.contains(&from) {
            return;
        }
        votes.push(from);
        let votes = std::mem::take(votes);
        if self.is_elected(&votes) {
            self.start_election(false, io);
        } else {
            self.role = Role::PreCandidate(votes);
        }
    }

    /// Raft §5.2: a new term and a vote for itself. Both are durable before any request is sent.
    pub(super) fn start_election(&mut self, transfer: bool, io: &mut impl Io<R>) {
        self.enter_term(self.term.next(), Some(self.me));
        self.role = Role::Candidate { votes: Vec::new(), transfer };
        self.persist_hard_state(io);
        self.arm_election(io);
        if self.is_term_durable() {
            self.on_vote_durable(self.term, io);
        } else {
            self.campaign_when_durable();
        }
    }

    /// The candidate's own vote is durable.
    pub(super) fn on_vote_durable(&mut self, term: Term, io: &mut impl Io<R>) {
        let me = self.me;
        let transfer = match &mut self.role {
            Role::Candidate { votes, transfer } if term == self.term => {
                votes.push(me);
                *transfer
            }
            Role::Candidate { .. } | Role::Follower | Role::PreCandidate(_) | Role::Leader(_) => {
                return;
            }
        };
        if self.is_elected(&[me]) {
            self.lead(io);
            return;
        }
        let (last_index, last_term) = (self.log.last(), self.log.last_term());
        for to in self.electorate() {
            io.send(to, Message::RequestVote { term, last_index, last_term, transfer });
        }
    }

    /// Raft §5.2 and §5.4.1.
    pub(super) fn on_request_vote(
        &mut self,
        from: NodeId,
        term: Term,
        (last_index, last_term): (Index, Term),
        transfer: bool,
        io: &mut impl Io<R>,
    ) {
        let is_protected = !transfer && self.protects_leader(io.now());
        if term < self.term || (term > self.term && is_protected) {
            let no = Message::VoteReply { term: self.term, granted: false };
            self.send_when_term_durable(from, no, io);
            return;
        }
        let is_free = term > self.term || self.vote.is_none_or(|vote| vote == from);
        let granted = is_free
            && !is_protected
            && self.may_vote()
            && self.may_be_led_by(last_index, last_term);
        let vote = granted.then_some(from);
        if term > self.term {
            self.step_down(term, vote, io);
        } else if granted && self.vote.is_none() {
            self.vote = vote;
            self.persist_hard_state(io);
        }
        if granted {
            // Give the candidate time to win before competing with it.
            self.election_at = self.election_at.max(io.now() + self.drawn);
        }
        self.send_when_term_durable(from, Message::VoteReply { term, granted }, io);
    }

    pub(super) fn on_vote_reply(
        &mut self,
        from: NodeId,
        term: Term,
        granted: bool,
        io: &mut impl Io<R>,
    ) {
        if term > self.term {
            self.step_down(term, None, io);
            return;
        }
        if granted {
            self.timeout.hear_in(term, io.now());
        }
        let current = self.term;
        let Role::Candidate { votes, .. } = &mut self.role else { return };
        if !granted || term < current || votes.contains(&from) {
            return;
        }
        votes.push(from);
        let votes = votes.clone();
        // A voter answers only a request, and requests were sent after the candidate's own vote was
        // durable.
        if self.is_elected(&votes) {
            self.lead(io);
        }
    }

    /// Thesis §3.10: campaign at once, with the leader's permission. The permission is void if a
    /// later message of the same leader arrived before, which may have revoked it. It is also void
    /// if this node has received nothing from the leader since it started, and so cannot know.
    pub(super) fn on_timeout_now(
        &mut self,
        from: NodeId,
        term: Term,
        round: u64,
        io: &mut impl Io<R>,
    ) {
        let is_current = term == self.term
            && self.leader == Some(from)
            && self.heard_at.is_some()
            && self.beat.round <= round;
        if is_current && self.may_campaign() && matches!(self.role, Role::Follower) {
            self.start_election(true, io);
        }
    }

    fn enter_term(&mut self, term: Term, vote: Option<NodeId>) {
        self.term = term;
        self.vote = vote;
        self.leader = None;
        // All chosen entries agree with the log of every later leader.
        self.received = self.chosen;
        self.acked = Index(0);
        self.owed = Index(0);
        self.beat = Beat::default();
    }

    /// Becomes a follower of `term`, which may be the current one.
    pub(super) fn step_down(&mut self, term: Term, vote: Option<NodeId>, io: &mut impl Io<R>) {
        let old_term = self.term;
        let role = std::mem::replace(&mut self.role, Role::Follower);
        if term > self.term {
            self.enter_term(term, vote);
            self.persist_hard_state(io);
        }
        if let Role::Leader(lead) = role {
            self.leader = None;
            self.orders.on_deposed();
            // Before `Deposed`: the requester is still there, and the numbers of checks start again
            // with the next leadership.
            for id in lead.reads_waiting() {
                self.tell(Event::ReadFailed { id });
            }
            self.tell(Event::Deposed { term: old_term });
            io.cancel_timer(Timer::Heartbeat);
            // Its own lease may still be valid by promises of others. Its vote does no harm,
            // because it serves nothing any more.
            self.received = self.chosen;
            self.arm_election(io);
        }
    }

    /// True if the message is from the current leader. Raft §5.1 and §5.2.
    pub(super) fn follows(
        &mut self,
        from: NodeId,
        term: Term,
        beat: Beat,
        io: &mut impl Io<R>,
    ) -> bool {
        let (now, before) = (io.now(), self.timeout.current());
        self.timeout.hear_in(term, now);
        if term < self.term {
            // Informs a deposed leader, or one that a failed candidate overtook, about the later
            // term. The reply must not contain the beat. If the sender leads the later term when
            // the reply arrives, a round and a time of its earlier term would look like a proof for
            // the new one.
            let reply = Message::HeartbeatReply {
                term: self.term,
                matched: Index(0),
                received: Index(0),
                beat: Beat::default(),
                sum: None,
            };
            self.send_when_term_durable(from, reply, io);
            return false;
        }
        if term > self.term {
            self.step_down(term, None, io);
        }
        assert!(
            !self.is_leader() && self.leader.is_none_or(|leader| leader == from),
            "{self}: {from} leads {term} too"
        );
        if let Some(heard) = self.heard_at.filter(|_| self.leader.is_some()) {
            self.timeout.hear_after(now.since(heard), now);
        }
        if self.timeout.current() != before {
            self.draw(io);
        }
        self.role = Role::Follower;
        self.leader = Some(from);
        self.heard_at = Some(now);
        self.election_at = now + self.drawn;
        if beat.round > self.beat.round {
            self.beat = beat;
        }
        true
    }

    /// True if this node leads the term that an answer belongs to.
    pub(super) fn leads(&mut self, term: Term, io: &mut impl Io<R>) -> bool {
        self.timeout.hear_in(term, io.now());
        if term > self.term {
            self.step_down(term, None, io);
        }
        term == self.term && self.is_leader()
    }
}
